"""Pages that move to disk and back: the same tokens, whatever the pool's dtype, and nothing lost or crossed."""

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from safetensors.numpy import save_file

from jaxserve.api.cached_tokens import CachedTokens
from jaxserve.api.config import EngineConfig
from jaxserve.api.metrics import EngineStats
from jaxserve.api.outputs import RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.assembly.generation_defaults import build_arch
from jaxserve.assembly.page_tiers import check_model, fingerprint, layer_content
from jaxserve.core.event_log import replay_log
from jaxserve.errors import ConfigError
from jaxserve.execution.lowering import Lowering
from jaxserve.execution.page_media import DiskPages
from jaxserve.execution.page_mover import PageMover
from jaxserve.layers.mlp import geglu
from jaxserve.models.registry import from_hf_config
from jaxserve.scheduling.kv_cache import page_archive
from jaxserve.scheduling.schedule_config import ScheduleConfig
from tests import checkpoints
from tests.e2e.conversations import conversations
from tests.e2e.sizes import EOS, SIZES, VOCAB_SIZE
from tests.e2e.workloads import Job, assert_same, few_but_rich, generate, jobs, tokens
from tests.e2e.workloads import run as run_all
from tests.parameters import mainly

pytestmark = pytest.mark.usefixtures("any_load_pays")  # loads do not depend on the speed of this machine

Start = Callable[..., DrivenEngine]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("pages"))


@pytest.fixture
def open_engine(llama: Path, tmp_path: Path) -> Iterator[Callable[..., DrivenEngine]]:
    """Start an engine with pages in the test's directory, without emptying them."""
    with ExitStack() as stack:

        def open_engine(**options: Any) -> DrivenEngine:
            own = {"skip_tokenizer_init": True, "kv_offloading_path": str(tmp_path)}
            engine = DrivenEngine(EngineConfig(**{"model": str(llama), **own, **SIZES, **options}))
            stack.callback(engine.close)
            return engine

        yield open_engine


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the model of `llama` with other weights."""
    path = tmp_path_factory.mktemp("other")
    checkpoints.write_checkpoint(path, "llama", seed=1, vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=EOS)
    return str(path)


def moved(engine: DrivenEngine) -> EngineStats:
    """Return the engine's totals, after all writes."""
    disk_of(engine)._io.submit(lambda: None).result()
    return engine.stats


def disk_of(engine: DrivenEngine) -> DiskPages:
    """Return an engine's pages on disk."""
    mover = engine.replicas[0].mover
    assert isinstance(mover, PageMover)
    disk = mover.media[-1]
    assert isinstance(disk, DiskPages)
    return disk


@pytest.mark.parametrize("kv_cache_dtype", mainly(["auto"], "int8", "int4"))
@given(jobs=jobs(aborts=True))
@few_but_rich
def test_any_workload_gives_the_same_tokens(start: Start, path: str, kv_cache_dtype: str, jobs: list[Job]) -> None:
    """Preemptions move pages to disk, as four rows need more than the pool holds."""
    options = {"kv_cache_dtype": kv_cache_dtype} if kv_cache_dtype != "auto" else {}
    expected = run_all(start(**options), jobs)
    engine = start(**options, kv_offloading_path=path)
    for output, wanted, job in zip(run_all(engine, jobs), expected, jobs, strict=True):
        if "abort" not in (output.outputs[0].finish_reason, wanted.outputs[0].finish_reason):
            assert_same(output, wanted, job)


def test_long_conversations_are_computed_once(start: Start, path: str) -> None:
    """Eight chats need four times the pool."""
    expected, num_recomputed, _ = conversations(start(), 8, 4)
    engine = start(kv_offloading_path=path)
    before = engine.stats.num_loaded_pages
    answers, num_computed, num_new = conversations(engine, 8, 4)
    assert answers == expected
    page_size = SIZES["page_size"]
    assert num_computed <= num_new + 8 * 4 * page_size  # partly filled pages are not kept
    assert num_computed < num_recomputed / 2
    assert moved(engine).num_loaded_pages > before


def test_another_engine_continues_conversations(open_engine: Callable[..., DrivenEngine]) -> None:
    prompts = [tokens(33, number) for number in range(6)]
    first = open_engine()
    expected = generate(first, prompts, GREEDY)
    first.close()
    second = open_engine()
    for output, wanted in zip(generate(second, prompts, GREEDY), expected, strict=True):
        assert_same(output, wanted)
        assert output.cached_tokens == CachedTokens(disk=32)
    stats = moved(second)
    assert (stats.cached_tokens, stats.num_sought_tokens) == (CachedTokens(disk=6 * 32), 6 * 33)
    assert stats.num_loaded_pages >= 6 * 32 // SIZES["page_size"]
    assert stats.num_dropped_pages == stats.num_corrupt_pages == 0


def test_an_event_log_starts_with_the_pages_that_an_engine_finds(
    open_engine: Callable[..., DrivenEngine], tmp_path: Path
) -> None:
    prompts, log = [tokens(33, number) for number in range(6)], tmp_path / "log"
    first = open_engine()
    generate(first, prompts[:3], GREEDY)
    first.close()
    second = open_engine(event_log=str(log))
    assert sum(output.cached_tokens.disk for output in generate(second, prompts, GREEDY)) == 3 * 32
    second.close()
    assert replay_log(log) > 6
    sizes, *events = log.read_text().splitlines()
    log.write_text("\n".join([json.dumps(json.loads(sizes) | {"tiers": []}), *events, ""]))
    with pytest.raises((RuntimeError, AssertionError)):
        replay_log(log)


def test_loads_of_an_aborted_request_end_while_the_engine_sleeps(open_engine: Callable[..., DrivenEngine]) -> None:
    prompt = tokens(33, "asleep")
    first = open_engine()
    (expected,) = generate(first, [prompt], GREEDY)
    first.close()
    engine = open_engine()
    replica, may_read = engine.replicas[0], threading.Event()
    disk_of(engine)._io.submit(may_read.wait)
    engine.add_request("0", prompt, GREEDY)
    engine.core.take_events()
    replica.launch(0.0)
    assert replica.scheduler.num_waiting == 1, "it loads its pages"
    engine.abort("0")
    engine.sleep(1)
    may_read.set()
    moved(engine)
    engine.settle()
    assert engine.stats.num_loaded_pages == 0
    engine.host.wake_up(None)
    (output,) = generate(engine, [prompt], GREEDY)
    assert_same(output, expected)
    engine.check_integrity()


@pytest.mark.long
def test_other_salts_layouts_and_weights_find_nothing(open_engine: Callable[..., DrivenEngine], llama: Path) -> None:
    prompt = tokens(33, "salt")

    def run(engine: DrivenEngine, **fields: Any) -> RequestOutput:
        (output,) = run_all(engine, [Job(prompt, GREEDY, **fields)])
        return output

    engine = open_engine()
    first = run(engine)
    assert run(engine, salt="other").num_cached_tokens == 0
    engine.close()
    for other in (
        {"kv_cache_dtype": "int8"},
        {"hf_overrides": '{"rms_norm_eps": 0.1}'},
    ):
        engine = open_engine(**other)
        assert run(engine).num_cached_tokens == 0, other
        engine.close()
    engine = open_engine()
    assert run(engine).num_cached_tokens == 32
    engine.update_weights(str(llama))
    output = run(engine)
    assert output.num_cached_tokens == 0  # the engine forgets all pages with its weights
    assert_same(output, first)


def test_a_crash_loses_only_the_pages_that_were_not_full(
    open_engine: Callable[..., DrivenEngine], tmp_path: Path
) -> None:
    """Pages are written while their request runs; the copy of the file is what a killed process leaves."""
    prompt = tokens(33, "crash")
    engine = open_engine()
    request = engine.add_request("0", prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    while len(request.outputs[0].token_ids) < 10:
        engine.step()
    moved(engine)
    (file,) = tmp_path.glob("*/pages-0.kv")
    content = file.read_bytes()
    engine.close()
    file.write_bytes(content)
    (output,) = generate(open_engine(), [prompt], GREEDY)
    assert output.num_cached_tokens == 32


def test_pages_in_use_do_not_outlive_their_weights(open_engine: Callable[..., DrivenEngine], other: str) -> None:
    """The end of a request stores its pages; new weights that cause the end forget them first."""
    prompt = tokens(33, "in use")
    engine = open_engine()
    output = engine.add_request("0", prompt, GREEDY)
    while not output.outputs[0].token_ids:
        engine.step()
    engine.update_weights(other, running="restart")
    engine.abort("0")
    engine.close()
    engine = open_engine(model=other)
    (output,) = generate(engine, [prompt], GREEDY)
    assert output.num_cached_tokens == 0


def test_weights_that_sleep_immediately_keep_their_own_file(
    open_engine: Callable[..., DrivenEngine], other: str
) -> None:
    prompt = tokens(33, "own")
    engine = open_engine()
    engine.update_weights(other)
    engine.sleep(1)
    engine.settle()
    moved(engine)
    engine.host.wake_up(None)
    generate(engine, [prompt], GREEDY)
    engine.close()
    for model, num_cached in (({}, 0), ({"model": other}, 32)):
        engine = open_engine(**model)
        (output,) = generate(engine, [prompt], GREEDY)
        assert output.num_cached_tokens == num_cached
        engine.close()


def test_file_that_cannot_be_opened_again_keeps_no_pages(
    open_engine: Callable[..., DrivenEngine], other: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    prompt = tokens(33, "again")
    engine = open_engine()
    engine.update_weights(other)
    monkeypatch.setattr(page_archive, "_lock_first", fail)
    expected = generate(engine, [prompt], GREEDY)
    assert not moved(engine).num_stored_pages
    assert "no KV pages are kept on disk: kv_offloading_path must be" in caplog.text
    assert_same(*generate(engine, [prompt], GREEDY), *expected)
    engine.close()
    monkeypatch.undo()
    (output,) = generate(open_engine(), [prompt], GREEDY)
    assert output.num_cached_tokens == 0


def test_closed_engine_moves_nothing(open_engine: Callable[..., DrivenEngine], tmp_path: Path) -> None:
    """The requests that it ends leave pages to store, and pages to evict for them."""
    engine = open_engine()
    (file,) = tmp_path.glob("*/pages-0.kv")
    generate(engine, [tokens(33, 0)], GREEDY)
    moved(engine)
    page_bytes = file.stat().st_size / engine.stats.num_stored_pages
    engine.close()
    engine = open_engine(kv_offloading_disk_size=12.5 * page_bytes / 2**30)
    generate(engine, [tokens(33, n) for n in range(8)], GREEDY)
    output = engine.add_request("0", tokens(33, "running"), GREEDY)
    while not output.outputs[0].token_ids:
        engine.step()
    engine.close()
    engine.close()
    assert output.finished


def test_another_process_finds_pages_of_a_mixture() -> None:
    """Its description has a function, which has another address there."""

    def fingerprint_of(activation: FunctionType) -> bytes:
        layers = [replace(x, experts=x.experts._replace(activation=activation)) for x in mixture.layers]
        arch = replace(mixture, layers=tuple(layers))
        schedule = ScheduleConfig(2, 16, max_model_len=32, page_size=4, num_pages=24, windows=arch.kv_layout.windows)
        backends = {"backend": "xla", "linear_backend": "xla"}
        lowering = Lowering(arch, {}, schedule, jax.numpy.dtype("float32"), **backends, max_steps=1)
        return fingerprint(b"", EngineConfig("mixtral"), [lowering])

    mixture: Any = from_hf_config(checkpoints.hf_dict("mixtral"))
    here: Any = mixture.layers[0].experts.activation
    there = FunctionType(here.__code__, here.__globals__, here.__name__, here.__defaults__, here.__closure__)
    there.__module__, there.__qualname__ = here.__module__, here.__qualname__
    assert fingerprint_of(there) == fingerprint_of(here)
    assert fingerprint_of(geglu) != fingerprint_of(here)


def test_pages_are_bound_to_the_weights_of_a_draft_layer(tmp_path: Path) -> None:
    """Its keys and values are stored with them."""

    def content(**options: Any) -> bytes:
        layer = {"method": "eagle3", "model": str(tmp_path)}
        return layer_content(EngineConfig("llama", speculative_config=layer, **options))

    found = []
    for factor in (1, 2, 1):
        save_file({"fc.weight": np.full((2, 2), factor, np.float32)}, tmp_path / "model.safetensors")
        found.append(content(kv_offloading_path=str(tmp_path)))
    assert found[0] == found[2] != found[1]
    assert content(kv_offloading_size=1) == b""


def test_damaged_file_costs_time_only(open_engine: Callable[..., DrivenEngine], tmp_path: Path) -> None:
    prompts = [tokens(33, number) for number in range(3)]
    engine = open_engine()
    expected = generate(engine, prompts, GREEDY)
    engine.close()
    (file,) = tmp_path.glob("*/pages-0.kv")
    content = bytearray(file.read_bytes())
    for offset in range(1000, len(content), 2500):
        content[offset] ^= 1
    file.write_bytes(content)
    engine = open_engine()
    for output, wanted in zip(generate(engine, prompts, GREEDY), expected, strict=True):
        assert_same(output, wanted)
    assert moved(engine).num_corrupt_pages
    assert engine.stats.num_loaded_pages


def test_replicas_count_pages_that_they_store_simultaneously(
    open_engine: Callable[..., DrivenEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, write = open_engine(), page_archive.PageArchive.write
    writes = []

    def write_twice(*args: Any) -> bool:
        engine.stats.num_stored_pages += 1  # called by another replica's thread
        writes.append(write(*args))
        return writes[-1]

    monkeypatch.setattr(page_archive.PageArchive, "write", write_twice)
    generate(engine, [tokens(33, 0)], GREEDY)
    assert moved(engine).num_stored_pages == 2 * sum(writes) > 0


def test_full_and_failing_disks_cost_time_only(
    open_engine: Callable[..., DrivenEngine], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, num_recomputed, _ = conversations(start(), 6, 3)
    engine = open_engine()
    calls = itertools.count()

    def fail_sometimes(*args: Any) -> Any:
        if next(calls) % 3:
            raise OSError(5, "Input/output error")
        return pwritev(*args)

    pwritev = os.pwritev
    monkeypatch.setattr(page_archive.os, "pwritev", fail_sometimes)
    answers, num_computed, _ = conversations(engine, 6, 3)
    assert answers == expected
    assert num_computed <= num_recomputed
    assert moved(engine).num_stored_pages


def fail_on_device(*_: Any) -> Any:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


def fail_all_programs(engine: DrivenEngine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make an engine's programs that move pages fail on the device."""
    mover = engine.replicas[0].mover
    assert isinstance(mover, PageMover)
    ((_, pools),) = mover._kv.stages
    for program in pools.programs:
        if program.startswith(name):
            monkeypatch.setitem(pools.programs, program, fail_on_device)


def test_without_memory_for_copies_pages_are_dropped(
    open_engine: Callable[..., DrivenEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    fail_all_programs(engine, monkeypatch, "gather")
    expected = generate(engine, [tokens(33, "x")], GREEDY)
    assert moved(engine).num_dropped_pages >= 32 // SIZES["page_size"]
    assert not engine.stats.num_stored_pages
    engine.check_integrity()
    assert_same(*generate(engine, [tokens(33, "x")], GREEDY), *expected)


def test_failed_load_ends_its_requests(
    open_engine: Callable[..., DrivenEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [tokens(33, number) for number in range(6)]
    engine = open_engine()
    expected = generate(engine, prompts, GREEDY)
    fail_all_programs(engine, monkeypatch, "scatter")
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        generate(engine, prompts[:1], GREEDY)
    assert not engine.has_unfinished()
    monkeypatch.undo()
    engine.check_integrity()
    for again, wanted in zip(generate(engine, prompts, GREEDY), expected, strict=True):
        assert_same(again, wanted)
    assert engine.stats.num_loaded_pages


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"enable_prefix_caching": False}, "enable_prefix_caching must be True with kv_offloading_path, got False"),
        ({"kv_offloading_disk_size": 1e-6}, "must be at least one page of"),
        ({"kv_offloading_disk_size": 0}, "kv_offloading_disk_size must be"),
        (
            {"kv_offloading_path": None, "kv_offloading_disk_size": 1},
            "kv_offloading_disk_size needs kv_offloading_path",
        ),
        ({"kv_offloading_disk_size": 1e300}, r"kv_offloading_disk_size must be a number in \(0, "),
        ({"kv_offloading_path": "/dev/null/pages"}, "must be a directory that can be written"),
        ({"kv_offloading_path": ""}, "kv_offloading_path must be a non-empty path, got ''"),
        ({"kv_offloading_path": "a\0b"}, "kv_offloading_path must be a non-empty path"),
        ({"kv_offloading_path": None, "max_saved_sessions": 3}, "max_saved_sessions needs kv_offloading_path"),
    ],
)
def test_useless_options_are_refused(llama: Path, tmp_path: Path, options: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        DrivenEngine(EngineConfig(str(llama), **{"kv_offloading_path": str(tmp_path), **SIZES, **options}))


def test_systems_without_file_locks_are_refused(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(str(llama), kv_offloading_path=str(tmp_path))
    arch = build_arch(config)
    check_model(config, arch, is_distributed=False)
    monkeypatch.setattr("jaxserve.assembly.page_tiers.sys.platform", "win32")
    with pytest.raises(ConfigError, match="kv_offloading_path needs file locks of Linux or macOS, got "):
        check_model(config, arch, is_distributed=False)
