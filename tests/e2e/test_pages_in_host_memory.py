"""Pages that move to host memory, and on to disk: the same tokens, computed once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from jaxserve.api.config import EngineConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.errors import ConfigError
from jaxserve.execution.page_media import HostPages
from jaxserve.execution.page_mover import PageMover
from tests.e2e.conversations import conversations
from tests.e2e.sizes import SIZES
from tests.e2e.workloads import Job, assert_same, few_but_rich, jobs
from tests.e2e.workloads import run as run_all

pytestmark = pytest.mark.usefixtures("any_load_pays")  # loads do not depend on the speed of this machine

Start = Callable[..., DrivenEngine]
MIB = 2.0**-10  # GiB


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
    host = mover.media[0]
    assert isinstance(host, HostPages)
    assert 0 < len(host._pages) <= num_host_pages
    assert not engine.replicas[0].scheduler.has_moves, "an idle engine starts no moves"
    engine.check_integrity()
    engine.close()
    engine = DrivenEngine(EngineConfig(**options))
    answers, num_computed, _ = conversations(engine, 4, 3)
    engine.close()
    assert answers == expected
    assert num_computed < num_new, "also the first turns come from disk"


def test_useless_sizes_are_refused(llama: Path) -> None:
    for size, reason in ((1e-9, "must be at least one page of"), (-1, "must be a number of 0 or more")):
        with pytest.raises(ConfigError, match=f"kv_offloading_size {reason}"):
            DrivenEngine(EngineConfig(str(llama), **{"kv_offloading_size": size, **SIZES}))
    with pytest.raises(ConfigError, match="enable_prefix_caching must be True with kv_offloading_size, got False"):
        EngineConfig(str(llama), kv_offloading_size=1, enable_prefix_caching=False)
    assert EngineConfig(str(llama), kv_offloading_size=0, enable_prefix_caching=False).offloading_option is None
