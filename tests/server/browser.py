"""Headless Chromium, driven by its DevTools protocol through two pipes: no driver, no websocket."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--remote-debugging-pipe", "--window-size=1000,800"),
)
SILENCE_S = 60.0
PATH = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Browser:
    """One page in a browser of its own.

    Args:
        profile: empty directory for what the browser writes.
        url: address of the page.
    """

    def __init__(self, profile: Path, url: str) -> None:
        assert PATH is not None, "Chromium is installed"
        their_in, self._out = os.pipe()
        self._in, their_out = os.pipe()
        # The protocol is on the descriptors 3 and 4. A fork with Python code in the child would be unsafe beside jax.
        command = f'exec "$0" "$@" 3<&{their_in} 4>&{their_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, PATH, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(their_in, their_out),
            stderr=subprocess.DEVNULL,
        )
        for descriptor in (their_in, their_out):
            os.close(descriptor)
        self._ids, self._rest, self._session = itertools.count(1), b"", None
        self.messages: list[dict[str, Any]] = []  # messages of the console, and failures
        target = self.call("Target.createTarget", url=url)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and return its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == number:
                assert "error" not in reply, reply
                return reply["result"]
            if reply.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.messages.append(reply)

    def _read(self) -> Any:
        while b"\0" not in self._rest:
            assert select.select([self._in], [], [], SILENCE_S)[0], "the browser is silent"
            data = os.read(self._in, 65536)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript in the page."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, script: str, seconds: float = 30) -> Any:
        """Return the value of an expression once it is true; until the page is there, it is not."""
        script = f"(() => {{ try {{ return {script} }} catch {{ return false }} }})()"
        end_s = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end_s, f"{script} has not come true: {self.run('document.body.innerText')}"
            time.sleep(0.05)
        return value

    def screenshot(self) -> bytes:
        """Return the page as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        """End the browser."""
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait(20)
