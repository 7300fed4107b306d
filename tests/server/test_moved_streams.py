"""Moved streams: a router continues the streams of dead servers with the same tokens, wherever they break off."""

import random
from typing import Any

import pytest

from tests.routing.conftest import Replica, routed
from tests.server.conftest import Running
from tests.server.test_resumption import body_of, merged

KINDS = ("completion", "prompts, samples, penalties", "constrained", "response", "message")


def events_from(client: Any, path: str, body: dict[str, Any]) -> bytes:
    """Return all bytes of a streamed reply."""
    with client.stream("POST", path, json=body) as reply:
        data: bytes = reply.read()
        assert reply.status_code == 200, data
    assert b":jaxserve" not in data
    return data


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_does_not_notice_deaths(server: Running, kind: str) -> None:
    path, body = body_of(kind)
    body |= {} if path in ("/v1/responses", "/v1/messages") else {"seed": 5}
    replicas = [Replica(backend=int(server.url.rpartition(":")[2])) for _ in range(3)]
    rng = random.Random(kind)
    with routed(replicas, max_deaths=9) as router:
        whole = events_from(router.client, path, body)
        for _ in range(4):
            for replica in replicas:
                replica.cuts = [rng.randrange(50, len(whole) + 600)] if rng.random() < 0.7 else []
            again = events_from(router.client, path, body)
            if "seed" in body:
                assert merged(again)[0] == merged(whole)[0]
            _, names, _, _, end = merged(again)
            assert len(names) == len(merged(whole)[1])
            assert end == whole[-14:]
        assert router.app.counts.num_failed == 0


def test_a_stream_that_cannot_move_ends_with_an_error(server: Running) -> None:
    path, body = body_of("completion")
    replicas = [Replica(backend=int(server.url.rpartition(":")[2]), cuts=[700]) for _ in range(2)]
    with routed(replicas) as router, router.client.stream("POST", path, json=body | {"logprobs": 1}) as reply:
        data = reply.read()
    assert b"a stream of this kind cannot continue on another one" in data.split(b"\n\n")[-2]


def test_a_stream_does_not_wait_forever_for_servers_that_refuse(server: Running) -> None:
    path, body = body_of("completion")
    first = Replica(backend=int(server.url.rpartition(":")[2]), cuts=[700])
    full = Replica(is_full=True)
    with routed([first, full], failover_timeout_s=0.5, poll_interval_s=0.1) as router:
        router.app.replicas.all[1].load += 10**6  # so that the first one gets the request
        with router.client.stream("POST", path, json=body) as reply:
            parts = reply.iter_raw()
            data = next(parts)
            first.is_full = True
            data += b"".join(parts)
        router.app.replicas.all[1].load -= 10**6
        assert b"no server is ready: all refuse" in data.split(b"\n\n")[-2]
        assert len(first.bodies) + len(full.bodies) < 20, "it must ask only once per interval"
