"""Shared stores that fail, hang, die or lose pages: the same tokens, and no error to a request."""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.kv_store_config import KVStoreConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.execution import store_pages
from jaxserve.execution.store_pages import StorePages
from jaxserve.scheduling.kv_cache.shared_store import DirectoryStore, Seal, StoreError
from tests.e2e.sharing import GREEDY, HIT, PROMPT, Share, fill, store_of
from tests.e2e.sizes import SIZES
from tests.e2e.workloads import generate, tokens
from tests.redis_server import RedisServer

pytestmark = pytest.mark.usefixtures("any_load_pays")  # loads do not depend on the speed of this machine


class BadStore:
    """Store that fails or does not answer."""

    def __init__(self, hangs: bool) -> None:
        self._hangs = hangs

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*_: object) -> Any:
            if self._hangs:
                time.sleep(1.0)
            raise StoreError("it is broken")

        return fail


@pytest.mark.long
@pytest.mark.parametrize("hangs", [False, True])
def test_a_bad_store_delays_requests_by_its_timeout_only(
    share: Share, monkeypatch: pytest.MonkeyPatch, hangs: bool, tmp_path: Path
) -> None:
    plain = share()
    (expected,) = fill(plain, PROMPT)
    monkeypatch.setattr(StorePages, "__init__", _opening(BadStore(hangs)))
    engine = share({"url": str(tmp_path / "store"), "timeout_s": 0.1})
    for _ in range(2):
        began_s = time.monotonic()
        (output,) = generate(engine, [PROMPT], GREEDY)
        assert output.outputs[0].token_ids == expected
        assert time.monotonic() - began_s < 5
        engine.reset_prefix_cache()
    assert store_of(engine)._is_skipped
    engine.check_integrity()


def _opening(store: Any) -> Callable[..., None]:
    """Return a constructor of `StorePages` with this store."""
    original = StorePages.__init__

    def init(self: StorePages, *args: Any, **options: Any) -> None:
        original(self, *args, **options, new_store=lambda *_: store)

    return init


@pytest.mark.long
def test_a_killed_server_is_skipped_and_used_again(
    share: Share, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(store_pages, "SKIP_S", 0.05)
    engine = share(f"unix:{tmp_path}/socket")  # there is no server yet
    (ids,) = fill(engine, PROMPT)
    time.sleep(0.1)
    with RedisServer(tmp_path):
        other = tokens(33, "second")
        (expected,) = fill(engine, other)
        second = share(f"unix:{tmp_path}/socket")
        (output,) = generate(second, [other], GREEDY)
        assert (output.cached_tokens.store, output.outputs[0].token_ids) == (HIT, expected)
    (output,) = generate(second, [PROMPT], GREEDY)
    assert (output.num_cached_tokens, output.outputs[0].token_ids) == (0, ids)
    second.check_integrity()


class FaultyStore:
    """A directory that fails, forgets or damages a value in 5% of all calls."""

    def __init__(self, store: DirectoryStore, seed: int) -> None:
        self._store, self._random, self.num_faults = store, random.Random(seed), 0

    def _fault(self) -> str | None:
        if self._random.random() >= 0.05:
            return None
        self.num_faults += 1
        return self._random.choice(("error", "lost", "damaged"))

    def has(self, names: Sequence[str]) -> list[bool]:
        found = self._store.has(names)
        match self._fault():
            case "error":
                raise StoreError("it is broken")
            case "lost":
                return [False] * len(names)
            case "damaged":
                return [True] * len(names)
        return found

    def read(self, name: str) -> bytes | None:
        value = self._store.read(name)
        match self._fault():
            case "error":
                raise StoreError("it is broken")
            case "lost":
                return None
            case "damaged" if value is not None:
                index = self._random.randrange(len(value))
                return value[:index] + bytes([value[index] ^ 1]) + value[index + 1 :]
        return value

    def write(self, name: str, value: bytes) -> bool:
        match self._fault():
            case "error":
                raise StoreError("it is broken")
            case "lost":
                return False
            case "damaged":
                return self._store.write(name, value[: len(value) // 2])
        return self._store.write(name, value)

    def delete(self, name: str) -> None:
        self._store.delete(name)

    def close(self) -> None:
        pass


@pytest.mark.long
def test_a_thousand_requests_with_faults_lose_nothing(
    share: Share, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, llama: Path
) -> None:
    """Two engines that share a store with faults: the tokens of one without, and all pages at the end."""
    monkeypatch.setattr(store_pages, "SKIP_S", 0.002)
    prompts = [tokens(9 + number % 13, f"prompt {number % 60}") for number in range(500)]
    plain = DrivenEngine(EngineConfig(str(llama), skip_tokenizer_init=True, **SIZES))
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in generate(plain, prompts, short)]
    plain.close()
    stores: list[FaultyStore] = []
    original = StorePages.__init__

    def init(self: StorePages, *args: Any, **options: Any) -> None:
        def new_store(config: KVStoreConfig, seal: Seal) -> FaultyStore:
            stores.append(FaultyStore(DirectoryStore(tmp_path / "faulty", config, seal), len(stores)))
            return stores[-1]

        original(self, *args, **options, new_store=new_store)

    monkeypatch.setattr(StorePages, "__init__", init)
    engines = [share(str(tmp_path / "faulty")) for _ in range(2)]
    for engine in engines:
        for first in range(0, len(prompts), 50):
            outputs = generate(engine, prompts[first : first + 50], short)
            assert [output.outputs[0].token_ids for output in outputs] == expected[first : first + 50]
        engine.check_integrity()
        assert engine.occupancy.num_pages_used == 0
        assert engine.stats.cached_tokens.store > 0
    assert sum(store.num_faults for store in stores) > 20
