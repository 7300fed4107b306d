"""Pages that engines share through a directory or a Redis server: the same tokens, whoever computed them."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.core.event_log import replay_log
from jaxserve.execution.page_media import DiskPages
from jaxserve.scheduling.kv_cache.shared_store import DirectoryStore
from jaxserve.scheduling.kv_cache.stored_pages import PageKey
from tests import checkpoints
from tests.e2e.sharing import GREEDY, HIT, PROMPT, Share, fill, store_of
from tests.e2e.sizes import EOS, VOCAB_SIZE
from tests.e2e.workloads import generate

pytestmark = pytest.mark.usefixtures("any_load_pays")  # loads do not depend on the speed of this machine

SEEDED = SamplingParams(temperature=1, seed=5, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the model of `llama` with other weights."""
    path = tmp_path_factory.mktemp("other")
    checkpoints.write_checkpoint(path, "llama", seed=1, vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=EOS)
    return str(path)


@pytest.mark.parametrize("kind", ["directory", "redis"])
def test_another_engine_continues_from_the_store(
    share: Share, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    store = request.getfixturevalue("redis") if kind == "redis" else str(tmp_path / "store")
    first = share(store)
    (ids,) = fill(first, PROMPT)
    assert first.stats.num_stored_pages > 0
    log = tmp_path / "log"
    second = share(store, event_log=str(log))
    (output,) = generate(second, [PROMPT], GREEDY)
    assert output.outputs[0].token_ids == ids
    assert (output.cached_tokens.store, output.cached_tokens.total) == (HIT, HIT)
    (sampled,) = generate(second, [PROMPT], SEEDED)
    (expected,) = generate(first, [PROMPT], SEEDED)
    assert sampled.outputs[0].token_ids == expected.outputs[0].token_ids
    salted = second.add_request("salted", PROMPT, GREEDY, cache_salt="other")
    while second.has_unfinished():
        second.step()
    assert (salted.outputs[0].token_ids, salted.num_cached_tokens) == (ids, 0)
    second.check_integrity()
    second.close()
    assert replay_log(log) > 0


@pytest.mark.long
def test_consumers_only_read(share: Share, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    consumer = share(kv_role="kv_consumer")
    (ids,) = fill(consumer, PROMPT)
    producer = share(kv_role="kv_producer")
    assert generate(producer, [PROMPT], GREEDY)[0].num_cached_tokens == 0, "a consumer has written"
    store_of(producer).sync()
    assert consumer.stats.num_stored_pages == consumer.stats.num_dropped_pages == 0
    late = share(kv_role="kv_consumer")
    (output,) = generate(late, [PROMPT], GREEDY)
    assert (output.cached_tokens.store, output.outputs[0].token_ids) == (HIT, ids)


@pytest.mark.long
def test_damaged_pages_are_computed_again(share: Share, tmp_path: Path) -> None:
    (ids,) = fill(share(), PROMPT)
    pages = sorted((tmp_path / "store").rglob("*.page"))
    for index, page in enumerate(pages):
        content = bytearray(page.read_bytes())
        content[(index * 997) % len(content)] ^= 1
        page.write_bytes(content if index % 2 else content[: len(content) // 2])
    second = share()
    (output,) = generate(second, [PROMPT], GREEDY)
    assert output.outputs[0].token_ids == ids
    assert output.num_cached_tokens == 0
    assert second.stats.num_corrupt_pages > 0
    second.check_integrity()


@pytest.mark.long
@pytest.mark.parametrize("waits", ["in memory", "on disk"])
def test_pages_of_earlier_weights_are_not_used_for_later_ones(
    share: Share, other: str, monkeypatch: pytest.MonkeyPatch, waits: str, tmp_path: Path
) -> None:
    (expected,) = generate(share(str(tmp_path / "another"), model=other), [PROMPT], GREEDY)
    is_open, held = threading.Event(), list[Callable[[], None]]()
    if waits == "in memory":
        write = DirectoryStore.write
        monkeypatch.setattr(DirectoryStore, "write", lambda *args: is_open.wait(20) and write(*args))
        engine = share()
    else:
        get = DiskPages.get

        def hold(self: DiskPages, key: PageKey, done: Callable[[Any], None]) -> None:
            get(self, key, done if is_open.is_set() else lambda page: held.append(lambda: done(page)))

        monkeypatch.setattr(DiskPages, "get", hold)
        engine = share(kv_offloading_path=str(tmp_path / "pages"))
    generate(engine, [PROMPT], GREEDY)
    while waits == "on disk" and not held:
        engine.settle()
    engine.update_weights(other)
    (output,) = generate(engine, [PROMPT], GREEDY)
    assert (output.outputs[0].token_ids, output.num_cached_tokens) == (expected.outputs[0].token_ids, 0)
    is_open.set()
    for passed_on in held:
        passed_on()
    store_of(engine).sync()
    (late,) = generate(share(model=other), [PROMPT], GREEDY)
    assert late.outputs[0].token_ids == expected.outputs[0].token_ids
    engine.check_integrity()
