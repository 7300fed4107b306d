"""Prefill on one server and decode on another: vLLM's protocol, by hand and through the router."""

import json
import socket
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from jaxserve import __version__
from jaxserve.api.config import EngineConfig
from jaxserve.assembly.engine import Engine
from jaxserve.routing.exchange import _for_producer
from tests.e2e.sizes import SIZES
from tests.e2e.workloads import tokens
from tests.routing.conftest import Replica, routed
from tests.server.conftest import Running, running
from tests.soon_compiled import as_shipped

pytestmark = pytest.mark.usefixtures("any_load_pays")  # loads do not depend on the speed of this machine

PAGE_SIZE = SIZES["page_size"]
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
SEEDED = GREEDY | {"temperature": 1, "seed": 5}
ROLES = ("kv_producer", "kv_consumer")
PRODUCE = {"do_remote_decode": True, "do_remote_prefill": False}


class Pair(NamedTuple):
    """Two servers with one store."""

    producer: Running
    consumer: Running


def started(stack: ExitStack, model: Path, role: str, store: str) -> Running:
    """Return a server with a role."""
    with as_shipped():
        engine = Engine(EngineConfig(str(model), **SIZES, kv_store=store, kv_role=role))
    engine.wait_until_warm()
    stack.callback(engine.close)
    return stack.enter_context(running(engine, served_model_name=["tiny"]))


@pytest.fixture(scope="module")
def pair(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        store = str(tmp_path_factory.mktemp("store"))
        yield Pair(*(started(stack, llama, role, store) for role in ROLES))


def post(server: Running, status: int = 200, **body: Any) -> Any:
    reply = server.client.post("/v1/completions", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def ids(reply: Any) -> list[int]:
    """Return the generated token ids."""
    found: list[int] = reply["choices"][0]["token_ids"]
    return found


@pytest.mark.parametrize("fields", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_tokens", [30, 31, 32, 33])
def test_a_consumer_computes_only_the_last_token(pair: Pair, num_tokens: int, fields: dict[str, Any]) -> None:
    """Whatever part of the last page the prompt fills; each page is stored and loaded once."""
    producer, consumer = pair
    prompt = tokens(num_tokens, (num_tokens, fields["temperature"]))
    expected = ids(post(consumer, prompt=prompt, cache_salt="alone", **fields))
    stored, loaded = producer.engine.stats.num_stored_pages, consumer.engine.stats.num_loaded_pages
    reply = post(producer, prompt=prompt, kv_transfer_params=PRODUCE, **fields)
    params = reply["kv_transfer_params"]
    num_pages = -(-(num_tokens - 1) // PAGE_SIZE)
    assert ids(reply) == expected[:1]
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert (params["remote_num_tokens"], len(params["remote_block_ids"])) == (num_tokens - 1, num_pages)
    reply = post(consumer, prompt=prompt, kv_transfer_params=params, **fields)
    assert ids(reply) == expected
    assert reply["kv_transfer_params"] is None
    by_tier = reply["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    assert by_tier == {"device": 0, "host": 0, "disk": 0, "store": num_tokens - 1}
    assert producer.engine.stats.num_stored_pages - stored == num_pages
    assert consumer.engine.stats.num_loaded_pages - loaded == num_pages


@pytest.mark.long
def test_pages_come_from_the_memory_of_the_engine_that_computed_them(llama: Path) -> None:
    """Without that engine, the other one computes them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with ExitStack() as stack, ExitStack() as producers:
        store = f"tcp://127.0.0.1:{port}"
        pair = Pair(started(producers, llama, ROLES[0], store), started(stack, llama, ROLES[1], store))
        for fields in (GREEDY, SEEDED):
            test_a_consumer_computes_only_the_last_token(pair, 33, fields)
        prompt = tokens(33, "the producer ends")
        expected = ids(post(pair.consumer, prompt=prompt, cache_salt="alone", **GREEDY))
        params = post(pair.producer, prompt=prompt, kv_transfer_params=PRODUCE, **GREEDY)["kv_transfer_params"]
        producers.close()
        reply = post(pair.consumer, prompt=prompt, kv_transfer_params=params, **GREEDY)
        assert ids(reply) == expected
        assert not reply["usage"]["prompt_tokens_details"].get("cached_tokens_by_tier", {}).get("store")


@pytest.mark.parametrize("endpoint", ["/completions", "/chat/completions"])
def test_a_proxy_for_vllm_works(pair: Pair, endpoint: str) -> None:
    """The exchange of vLLM's example of a proxy before producers and consumers: it sends these fields and headers."""
    text = f"def {endpoint[1:4]}("
    chat = {"messages": [{"role": "user", "content": text}], "max_completion_tokens": 6}
    body = {"prompt": text, "max_tokens": 6} if endpoint == "/completions" else chat
    body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, "min_tokens": 2}
    headers = {"Authorization": "Bearer None", "X-Request-Id": str(uuid.uuid4())}

    def decode(sent: dict[str, Any]) -> tuple[str, int]:
        """Return the text of a streamed reply, and its cached tokens."""
        reply = pair.consumer.client.post("/v1" + endpoint, json=sent, headers=headers)
        assert reply.status_code == 200, reply.text
        events = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
        choices = [choice for each in events for choice in each["choices"]]
        text = "".join(choice.get("delta", {}).get("content") or choice.get("text") or "" for choice in choices)
        return text, events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]

    expected, _ = decode(body | {"cache_salt": "alone"})
    empty = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    produced = body | {"kv_transfer_params": PRODUCE | empty, "stream": False, "max_tokens": 1}
    if "max_completion_tokens" in produced:
        produced["max_completion_tokens"] = 1
    del produced["stream_options"], produced["min_tokens"]
    reply = pair.producer.client.post("/v1" + endpoint, json=produced, headers=headers)
    assert reply.status_code == 200, reply.text
    params = reply.json()["kv_transfer_params"]
    assert decode(body | {"kv_transfer_params": params}) == (expected, params["remote_num_tokens"])


def test_other_weights_and_versions_are_refused_by_name(pair: Pair, server: Running) -> None:
    prompt = tokens(9, "refused")
    params = post(pair.producer, prompt=prompt, kv_transfer_params=PRODUCE)["kv_transfer_params"]
    for changed, words in (
        ({"remote_version": "9.9"}, ("9.9", __version__)),
        ({"remote_pages": "ab" * 16}, ("ab" * 16, params["remote_pages"])),
    ):
        error = post(pair.consumer, 409, prompt=prompt, kv_transfer_params=params | changed)["error"]
        assert error["code"] == "kv_mismatch"
        assert all(word in error["message"] for word in words)
    for sent, words in (
        (PRODUCE | {"do_remote_prefill": True}, "only one of"),
        (PRODUCE | {"nonsense": 1}, "nonsense"),
        ("yes", "kv_transfer_params must be"),
    ):
        assert words in str(post(pair.consumer, 400, prompt=prompt, kv_transfer_params=sent))
    assert "stream must be false" in str(
        post(pair.consumer, 400, prompt=prompt, kv_transfer_params=PRODUCE, stream=True)
    )
    assert "--kv-store" in str(post(server, 400, prompt=prompt, kv_transfer_params=PRODUCE))
    assert post(server, prompt=prompt, kv_transfer_params={})["kv_transfer_params"] is None


def test_a_router_sends_long_prompts_to_a_producer_first(pair: Pair) -> None:
    """Whether the producer answers, refuses, dies before or in its reply, or lies: the reply is the same."""
    ports = [urlsplit(each.url).port for each in pair]
    producer, consumer = (
        Replica(backend=port, load=server.client.get("/load").json()) for port, server in zip(ports, pair, strict=True)
    )
    with routed([producer, consumer], min_transfer_tokens=40) as router:

        def check(name: str, num_transferred: int) -> None:
            prompt = tokens(60, name)
            expected = ids(post(pair.consumer, prompt=prompt, cache_salt="alone", **GREEDY))
            before = router.app.counts.num_transferred
            reply = router.client.post("/v1/completions", json={"prompt": prompt, **GREEDY})
            assert reply.status_code == 200, reply.text
            assert ids(reply.json()) == expected
            assert router.app.counts.num_transferred - before == num_transferred
            cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (59 if num_transferred else cached)
            assert len(consumer.bodies) == 1
            producer.bodies.clear()
            consumer.bodies.clear()

        check("whole", 1)
        producer.is_full = True
        check("refused", 0)
        producer.is_full = False
        for number, cut in enumerate((0, 40, 200)):  # before the reply, in its head, in its body
            for _ in range(500):
                if router.app.replicas.has_producer:
                    break
                router.client.get("/health")
            assert router.app.replicas.has_producer
            producer.cuts.append(cut)
            check(f"cut {number}", 0)
        assert ids(router.client.post("/v1/completions", json={"prompt": [1, 2], **GREEDY}).json())
        assert not producer.bodies, "short prompts are computed by consumers alone"


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"prompt": ' + b"[" * 100_000, b"\xff", b"[]", b'{"prompt": ["a"]}']
)
def test_bodies_that_no_producer_can_compute_are_passed_on(body: bytes) -> None:
    assert _for_producer(body) is None
