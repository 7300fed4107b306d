"""Ray Serve: streams that survive replicas, the choice of replicas, their number; and all of it on a local Ray."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

pytest.importorskip("starlette", reason="Ray Serve is not installed: pip install 'ray[serve]'")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own
    from ray.exceptions import RayActorError, TaskCancelledError

    from jaxserve.cli.ray_serve import build
    from jaxserve.errors import ConfigError
    from jaxserve.openai.resumption import HEADER
    from jaxserve.routing.ray_serve import WAIT, Front, Head, PrefixRouter, WaitPolicy
    from jaxserve.server.config import ServerConfig

from tests.waiting import until

pytestmark = [
    pytest.mark.long,  # importing Ray Serve takes two seconds
    # Ray forks to start its processes, which execute others at once; jax, started by other tests here, warns of it.
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray Serve's own
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

EVENTS = [(b"content-type", b"text/event-stream")]


class Replicas:
    """Stand-ins for replicas: each call takes the next script, with "dies" where a replica dies."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts, self.calls = [*scripts], list[tuple[Head, bytes]]()

    async def serve(self, head: Head, body: bytes) -> AsyncIterator[Any]:
        self.calls.append((head, body))
        for part in self.scripts.pop(0):
            if part == "dies":
                raise RayActorError
            if part == "is silent":
                await asyncio.Event().wait()
            if part == "cancelled":
                raise TaskCancelledError
            yield part


def front(
    replicas: Replicas, body: bytes, root: str, silence_timeout_s: float = 60.0, **options: Any
) -> list[dict[str, Any]]:
    """Return the messages that the front sends for a request below a root."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"connection", b"close"), (HEADER, b"the client's")]
    scope = {"type": "http", "method": "POST", "headers": headers, "root_path": root}
    scope |= {"path": f"{root}/v1/completions", "raw_path": f"{root}/v1/completions".encode()}
    asyncio.run(Front(replicas.serve, ServerConfig(**options), 3, silence_timeout_s)(scope, receive, send))
    return sent


def ask(replicas: Replicas, body: bytes = b'{"prompt": "a"}', **options: Any) -> tuple[int, dict[bytes, bytes], bytes]:
    """Return status, headers and body of a reply through the front."""
    sent = front(replicas, body, "", **options)
    assert not sent[-1].get("more_body")
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(each.get("body", b"") for each in sent[1:])


def test_a_stream_continues_after_what_its_client_has_got() -> None:
    head, comment = (200, [*EVENTS, (HEADER, b"1")]), b":jaxserve [1,0,[[0,[17,18],9,0]]]\n\n"
    replicas = Replicas([head, b"data: one\n\n" + comment, b"data: lo", "dies"], ["dies"], [head, b"data: two\n\n"])
    status, headers, data = ask(replicas)
    assert (status, data) == (200, b"data: one\n\ndata: two\n\n")
    assert HEADER not in headers
    first, _, last = (json.loads(body) for _, body in replicas.calls)
    assert first == {"prompt": "a"}
    assert last["resume"] == {"num_events": 1, "samples": [[0, 0, [17, 18], 9, False]]}
    identities = {dict(head.headers)[HEADER] for head, _ in replicas.calls}
    assert len(identities) == 1, "all replicas make the same reply"
    assert b"connection" not in dict(replicas.calls[0][0].headers)


def test_a_reply_is_whole_or_an_error_with_a_type() -> None:
    whole = [(200, [(b"content-type", b"application/json")]), b'{"a', b'": 1}']
    assert ask(Replicas([*whole[:2], "dies"], whole))[::2] == (200, b'{"a": 1}')
    assert ask(Replicas([(503, [(b"retry-after", b"7")]), b"{}"]))[:2] == (503, {b"retry-after": b"7"})
    status, _, data = ask(Replicas(["dies"], ["dies"], ["dies"]))
    assert (status, json.loads(data)["error"]["code"]) == (502, "server_died")
    status, _, data = ask(Replicas([(200, EVENTS), b"data: one\n\n", "dies"]))  # such as a stream of log probabilities
    assert status == 200
    assert data.startswith(b"data: one\n\ndata: ")
    assert json.loads(data[17:])["error"]["code"] == "server_died"
    assert ask(Replicas(), b"x" * 100, max_body_bytes=99)[0] == 413


def test_a_silent_replica_loses_its_requests() -> None:
    head, comment = (200, [*EVENTS, (HEADER, b"1")]), b":jaxserve [1,0,[[0,[17],9,0]]]\n\n"
    replicas = Replicas(["is silent"], [head, b"data: one\n\n" + comment, "is silent"], [head, b"data: two\n\n"])
    assert ask(replicas, silence_timeout_s=0.05)[::2] == (200, b"data: one\n\ndata: two\n\n")
    assert [head.attempt for head, _ in replicas.calls] == [0, 1, 2]
    identities = [[value for name, value in head.headers if name == HEADER] for head, _ in replicas.calls]
    assert identities == [identities[0]] * 3
    assert len(identities[0]) == 1, "the client does not choose it"
    status, _, data = ask(Replicas(*[["is silent"]] * 3), silence_timeout_s=0.02)
    assert (status, json.loads(data)["error"]["code"]) == (502, "server_died")


def test_servers_get_paths_without_the_prefix_of_the_application() -> None:
    replicas = Replicas([(200, []), b"{}"])
    assert front(replicas, b"{}", "/models/a")[0]["status"] == 200
    assert replicas.calls[0][0].path == "/v1/completions"


def test_a_cancelled_request_is_not_sent_to_another_replica() -> None:
    replicas = Replicas([(200, EVENTS), b"data: one\n\n", "cancelled"], [(200, EVENTS)])
    assert [each.get("body") for each in front(replicas, b"{}", "")] == [None, b"data: one\n\n"]
    assert len(replicas.calls) == 1


def pending(prompt: str, name: str = "", attempt: int = 0) -> Any:
    head = Head("POST", "/v1/completions", [(HEADER, name.encode())] if name else (), attempt)
    args = [head, json.dumps({"prompt": prompt}).encode()]
    return SimpleNamespace(args=args, metadata=SimpleNamespace(internal_request_id=name))


def test_prompts_go_to_idle_replicas_and_to_those_that_know_them() -> None:
    class Router(PrefixRouter):  # type: ignore[misc]
        curr_replicas = dict.fromkeys("ab")

        def __init__(self) -> None:
            self.initialize_state()

    router = Router()
    replicas = [SimpleNamespace(replica_id=name, routing_stats={}) for name in "ab"]

    def choose(prompt: str) -> str:
        ranks = asyncio.run(router.choose_replicas(replicas, pending(prompt)))
        assert sorted(each.replica_id for rank in ranks for each in rank) == [each.replica_id for each in replicas]
        return str(ranks[0][0].replica_id)

    texts = ["one " * 300, "two " * 300]
    first = choose(texts[0])
    router.on_request_routed(pending(texts[0], "1"), first, None)
    second = choose(texts[1])
    assert second != first, "the other one has less to do"
    router.on_request_routed(pending(texts[1], "2"), second, None)
    assert [choose(text) for text in texts] == [first, second]
    for name, replica in (("1", first), ("2", second)):
        router.on_request_completed(replica, name)
    replicas[0].routing_stats = {"num_running": 0, "num_waiting_tokens": 10**6}
    assert [choose(text) for text in texts] == ["b", "b"], "its load outweighs what it knows"
    again = pending(texts[0], "3", attempt=1)
    router.on_request_routed(again, "b", None)
    ranks = asyncio.run(router.choose_replicas(replicas, again))
    assert [[each.replica_id for each in rank] for rank in ranks] == [[], ["a"], ["b"]], "b has been tried"
    replicas, router.curr_replicas = [replicas[0]], {"a": None}
    assert choose(texts[1]) == "a"


def test_replicas_are_added_by_the_wait() -> None:
    def count(num: int, *waits_s: float) -> int:
        metrics = {WAIT: dict(enumerate(waits_s))}
        context = SimpleNamespace(target_num_replicas=num, aggregated_metrics=metrics, total_num_requests=1)
        found, state = WaitPolicy(2.0)(context)
        assert not state
        return found

    assert count(1, 3.0) == count(1, 99.0) == 2
    assert count(4, 3.0, 3.0, 1.0, 3.0) == 5
    assert count(2, 1.0, 1.0) == 2, "one would wait for 2 s"
    assert count(2, 0.1, 0.1) == 1
    assert count(1, 0.0) == count(0) == count(1) == 1


def test_wrong_options_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])
    for given, message in (
        ({"nonsense": "1"}, "unrecognized arguments: --nonsense=1"),
        ({"min-replicas": "3", "max_replicas": "2"}, "min_replicas must be at most max_replicas, got 3 and 2"),
        ({"target-wait-s": "0"}, "target_wait_s must be"),
        ({"tensor-parallel-size": "4"}, "must fit on the cluster"),
        ({"port": "1"}, "unrecognized arguments: --port=1"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(given)
    assert build({"max-replicas": "2", "enable-prefix-caching": "false"}) is not None


class OnRay(NamedTuple):
    """The application on a Ray of two CPUs, each for one engine of the embedded model.

    Attributes:
        client: client of the application.
    """

    client: httpx.Client

    @classmethod
    @contextlib.contextmanager
    def start(cls, **options: str) -> Iterator["OnRay"]:
        """Start it, and end it."""
        import ray
        from ray import serve

        port = free_port()
        ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=2**27, log_to_driver=False)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(build({"max-replicas": "2", "max-num-seqs": "2", "compile-ahead": "minimal"} | options))
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                yield cls(client)
        finally:
            serve.shutdown()
            ray.shutdown()

    def text(self, on_part: Callable[[int], None] = lambda number: None, **body: Any) -> str:
        """Return the text of a streamed reply, calling `on_part` with each part's number."""
        data = ""
        with self.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
            for number, part in enumerate(reply.iter_text()):
                data += part
                on_part(number)
        assert data.endswith("data: [DONE]\n\n")
        events = [json.loads(line[6:]) for line in data.split("\n\n")[:-2]]
        return "".join(choice["text"] for event in events for choice in event["choices"])

    @staticmethod
    def engines() -> dict[int, float]:
        """Return the processor time of each engine's process."""
        found = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it may end meanwhile
                if "ServeReplica:default:engines" in " ".join(process.cmdline()):
                    found[process.pid] = process.cpu_times().user
        return found


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo Ray's settings afterwards."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        monkeypatch.delenv(name)


@pytest.mark.full
@pytest.mark.exhaustive  # engines start in half a minute
@pytest.mark.usefixtures("environment")
def test_a_killed_replica_is_not_noticed() -> None:
    body = {"prompt": "def main(", "max_tokens": 200, "ignore_eos": True, "temperature": 0.8, "seed": 7}
    with OnRay.start(**{"min-replicas": "2"}) as app:
        expected, killed = app.text(**body), list[int]()
        assert len(app.engines()) == 2

        def kill_busy(number: int) -> None:
            if number == 10:
                first = app.engines()
                time.sleep(0.2)
                last = app.engines()
                killed.append(max(first, key=lambda each: last[each] - first[each]))
                os.kill(killed[0], signal.SIGKILL)

        assert app.text(kill_busy, **body) == expected
        until(lambda: len(app.engines()) == 2 and killed[0] not in app.engines(), 120)  # Ray replaces it
        assert app.text(**body) == expected


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.usefixtures("environment")
def test_a_replica_is_added_under_load() -> None:
    body = {"prompt": "def main(", "max_tokens": 400, "ignore_eos": True}
    with OnRay.start(**{"target-wait-s": "0.5", "upscale-delay-s": "1"}) as app:
        assert len(app.engines()) == 1
        ended = threading.Event()

        def load() -> None:
            while not ended.is_set():
                assert app.client.post("/v1/completions", json=body).status_code == 200

        with ThreadPoolExecutor(12) as pool:
            done = [pool.submit(load) for _ in range(12)]
            try:
                until(lambda: len(app.engines()) == 2, 120)
            finally:
                ended.set()
            for each in done:
                each.result()
