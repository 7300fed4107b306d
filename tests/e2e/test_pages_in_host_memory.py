"""Pages that move to host memory, and on to disk: the same tokens, computed once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given

from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly import host, page_tiers
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.assembly.generation_defaults import build_arch
from jaxserve.assembly.page_tiers import with_host_tier
from jaxserve.errors import ConfigError
from jaxserve.execution.page_media import HostPages
from jaxserve.execution.page_mover import PageMover
from tests.e2e.conversations import conversations
from tests.e2e.sizes import SIZES
from tests.e2e.workloads import Job, assert_same, few_but_rich, generate, jobs, tokens
from tests.e2e.workloads import run as run_all
from tests.soon_compiled import few_programs

pytestmark = pytest.mark.usefixtures("any_load_pays")  # loads do not depend on the speed of this machine

Start = Callable[..., DrivenEngine]
MIB = 2.0**-10  # GiB
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@given(jobs=jobs(aborts=True))
@few_but_rich
def test_any_workload_gives_the_same_tokens(start: Start, jobs: list[Job]) -> None:
    expected = run_all(start(), jobs)
    for output, wanted, job in zip(run_all(start(kv_offloading_size=MIB), jobs), expected, jobs, strict=True):
        if "abort" not in (output.outputs[0].finish_reason, wanted.outputs[0].finish_reason):
            assert_same(output, wanted, job)


def test_long_conversations_are_computed_once(start: Start) -> None:
    """Eight chats need four times the pool."""
    expected, num_recomputed, _ = conversations(start(), 8, 4)
    engine = start(kv_offloading_size=MIB)
    before = engine.stats.num_loaded_pages
    answers, num_computed, num_new = conversations(engine, 8, 4)
    assert answers == expected
    assert num_computed <= num_new + 8 * 4 * SIZES["page_size"]  # partly filled pages are not kept
    assert num_computed < num_recomputed / 2
    assert engine.stats.num_loaded_pages > before
    assert engine.stats.num_compiles == 0


@pytest.mark.parametrize("num_host_pages", [4, 30, 1000])
def test_pages_that_leave_host_memory_come_back_from_disk(
    start: Start, llama: Path, tmp_path: Path, num_host_pages: int
) -> None:
    """Host memory holds a few pages, half of a chat's turns, or all."""
    expected, *_ = conversations(start(), 4, 3)
    page_gib = 2 * 4 * 4 * 16 * 4 / 2**30
    options: dict[str, Any] = {"kv_offloading_size": (num_host_pages + 0.5) * page_gib}
    options |= {"model": str(llama), "skip_tokenizer_init": True, "kv_offloading_path": str(tmp_path), **SIZES}
    engine = DrivenEngine(EngineConfig(**options))
    answers, num_computed, num_new = conversations(engine, 4, 3)
    assert answers == expected
    assert num_computed <= num_new + 4 * 3 * SIZES["page_size"]
    mover = engine.replicas[0].mover
    assert isinstance(mover, PageMover)
    pages = mover.media[0]
    assert isinstance(pages, HostPages)
    assert 0 < len(pages._pages) <= num_host_pages
    assert not engine.replicas[0].scheduler.has_moves, "an idle engine starts no moves"
    engine.check_integrity()
    engine.close()
    engine = DrivenEngine(EngineConfig(**options))
    answers, num_computed, _ = conversations(engine, 4, 3)
    engine.close()
    assert answers == expected
    assert num_computed < num_new, "also the first turns come from disk"


@pytest.mark.parametrize("can_copy", [True, False])
def test_accelerators_keep_pages_in_host_memory_by_default(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, can_copy: bool
) -> None:
    """The default's engine is one with that size; a device that cannot copy pages serves without them."""
    monkeypatch.setattr(host, "with_host_tier", lambda *args, **options: with_host_tier(*args[:2], "gpu", 2.0**34))
    if not can_copy:

        def fail(stages: Any, media: Any, *others: Any) -> PageMover:
            if isinstance(media[0], HostPages):
                raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such memory")
            return PageMover(stages, media, *others)

        monkeypatch.setattr(page_tiers, "PageMover", fail)
    with few_programs():
        options = SIZES if can_copy else SIZES | {"kv_offloading_path": str(tmp_path)}
        engine = DrivenEngine(EngineConfig(str(llama), skip_tokenizer_init=True, **options))
    mover = engine.replicas[0].mover
    assert isinstance(mover, PageMover)
    assert isinstance(mover.media[0], HostPages) == can_copy
    assert ("no KV pages are kept in host memory" in caplog.text) != can_copy
    if can_copy:
        (tier,) = mover.new_tiers()
        assert (tier.name, tier.num_pages) == ("host", 2 * 2**30 // (2 * 4 * 4 * 16 * 4))
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) <= 1 - can_copy, "no other file stays open"
    assert len(generate(engine, [tokens(9, 1)], GREEDY)[0].outputs[0].token_ids) == 4
    engine.close()


@pytest.mark.parametrize(
    ("options", "platform", "gib", "size"),
    [
        ({}, "gpu", 512, 8),
        ({}, "tpu", 32, 4),
        ({}, "tpu", 7.9, None),
        ({}, "cpu", 512, None),
        ({"data_parallel_size": 8}, "gpu", 512, 4),
        ({"kv_offloading_size": 0}, "gpu", 512, 0),
        ({"kv_offloading_size": 3}, "gpu", 512, 3),
        ({"kv_store": "/tmp"}, "gpu", 512, 8),
        ({"enable_prefix_caching": False}, "gpu", 512, None),
        ({"sparse_attention": {"method": "quest", "budget": 64}}, "gpu", 512, None),
        ({"kv_eviction": {"method": "snapkv", "budget": 64}}, "gpu", 512, None),
        ({"enable_dp_attention": True, "tensor_parallel_size": 2, "expert_parallel_size": 2}, "gpu", 512, None),
    ],
)
def test_the_default_size_depends_on_the_machine(
    llama: Path, options: dict[str, Any], platform: str, gib: float, size: float | None
) -> None:
    config, arch = EngineConfig(str(llama), **options), build_arch(EngineConfig(str(llama)))
    assert with_host_tier(config, arch, platform, gib * 2.0**30).kv_offloading_size == size
    assert with_host_tier(config, arch, platform, gib * 2.0**30, is_distributed=True) == config


def test_useless_sizes_are_refused(llama: Path) -> None:
    for size, reason in (
        (1e-9, "must be at least one page of"),
        *[(size, r"must be a number in \[0, ") for size in (-1, 1e300)],
    ):
        with pytest.raises(ConfigError, match=f"kv_offloading_size {reason}"):
            DrivenEngine(EngineConfig(str(llama), **{"kv_offloading_size": size, **SIZES}))
    with pytest.raises(ConfigError, match="enable_prefix_caching must be True with kv_offloading_size, got False"):
        EngineConfig(str(llama), kv_offloading_size=1, enable_prefix_caching=False)
    assert EngineConfig(str(llama), kv_offloading_size=0, enable_prefix_caching=False).offloading_option is None
