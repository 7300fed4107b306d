"""Routes: the choice of replicas, and the fate of requests when replicas refuse, hang and die."""

import asyncio
import json
import socket
import threading
from contextlib import AsyncExitStack
from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.routing.config import RouterConfig
from jaxserve.routing.replicas import Replicas
from jaxserve.scheduling.router import NO_PREFIX
from tests.routing.conftest import Replica, Routed, routed

BODY = {"prompt": "def main(", "max_tokens": 4}


def post(router: Routed, body: dict[str, Any] | None = None, path: str = "/v1/completions", **options: Any) -> Any:
    return router.client.post(path, json=BODY if body is None else body, **options)


def wait_until(condition: Any) -> None:
    """Wait until a condition holds, for at most 10 s."""
    for _ in range(2000):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("the condition has not come true")


def test_requests_with_a_common_prefix_share_a_replica() -> None:
    replicas = [Replica(), Replica(), Replica()]
    prompts = ["the quick brown fox " * 200, "jumps over the lazy dog " * 200, "and away it goes again " * 200]
    with routed(replicas) as router:
        for turn in range(4):
            for prompt in prompts:
                assert post(router, {"prompt": prompt + str(turn)}).status_code == 200
    assert [len(replica.bodies) for replica in replicas] == [4, 4, 4]
    assert all(len({body[:200] for body in replica.bodies}) == 1 for replica in replicas)


def test_keys_have_prefixes_of_their_own() -> None:
    replicas = [Replica(), Replica()]
    with routed(replicas) as router:
        body = {"prompt": "the quick brown fox " * 200}
        post(router, body, headers={"authorization": "Bearer a"})
        holder = 0 if replicas[0].bodies else 1
        router.replicas[holder].load = {"num_running": 3}
        replica = router.app.replicas.all[holder]
        wait_until(lambda: replica.report.num_running == 3)
        post(router, body, headers={"authorization": "Bearer b"})
        assert len(replicas[1 - holder].bodies) == 1, "b has nothing cached there"
        post(router, body, headers={"authorization": "Bearer a"})
        assert len(replicas[holder].bodies) == 2, "what is cached saves more than the load costs"


def test_a_faster_replica_gets_more() -> None:
    """With a report of its time per token, a replica of three times the speed gets three times the load."""
    replicas = [Replica(load={"prompt_token_s": 0.003}), Replica(load={"prompt_token_s": 0.001})]
    with routed(replicas) as router:
        both = router.app.replicas
        wait_until(lambda: all(each.report.prompt_token_s for each in both.all))
        for _ in range(40):
            choice = both.choose(NO_PREFIX, 100)
            assert choice is not None
            choice[0].load += 116
        loads = [each.load for each in both.all]
        for each in both.all:
            each.load = 0
    assert 2.4 < loads[1] / loads[0] < 3.6


def test_a_replica_that_reports_no_load_gets_no_more_than_others() -> None:
    """The router counts what it has given it."""

    async def choose_often(both: Replicas) -> None:
        async with AsyncExitStack() as open_requests:
            for number in range(40):
                choice = both.choose(NO_PREFIX, 100)
                assert choice is not None
                await open_requests.enter_async_context(both.serving(choice[0], NO_PREFIX, 100))
                assert abs(both.all[0].num_requests - both.all[1].num_requests) <= 1, number

    with routed([Replica(load={"num_running": 0}), Replica()]) as router:
        asyncio.run(choose_often(router.app.replicas))


def test_another_replica_takes_what_one_refuses() -> None:
    replicas = [Replica(), Replica()]
    with routed(replicas) as router:
        post(router)
        first = next(replica for replica in replicas if replica.bodies)
        first.status = 503  # precedes the next poll, which finds out
        assert [post(router).status_code for _ in range(4)] == [200] * 4
        replicas[0].status = replicas[1].status = 503
        reply = post(router)
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) >= 1


def test_without_a_replica_the_error_says_why() -> None:
    replica = Replica(status=503)
    with routed([replica]) as router:
        reply = post(router)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert f"no server is ready: {replica.url}: /ready has status 503" in reply.json()["error"]["message"]
        assert router.client.get("/ready").status_code == 503
        replica.status = 200
        wait_until(lambda: router.client.get("/ready").status_code == 200)
        assert post(router).status_code == 200
        overloaded = post(router, {}, "/v1/messages")
        assert overloaded.status_code == 200


def test_a_whole_reply_is_asked_for_again() -> None:
    replicas = [Replica(cuts=[60]), Replica(cuts=[60])]
    with routed(replicas) as router:
        reply = post(router)
        assert reply.status_code == 200
        assert reply.json() == {"answer": 1}
        assert 1 <= sum(len(replica.bodies) for replica in replicas) - 1 <= 2
        counts = router.client.get("/metrics").text
        assert 'outcome="lost"' in counts


def test_a_request_that_kills_replicas_is_given_up() -> None:
    replicas = [Replica(cuts=[10] * 9) for _ in range(4)]
    with routed(replicas, max_deaths=2) as router:
        reply = post(router)
        assert reply.status_code == 502
        assert "2 servers have died while they served this request" in reply.json()["error"]["message"]
        assert sum(len(replica.bodies) for replica in replicas) == 2


def test_a_hung_replica_loses_its_requests() -> None:
    replicas = [Replica(), Replica()]
    with routed(replicas, poll_timeout_s=0.2) as router:
        post(router)
        hung = next(replica for replica in replicas if replica.bodies)
        hung.is_hung = True
        reply = post(router)
        hung.is_hung = False
    assert reply.status_code == 200


@pytest.mark.parametrize("size", [0, 60])
def test_a_silent_replica_that_says_it_is_ready_loses_its_requests(size: int) -> None:
    """It has stopped before the first byte, or within the reply, and answers the router's questions."""
    replicas = [Replica(), Replica()]
    with routed(replicas, silence_timeout_s=0.2) as router:
        post(router)
        silent = next(replica for replica in replicas if replica.bodies)
        silent.stalls = [size]
        assert [post(router).json() for _ in range(3)] == [{"answer": 1}] * 3
        assert len(silent.bodies) == 2, "the one that it did not answer was the last for now"
        assert f'outcome="silent",replica="{silent.url}"}} 1.0' in router.client.get("/metrics").text


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("POST", "/v1/files", 404, "belongs to one server"),
        ("POST", "/v1/sessions/a/save", 404, "belongs to one server"),
        ("GET", "/v1/completions", 405, "must be called with POST, got GET"),
        ("GET", "/nothing", 404, "there is no /nothing here"),
        ("POST", "/v1/completions/../files", 404, "belongs to one server"),
    ],
)
def test_what_is_not_routed_is_refused(method: str, path: str, status: int, words: str) -> None:
    with routed([Replica()]) as router:
        reply = router.client.request(method, path)
        assert reply.status_code == status
        assert words in reply.json()["error"]["message"]
        assert not router.replicas[0].paths


def test_a_long_body_is_refused() -> None:
    with routed([Replica()], max_body_bytes=1000) as router:
        reply = post(router, {"prompt": "a" * 2000})
        assert reply.status_code == 413
        assert "at most 1000 bytes" in reply.json()["error"]["message"]


def test_a_client_that_waits_for_it_is_told_to_send_the_body() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 15\r\n\r\n"
    with routed([Replica()]) as router:
        url = router.client.base_url
        with socket.create_connection((url.host, url.port), timeout=10) as client, client.makefile("rb") as replies:
            client.sendall(head)
            assert replies.readline() == b"HTTP/1.1 100 Continue\r\n"
            client.sendall(b'{"prompt": "a"}')
            assert replies.readline() == b"\r\n"
            assert replies.readline() == b"HTTP/1.1 200 OK\r\n"
        assert router.replicas[0].bodies == [b'{"prompt": "a"}']


def test_paths_and_headers_arrive_unchanged() -> None:
    with routed([Replica()]) as router:
        router.client.get("/v1/models/a%2Fb?x=%20y")
        assert router.replicas[0].paths == ["/v1/models/a%2Fb?x=%20y"]
        assert json.loads(router.client.get("/load").text) == {"server_load": 0}


@pytest.mark.parametrize("url", ["", "10.0.0.1:80", "http://", "ftp://a", "http://a/b", "unix:", "http://a:99999"])
def test_wrong_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="replicas must be URLs as http://HOST:PORT"):
        RouterConfig(replicas=[url])


def test_replicas_must_differ() -> None:
    with pytest.raises(ConfigError, match="at least one URL"):
        RouterConfig()
    with pytest.raises(ConfigError, match="must be different"):
        RouterConfig(replicas=["http://a", "http://a"])
