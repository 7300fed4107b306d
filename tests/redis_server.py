"""A Redis server of the tests' own."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest


class RedisServer:
    """A running server, on a socket in a folder; skips the test if none is installed."""

    def __init__(self, folder: Path, *options: str) -> None:
        if (server := shutil.which("redis-server")) is None:
            pytest.skip("redis-server is not installed")
        self.socket = folder / "socket"
        given = ("--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", str(folder), *options)
        self.process = subprocess.Popen([server, *given], stdout=subprocess.DEVNULL)
        until_s = time.monotonic() + 20
        while not self.socket.exists():
            assert time.monotonic() < until_s, "the server has not begun"
            time.sleep(0.01)

    def __enter__(self) -> "RedisServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
