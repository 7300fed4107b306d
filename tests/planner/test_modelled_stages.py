"""Pipeline stages on a simulated clock: long prompts and decoding rows keep all stages busy."""

import sys
from typing import Any

import pytest

from jaxserve.scheduling.even_chunks import EvenChunks
from jaxserve.tools.planner.modelled import ModelledExecutor
from simulate import modelled, serve

STAGES = 4


def start(num_stages: int = STAGES) -> tuple[Any, ModelledExecutor]:
    """Return a model whose layers four stages divide, and each of them on two chips."""
    return modelled("llama-3.1-70b", "h200x2", pipeline_parallel_size=num_stages)


def prompt_s(num_tokens: int) -> float:
    """Return the time of a prompt alone."""
    arch, executor = start()
    [(_, seconds)] = serve(arch, executor, [num_tokens], 1)
    return seconds


@pytest.mark.long
def test_a_long_prompt_keeps_all_stages_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt through four stages takes a quarter of one stage's time, and up to a tenth more.

    Chunks that fill steps leave stages idle for a third of the time.
    """
    ideal_s = start(1)[1]._rooflines[0].ttft_ms(16_384) / 1e3 / STAGES
    assert ideal_s < prompt_s(16_384) < 1.1 * ideal_s
    monkeypatch.setattr(EvenChunks, "max_tokens", lambda *_: sys.maxsize)
    assert prompt_s(16_384) > 1.35 * ideal_s


def test_chunks_take_equal_times() -> None:
    """Chunks become shorter, as later ones attend to more tokens and fewer are left."""
    _, executor = start()
    chunks, done, lengths = EvenChunks(executor.schedule, executor.schedule.smallest_chunk), 0, []
    while done < 100_000:
        lengths.append(chunks.max_tokens(done, 100_000 - done, 0))
        done += lengths[-1]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 2 * lengths[-1]
    assert {*lengths} <= {*executor.schedule.buckets()}, "no program is padded"


@pytest.mark.long
@pytest.mark.parametrize("num_rows", [64, 61])
def test_decode_leaves_stages_idle_for_less_than_a_step_of_each(num_rows: int) -> None:
    """Each of S plans in flight has a part of the rows: without turns, stages would idle for S - 1 of S steps."""
    arch, executor = start()
    serve(arch, executor, [20] * num_rows, 200)
    idle = 1 - sum(executor.busy_s) / STAGES / executor.now_s
    assert idle < 0.1 < 1 / STAGES


def test_a_single_row_decodes_without_the_host() -> None:
    """With fewer rows than stages, a row's next step is launched before its token is read."""
    arch, executor = start()
    serve(arch, executor, [20], 50)
    step_s = sum(roofline.decode_ms(1, 40) for roofline in executor._rooflines) / 1e3
    assert executor.now_s == pytest.approx(50 * step_s, rel=0.05)
