"""What strangers send to the processes of a run is never decoded, and their connections lead nowhere."""

import os
import pickle
import socket
import struct
import threading
import time
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import pytest

from jaxserve.distributed import peers, run_key
from jaxserve.distributed.channel import Channel
from jaxserve.errors import ConfigError

KEY = b"k" * 32


class Evil:
    """Object that writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def channels(*, leader_key: bytes = KEY, follower_key: bytes = KEY) -> list[Any]:
    """Return both ends of a connection, or the errors of those that refuse the other."""
    ends: list[Any] = [None, None]

    def connect(index: int, endpoint: socket.socket, key: bytes) -> None:
        try:
            ends[index] = Channel(endpoint, key, is_leader=index == 0, silence_s=5)
        except Exception as error:
            ends[index] = error

    pairs = zip((0, 1), socket.socketpair(), (leader_key, follower_key), strict=True)
    threads = [threading.Thread(target=connect, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return ends


@pytest.fixture(autouse=True)
def over_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let channels run over pairs of local sockets, which have no options of TCP."""
    set_option = socket.socket.setsockopt

    def setsockopt(self: socket.socket, level: int, *rest: Any) -> None:
        if level != socket.IPPROTO_TCP or self.family != socket.AF_UNIX:
            set_option(self, level, *rest)

    monkeypatch.setattr(socket.socket, "setsockopt", setsockopt)


def test_values_arrive_in_both_directions() -> None:
    leader, follower = channels()
    values = [None, {"a": [1, 2.5, "\u00e9\ud800", None]}, "x" * 10**4, 2**80, float("inf")]
    for value in values:
        leader.send([value])
        leader.send(None)  # a heartbeat
        follower.send([value])
    for end in (leader, follower):
        assert [end.receive()[0] for _ in values] == values


def test_another_key_is_refused_by_both() -> None:
    ends = channels(follower_key=b"l" * 32)
    assert all(isinstance(end, Exception) for end in ends), ends


@pytest.mark.parametrize("change", ["content", "repeat", "omit"])
def test_a_changed_message_is_not_read(change: str) -> None:
    leader, follower = channels()
    sent: list[bytes] = []
    leader._connection = type("Tap", (), {"send_bytes": lambda _self, data: sent.append(data)})()
    leader.send(["event", 1])
    leader.send(["event", 2])
    first, second = sent
    wire = {"content": [first[:-1] + b"]" + b" "], "repeat": [first, first], "omit": [second]}[change]
    received = iter(wire)
    follower._connection = type("Tap", (), {"recv_bytes": lambda _: next(received), "poll": lambda *_: True})()
    if change == "repeat":
        assert follower.receive() == ["event", 1]
    with pytest.raises(AuthenticationError, match="changed on the way"):
        follower.receive()


def test_an_impostor_runs_nothing_and_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_WELCOMED", 4)
    listener = peers.listen("127.0.0.1")
    address = listener.getsockname()
    assert address[0] == "127.0.0.1", "it listens at no other address"
    joined: list[peers.Leader] = []
    leader = threading.Thread(target=lambda: joined.append(peers.Leader(listener, KEY, 1)))
    leader.start()
    touched = tmp_path / "touched"
    payload = pickle.dumps(Evil(touched))
    strangers = []
    for data in (
        payload,
        struct.pack("!i", len(payload)) + payload,
        struct.pack("!i", 2**31 - 1),
        b"GET / HTTP/1.1\r\n\r\n",
    ):
        strangers.append(socket.create_connection(address, timeout=5))
        strangers[-1].sendall(data)
    idle = [socket.create_connection(address, timeout=5) for _ in range(8)]
    for sock in (*strangers, *idle):
        sock.close()
    for _ in range(100):  # waits until there is a place
        try:
            follower = Channel(socket.create_connection(address, timeout=5), KEY, is_leader=False, silence_s=5)
            break
        except (OSError, EOFError):
            time.sleep(0.05)
    follower.send("process 1 on this host")
    leader.join(20)
    assert [*joined[0]._followers] == ["process 1 on this host"]
    joined[0].close()
    assert not touched.exists()


def test_a_key_is_needed_beyond_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXSERVE_RUN_KEY", raising=False)
    assert run_key.given_key(None, "127.0.0.1") is None
    assert run_key.given_key(None, "::1") is None
    for host in ("192.0.2.1", "0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="must share a key: set JAXSERVE_RUN_KEY"):
            run_key.given_key(None, host)
        assert len(run_key.given_key("x" * 16, host) or b"") == 32
    monkeypatch.setenv("JAXSERVE_RUN_KEY", "y" * 20)
    assert run_key.given_key(None, "192.0.2.1") == run_key.given_key("y" * 20, None)
    with pytest.raises(ConfigError, match="at least 16 characters, got 3"):
        run_key.given_key("abc", "127.0.0.1")


def test_a_key_file_is_of_one_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with run_key.key_file() as (name, key):
        assert run_key.read_key(name) == key
        (file,) = tmp_path.glob(f"*/{name}")
        assert file.stat().st_mode & 0o077 == 0
    for wrong in ("../x", "/etc/passwd", "run-0", name + "/"):
        with pytest.raises(ConfigError, match="must name a file of its key"):
            run_key.read_key(wrong)
    with pytest.raises(ConfigError, match="must share one in JAXSERVE_RUN_KEY"):
        run_key.read_key(name)
    file.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="closed to others"):
        run_key.key_file().__enter__()
