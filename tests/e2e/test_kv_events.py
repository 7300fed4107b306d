"""Changes of the prefix cache as vLLM's messages: a subscriber always knows which blocks can be found."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from jaxserve.api.config import EngineConfig
from jaxserve.api.kv_events_config import KVEventsConfig
from jaxserve.api.reuse_hint import ReuseHint
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.core.kv_publisher import _END, KVPublisher, _for_rank
from jaxserve.errors import ConfigError
from jaxserve.offline.llm import LLM
from jaxserve.scheduling.kv_cache.page_events import AllCleared, BlocksStored
from tests.e2e.sizes import SIZES
from tests.e2e.workloads import generate, tokens

pytestmark = pytest.mark.usefixtures("any_load_pays")  # loads do not depend on the speed of this machine

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PAGE_SIZE = SIZES["page_size"]


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """vLLM's structs, as vllm/distributed/kv_events.py declares them: an array with tagged maps."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True, forbid_unknown_fields=True):
    """An event; a field of another name is an error here."""


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


class Subscriber:
    """A router's view: the blocks that can be found, their parents and tokens."""

    def __init__(self, directory: Path) -> None:
        self.context = zmq.Context()
        self.events, self.replays = f"ipc://{directory}/events", f"ipc://{directory}/replays"
        self.socket = self.context.socket(zmq.SUB)
        self.socket.subscribe("kv")
        self.blocks: dict[bytes | int, tuple[bytes | int | None, list[int]]] = {}
        self.numbers: list[int] = []
        self.seen: list[KVCacheEvent] = []

    @property
    def config(self) -> dict[str, Any]:
        return {
            "enable_kv_cache_events": True,
            "endpoint": self.events,
            "replay_endpoint": self.replays,
            "topic": "kv",
        }

    def connect(self) -> None:
        self.socket.connect(self.events)
        time.sleep(0.2)  # wait until the publisher knows of it

    def read(self, wait_s: float = 0.4) -> None:
        """Take the messages that are there."""
        while self.socket.poll(int(wait_s * 1e3)):
            topic, number, payload = self.socket.recv_multipart()
            assert topic == b"kv"
            self.numbers.append(int.from_bytes(number, "big"))
            self.apply(payload)

    def apply(self, payload: bytes) -> None:
        batch = DECODER.decode(payload)
        assert abs(batch.ts - time.time()) < 60
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            self.seen.append(event)
            match event:
                case BlockStored():
                    assert event.block_size == PAGE_SIZE
                    assert len(event.token_ids) == PAGE_SIZE * len(event.block_hashes)
                    parent = event.parent_block_hash
                    assert parent is None or parent in self.blocks
                    for index, block in enumerate(event.block_hashes):
                        ids = event.token_ids[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
                        self.blocks[block] = parent, ids
                        parent = block
                case BlockRemoved():
                    for block in event.block_hashes:
                        del self.blocks[block]
                case AllBlocksCleared():
                    self.blocks.clear()

    def num_cached(self, prompt: list[int]) -> int:
        """Return the number of the prompt's tokens that a router would expect to be cached."""
        parent, start = None, 0
        while start + PAGE_SIZE <= len(prompt):
            ids = prompt[start : start + PAGE_SIZE]
            found = [block for block, content in self.blocks.items() if content == (parent, ids)]
            if not found:
                break
            (parent,), start = found, start + PAGE_SIZE
        return start

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        """Ask for the batches from a number on."""
        with self.context.socket(zmq.DEALER) as request:
            request.connect(self.replays)
            request.send_multipart((b"", first.to_bytes(8, "big")))
            batches = []
            while request.poll(10_000):
                _, topic, number, payload = request.recv_multipart()
                if number == _END:
                    assert (topic, payload) == (b"", b"")
                    return batches
                batches.append((int.from_bytes(number, "big"), payload))
        raise AssertionError("no end")


@pytest.fixture
def subscriber(tmp_path: Path) -> Iterator[Subscriber]:
    subscriber = Subscriber(tmp_path)
    yield subscriber
    subscriber.context.destroy(linger=0)


@pytest.fixture
def open_engine(llama: Path) -> Iterator[Callable[..., DrivenEngine]]:
    with ExitStack() as stack:

        def open_engine(**options: Any) -> DrivenEngine:
            engine = DrivenEngine(EngineConfig(str(llama), skip_tokenizer_init=True, **{**SIZES, **options}))
            stack.callback(engine.close)
            return engine

        yield open_engine


def test_a_subscriber_knows_what_is_cached(subscriber: Subscriber, open_engine: Callable[..., DrivenEngine]) -> None:
    engine = open_engine(kv_events_config=subscriber.config)
    subscriber.connect()
    prompts = [tokens(33, number) for number in range(8)]
    for prompt in prompts:  # more than the pool holds
        generate(engine, [prompt], GREEDY)
    subscriber.read()
    assert any(isinstance(event, BlockRemoved) for event in subscriber.seen)
    store = engine.replicas[0].scheduler.shards[0].ledger.store
    assert subscriber.blocks.keys() == store._page_by_hash[0].keys()
    for prompt in prompts[:3]:
        expected = subscriber.num_cached(prompt)
        (output,) = generate(engine, [prompt], GREEDY)
        assert output.num_cached_tokens == min(expected, 32)
        subscriber.read()
    assert subscriber.numbers == [*range(len(subscriber.numbers))]
    engine.reset_prefix_cache()
    engine.settle()
    generate(engine, [prompts[0]], GREEDY)
    subscriber.read()
    kinds = [type(event) for event in subscriber.seen]
    assert set(kinds[kinds.index(AllBlocksCleared) + 1 :]) == {BlockStored}
    assert subscriber.num_cached(prompts[0]) == 32
    assert subscriber.num_cached(prompts[1]) == 0


@pytest.mark.long
def test_loaded_blocks_are_announced(
    subscriber: Subscriber, open_engine: Callable[..., DrivenEngine], tmp_path: Path
) -> None:
    engine = open_engine(kv_events_config=subscriber.config, kv_offloading_path=str(tmp_path / "pages"))
    subscriber.connect()
    prompts = [tokens(33, number) for number in range(8)]
    for prompt in [*prompts, *prompts]:
        generate(engine, [prompt], GREEDY)
        subscriber.read(0.1)
        assert subscriber.num_cached(prompt) == 32
    assert engine.stats.cached_tokens.disk > 0


def test_salts_stay_secret_and_sessions_are_named(
    subscriber: Subscriber, open_engine: Callable[..., DrivenEngine]
) -> None:
    engine = open_engine(kv_events_config=subscriber.config)
    subscriber.connect()
    prompt: Any = {"prompt_token_ids": tokens(9, "salted"), "cache_salt": "secret", "reuse": ReuseHint("mine")}
    engine.add_request("0", prompt, GREEDY)
    while engine.has_unfinished():
        engine.step()
    subscriber.read()
    first, *later = [event for event in subscriber.seen if isinstance(event, BlockStored)]
    assert {event.session_id for event in (first, *later)} == {"mine"}
    assert first.extra_keys is not None
    keys, *others = first.extra_keys
    assert keys is not None
    (key,) = keys
    assert len(key) == 32
    assert set(others) <= {None}
    assert not any(event.extra_keys for event in later)
    assert "secret" not in repr(subscriber.seen)


def test_missed_batches_are_replayed(subscriber: Subscriber, llama: Path) -> None:
    """With the core in another process, whose clients may come late."""
    with LLM(
        str(llama), skip_tokenizer_init=True, engine_process=True, kv_events_config=subscriber.config, **SIZES
    ) as llm:
        for number in range(3):
            llm.generate([{"prompt_token_ids": tokens(17, number)}], GREEDY, use_tqdm=False)
        time.sleep(0.3)
        batches = subscriber.replay(0)
        assert [number for number, _ in batches] == [*range(len(batches))]
        for _, payload in batches:
            subscriber.apply(payload)
        assert [subscriber.num_cached(tokens(17, number)) for number in range(3)] == [16] * 3
        assert [number for number, _ in subscriber.replay(1)] == [*range(1, len(batches))]
        assert subscriber.replay(10_000) == []


def test_a_long_replay_is_complete(subscriber: Subscriber) -> None:
    """More batches than ZeroMQ queues for a socket by default, for a client that reads none of them at first."""
    publisher = KVPublisher(KVEventsConfig(**subscriber.config), PAGE_SIZE, [None])
    try:
        for _ in range(5000):
            publisher.publish([AllCleared()])
        time.sleep(0.3)
        with subscriber.context.socket(zmq.DEALER) as request:
            request.connect(subscriber.replays)
            request.send_multipart((b"", (0).to_bytes(8, "big")))
            time.sleep(1)
            numbers = list[bytes]()
            while _END not in numbers[-1:] and request.poll(10_000):
                numbers.append(request.recv_multipart()[2])
        assert numbers == [*(number.to_bytes(8, "big") for number in range(5000)), _END]
    finally:
        publisher.close()


def test_images_are_extra_keys_of_their_blocks(subscriber: Subscriber) -> None:
    """In vLLM's form: identifier and offset, before the salt."""
    publisher: Any = KVPublisher(KVEventsConfig(**subscriber.config), PAGE_SIZE, [None])
    try:
        images = [[(bytes([7]) * 16, 2)], []]
        event = BlocksStored([b"a", b"b"], None, [0] * 2 * PAGE_SIZE, 0, b"user:secret", "", "", images)
        (image, salt), *others = publisher._event(event)["extra_keys"]
        assert (image, len(salt), others) == (("07" * 16, 2), 32, [None])
        assert "extra_keys" not in publisher._event(event._replace(salt=None, images=()))
    finally:
        publisher.close()


def test_a_failing_replay_ends_nothing_else(subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise zmq.ZMQError(zmq.EHOSTUNREACH)

    publisher: Any = KVPublisher(KVEventsConfig(**subscriber.config), PAGE_SIZE, [None])
    try:
        subscriber.connect()
        with monkeypatch.context() as broken:
            broken.setattr(publisher, "_replay", SimpleNamespace(send_multipart=fail, poll=lambda _: False))
            publisher._answer([b"client", b"", bytes(8)])
        publisher.publish([AllCleared()])
        subscriber.read()
        assert subscriber.numbers == [0]
    finally:
        publisher.close()


def test_wrong_options_are_named(tmp_path: Path) -> None:
    for value, words in (
        ({"enable_kv_cache_events": True, "publisher": "kafka"}, "publisher of kv_events_config must be"),
        ({"endpoint": "5557"}, "endpoint of kv_events_config must be a ZeroMQ address"),
        ({"port": 3}, r"unsupported kv_events_config {'port': 3}"),
        ({"buffer_steps": -1}, "buffer_steps of kv_events_config must be an integer of 0 or more"),
        ("[]", "kv_events_config must be a dict"),
    ):
        with pytest.raises(ConfigError, match=words):
            EngineConfig(kv_events_config=value)
    assert EngineConfig(kv_events_config="null").kv_events is None
    assert not KVEventsConfig(endpoint="ipc://x").is_on
    assert not KVEventsConfig(True, "null").is_on
    assert [_for_rank(each, 2) for each in ("tcp://*:5557", "tcp://*:0", "ipc://x")] == [
        "tcp://*:5559",
        "tcp://*:0",
        "ipc://x_dp2",
    ]


def test_an_address_in_use_is_named(subscriber: Subscriber, open_engine: Callable[..., DrivenEngine]) -> None:
    with subscriber.context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://*")
        with pytest.raises(ConfigError, match="must be free and valid"):
            open_engine(kv_events_config={"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"})
