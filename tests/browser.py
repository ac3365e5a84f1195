"""Chromium without a window, driven over a pipe (the DevTools protocol), for tests of pages."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import threading
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class _Browser:
    """Chromium reads commands from descriptor 3, and answers on 4."""

    def __init__(self, folder: str) -> None:
        assert CHROMIUM
        commands, self.commands = os.pipe()
        self.answers, answers = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        options += ["--window-size=1280,640", "--hide-scrollbars"]
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


def evaluate(address: str, script: str, timeout: float = 120.0, png: str | None = None) -> Any:
    """What a promise in the page at this address becomes; then a picture of the page to `png`."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = _Browser(folder)
        limit = threading.Timer(timeout, browser.process.kill)
        limit.start()
        try:
            target = browser.call("Target.createTarget", url=address)["result"]["targetId"]
            attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
            session = attached["result"]["sessionId"]
            found = {"error": {}}
            while "error" in found:  # the page loads itself again while it starts
                found = browser.call(
                    "Runtime.evaluate",
                    session,
                    expression=script,
                    awaitPromise=True,
                    returnByValue=True,
                )
            if png:
                picture = browser.call("Page.captureScreenshot", session)["result"]["data"]
                with open(png, "wb") as file:
                    file.write(base64.b64decode(picture))
        finally:
            limit.cancel()
            browser.close()
    assert "exceptionDetails" not in found["result"], found
    return found["result"]["result"]["value"]
