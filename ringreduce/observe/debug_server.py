"""A page of torch's debug server (2.13 on): what each rank does now, and whom the ranks wait for.

    from ringreduce import debug_server
    from torch.distributed.debug import start_debug_server
    start_debug_server(handlers=debug_server.handlers())    # on all ranks

It adds `/ringreduce`, a table that renews itself, and `/ringreduce_metrics`, the metrics of all
ranks, which `python -m ringreduce.top http://host:25999` reads.  Needs torch's optional packages
Jinja2 and tabulate, and prometheus-client.  The server has no authentication:
torch wants it in trusted networks only.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from torch._C._distributed_c10d import _register_handler
from torch.distributed.debug._debug_handlers import default_handlers
from torch.distributed.debug._frontend import (
    DebugHandler,
    NavLink,
    Route,
    fetch_all,
    format_fetch_summary,
)

from ringreduce.observe import metrics
from ringreduce.observe.top import Looks, tables

_ENDPOINT = "ringreduce_metrics"  # of each rank's server, and of the page's

_PATIENCE = 2.0  # seconds for a rank to answer; one that is stopped does not

_PAGE = """
{% extends "base.html" %}
{% block header %}
  <h1>{% block title %}ringreduce{% endblock %}</h1>
{% endblock %}
{% block content %}{% autoescape true %}
  <style>
    .ringreduce td, .ringreduce th { padding: 2px 12px; text-align: right; white-space: nowrap; }
    .ringreduce td.text, .ringreduce th.text { text-align: left; }
    .ringreduce tr.late { color: #b00020; font-weight: bold; }
  </style>
  <p id="trouble"></p>
  <div id="ringreduce">
    <p>{{ headline }}</p>
    {% for problem in problems %}<p>{{ problem }}</p>{% endfor %}
    {% for table in tables if table.rows %}
    <table class="ringreduce">
      {% for late, cells in [(False, table.columns)] + table.rows %}
      {% set cell = "td" if loop.index0 else "th" %}
      <tr class="{{ 'late' if late }}">
        {% for text in cells %}
        <{{ cell }} class="{{ 'text' if loop.index0 in table.texts }}">{{ text }}</{{ cell }}>
        {% endfor %}
      </tr>
      {% endfor %}
    </table>
    {% endfor %}
  </div>
  <script>
    setTimeout(async function renew() {
      const trouble = document.getElementById("trouble");
      try {
        const answer = await fetch("/ringreduce", { signal: AbortSignal.timeout(10000) });
        if (!answer.ok) throw new Error(`it answers with ${answer.status}`);
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        document.getElementById("ringreduce").replaceWith(page.getElementById("ringreduce"));
        trouble.textContent = "";
      } catch (error) {
        trouble.textContent = `These figures are old; the server is asked again: ${error.message}`;
      } finally {
        setTimeout(renew, 1000);
      }
    }, 1000);
  </script>
{% endautoescape %}{% endblock %}
"""


_lock = threading.Lock()  # of the looks; torch may pickle a handler, which a lock in it prevents


class RingreduceHandler(DebugHandler):
    """The page and its data, in the server's process."""

    def __init__(self) -> None:
        self._looks = Looks()

    def routes(self) -> list[Route]:
        return [Route("/ringreduce", self._page), Route(f"/{_ENDPOINT}", self._metrics)]

    def nav_links(self) -> list[NavLink]:
        return [NavLink("/ringreduce", "ringreduce")]

    def templates(self) -> dict[str, str]:
        return {"ringreduce.html": _PAGE}

    def _page(self, request: Any) -> bytes:
        addresses, answers = fetch_all(_ENDPOINT, timeout=_PATIENCE)
        damages = metrics.Damages()
        found = metrics.statuses(_joined(answers), "an answer of the ranks", damages)
        with _lock:  # each request has a thread of its own
            view = self._looks.add(found, damages.sentences(), all_write=False)
        problems = format_fetch_summary(addresses, answers) or ""
        page: bytes = request.frontend.render_template(
            "ringreduce.html",
            headline=view.headline,
            problems=[*problems.splitlines(), *view.notes],
            tables=tables(view),
        )
        return page

    def _metrics(self, _: Any) -> bytes:
        return _joined(fetch_all(_ENDPOINT, timeout=_PATIENCE)[1])


def _joined(answers: list[Any]) -> bytes:
    return "\n".join(one.text for one in answers if one.status_code == 200).encode()


@functools.cache
def _serve_rank() -> None:
    """Lets this rank's server answer with its metrics; torch takes a name once."""
    _register_handler(_ENDPOINT, _answer)


def _answer(_: Any, response: Any) -> None:
    try:
        answer, status = metrics.text(), 200
    except Exception as error:  # torch's thread in this rank's process calls, which is to go on
        answer, status = f"{type(error).__name__}: {error}".encode(), 500
    response.set_content(answer, "text/plain; version=0.0.4")
    response.set_status(status)


def handlers(*others: DebugHandler) -> list[DebugHandler]:
    """What `start_debug_server` takes as `handlers`: torch's own, the given ones, and ringreduce's.

    Call it on all ranks: each also begins to answer the page's questions.

    Args:
        others: more handlers.

    Returns:
        The handlers, for rank 0's page.

    Raises:
        ImportError: prometheus-client is missing.
    """
    metrics.require_client()
    _serve_rank()
    return [*default_handlers(), *others, RingreduceHandler()]
