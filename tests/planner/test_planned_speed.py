"""Predicted times of steps, and what devices exchange."""

import dataclasses
import math

import pytest

from jaxserve import EngineConfig
from jaxserve.scheduling.schedule_config import MIN_FEW_TOKENS
from jaxserve.tools.planner.plan import make_plan
from jaxserve.tools.planner.program import Collective, collectives, layer_collectives
from jaxserve.tools.planner.report import build_report
from jaxserve.tools.planner.targets import Target, parse_target
from tests.planner.plans import SUM_BYTES, plan_of

pytestmark = pytest.mark.usefixtures("no_compiler")


@pytest.mark.parametrize(("target", "bytes_per_s"), [("h100", 3.35e12), ("h200", 4.8e12)])
def test_a_decode_step_of_one_row_reads_all_weights_and_its_own_tokens(target: str, bytes_per_s: float) -> None:
    plan = plan_of("llama-3.1-8b", target, max_model_len=65536)
    assert plan.speed is not None
    embedding = 128256 * 4096 * 2
    num_bytes = plan.memory.weights - embedding + MIN_FEW_TOKENS * 4096 * 2 + (1024 + 1) * 131072
    assert plan.speed.step_ms[1] == pytest.approx(num_bytes / bytes_per_s * 1e3, rel=1e-6)


def test_a_long_prompt_is_bound_by_its_products() -> None:
    config = EngineConfig(model="llama-3.1-8b", max_num_batched_tokens=8192)
    plan = make_plan(config, parse_target("h200"), prompt_tokens=8192)
    assert plan.speed is not None
    flops = 2 * 8192 * (8030e6 - 2 * 128256 * 4096) + 4 * 32 * 4096 * 8192 * 8193 / 2 + 2 * 256 * 128256 * 4096
    assert plan.speed.ttft_ms == pytest.approx(flops / 989.5e12 * 1e3, rel=0.001)


def test_chunks_of_a_prompt_take_no_less_than_the_whole() -> None:
    ttfts = []
    for budget in (512, 2048, 8192):
        config = EngineConfig(model="llama-3.1-8b", max_num_batched_tokens=budget)
        speed = make_plan(config, parse_target("h200"), prompt_tokens=8192).speed
        assert speed is not None
        ttfts.append(speed.ttft_ms)
    assert ttfts == sorted(ttfts, reverse=True)


def test_more_rows_take_longer_and_bring_more() -> None:
    speed = plan_of("llama-3.1-8b", max_num_seqs=100).speed
    assert speed is not None
    assert list(speed.step_ms) == [1, 8, 32, 64, 100]
    for figures in (speed.step_ms, speed.tokens_per_s):
        assert list(figures.values()) == sorted(figures.values())


def test_a_batch_that_is_asked_for_is_predicted() -> None:
    target = parse_target("h200")
    speed = make_plan(EngineConfig(model="llama-3.1-8b"), target, batch=48).speed
    assert speed is not None
    assert list(speed.step_ms) == [1, 8, 32, 48, 64, 128, 256]


def test_a_chip_of_several_devices_is_told_whole() -> None:
    """Two devices, each with half the memory, bandwidth and FLOP/s, equal one chip; there are no links between them."""
    whole = plan_of("llama-3.1-8b", "h200x2", max_model_len=8192)
    assert whole.target.sheet is not None
    two = dataclasses.replace(
        whole.target.sheet,
        devices_per_chip=2,
        memory_bytes=2 * whole.target.sheet.memory_bytes,
        bytes_per_s=2 * whole.target.sheet.bytes_per_s,
        flops_per_s={name: 2 * rate for name, rate in whole.target.sheet.flops_per_s.items()},
    )
    chip = plan_of("llama-3.1-8b", Target("both", "both", two), max_model_len=8192)
    assert chip.memory == whole.memory.times(2)
    assert (chip.memory.missing, chip.kv_tokens) == (2 * whole.memory.missing, whole.kv_tokens)
    report, halves = build_report(chip), build_report(whole)
    assert report["temp_bytes_per_chip"] == 2 * halves["temp_bytes_per_chip"]
    assert report["num_devices"] == halves["num_devices"] == 2
    assert chip.speed is not None
    assert whole.speed is not None
    assert chip.speed.step_ms[8] < whole.speed.step_ms[8]


@pytest.mark.parametrize(
    ("name", "num_links"),
    [("v5e:1x1", 0), ("v6e:2x4", 3), ("v5p:2x2x1", 2), ("v5p:4x4x4", 6), ("h200x8", 1), ("h100x8", 1)],
)
def test_links_go_in_the_directions_that_have_chips(name: str, num_links: int) -> None:
    assert parse_target(name).num_links == num_links


@pytest.mark.parametrize("target", ["h200x2", "v6e:2x2"])
def test_int8_weights_are_a_byte_and_their_scales(target: str) -> None:
    plain, narrow = (plan_of("llama-3.1-8b", target, max_model_len=8192, quantization=q) for q in (None, "int8"))
    assert narrow.memory.weights == pytest.approx(plain.memory.weights / 2 * (1 + 4 / 64), rel=0.001)
    assert narrow.kv_tokens > plain.kv_tokens
    assert plain.speed is not None
    assert narrow.speed is not None
    assert narrow.speed.step_ms[1] < 0.6 * plain.speed.step_ms[1]


def test_rows_that_do_not_fit_are_not_predicted() -> None:
    config = EngineConfig(model="llama-3.1-8b")
    plan = make_plan(config, parse_target("h200"), context_tokens=100_000)
    assert plan.speed is not None
    assert max(plan.speed.step_ms) == plan.memory.num_pages // (100_000 // 16) < 9


def test_exchanges_take_their_time_on_the_links() -> None:
    slow, fast = (
        dataclasses.replace(
            parse_target("h200x4"), sheet=dataclasses.replace(parse_target("h200x4").sheet, link_bytes_per_s=rate)
        )
        for rate in (1e9, math.inf)
    )
    times = [plan_of("llama-3.1-8b", target, max_model_len=8192).speed for target in (slow, fast)]
    assert times[0] is not None
    assert times[1] is not None
    sent = 2 * 3 / 4 * SUM_BYTES * 32 * MIN_FEW_TOKENS  # ring of four, all-reduces of a layer, layers, padded rows
    assert times[0].step_ms[8] - times[1].step_ms[8] == pytest.approx(sent / 1e9 * 1e3)


HLO = """
  %all-reduce-start.1 = bf16[2048,256]{1,0} all-reduce-start(%x), channel_id=1, to_apply=%add
  %all-reduce-done.1 = bf16[2048,256]{1,0} all-reduce-done(%all-reduce-start.1)
  %two = (f32[8]{0}, bf16[4,2]{1,0}) all-reduce(%x, %y), channel_id=2
  %all-gather-start = ((f32[128]{0}, s32[128]{0}), (f32[256]{0}, s32[256]{0})) all-gather-start(%x, %y), channel_id=3
  %gather = f8e4m3fn[16,4]{1,0} all-gather(%x), channel_id=4
  %flags = pred[10]{0} all-to-all(%x), channel_id=5
  %use = f32[] add(%all-reduce-done.1, %two), metadata={op_name="all-reduce(x)"}
"""


def test_exchanges_are_counted_by_their_results() -> None:
    assert collectives(HLO) == (
        Collective("all-gather", 2, 256 * 8 + 64),
        Collective("all-reduce", 2, 2048 * 256 * 2 + 8 * 4 + 8 * 2),
        Collective("all-to-all", 1, 10),
    )


LAYERS = """
  %a = bf16[8,4]{1,0} all-reduce(%x), channel_id=1, metadata={op_name="jit(serve_step)/jit(block)/attention/psum"}
  %b = bf16[8,4]{1,0} all-reduce(%x), channel_id=1, metadata={op_name="jit(serve_step)/jit(block)/mlp/psum"}
  %c = bf16[8,4]{1,0} all-reduce(%x), channel_id=1, metadata={op_name="jit(serve_step)/embed/psum"}
  %d = f32[8,4]{1,0} all-to-all(%x), channel_id=1, metadata={op_name="jit(serve_step)/sample/cond/all_to_all"}
"""


@pytest.mark.parametrize("num_copies", [1, 3])
def test_exchanges_of_a_layer_are_those_in_its_scopes(num_copies: int) -> None:
    assert layer_collectives(LAYERS * num_copies, num_copies) == (Collective("all-reduce", 2, 2 * 8 * 4 * 2),)
