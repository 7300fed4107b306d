"""Tests of plans: those of accelerators with stubbed compiled steps, those of a CPU against its engine."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxserve.planner
from jaxserve import EngineConfig, cli
from jaxserve.engine.build import build_runners
from jaxserve.engine.checkpoint import build_arch
from jaxserve.errors import ConfigError
from jaxserve.execution.programs import Programs
from jaxserve.models import registry
from jaxserve.models.params import device_bytes
from jaxserve.pallas_kernels.deviceless import Chip
from jaxserve.planner.plan import Memory, Plan, make_plan, read_model
from jaxserve.planner.program import Collective, StepCompiler, StepProgram, collectives, layer_collectives
from jaxserve.planner.report import build_report, capacity_curve, render
from jaxserve.planner.targets import Target, find_target, parse_target
from jaxserve.schedule_config import MIN_FEW_TOKENS
from tests.parameters import mainly

PARAMS = {  # millions of parameters, as published by the makers
    "llama-3.1-8b": 8030,
    "llama-3.1-70b": 70554,
    "llama-3.1-405b": 405853,
    "qwen3-32b": 32762,
    "mistral-7b-v0.3": 7248,
    "gemma-2-9b": 9242,
    "gemma-3-27b": 27009,
    "mixtral-8x7b": 46703,
    "qwen3-30b-a3b": 30532,
    "olmoe-1b-7b": 6919,
    "deepseek-v2-lite": 15706,
    "kimi-k2": 1026408,
    "glm-4.7-flash": 29943,
    "qwen3-next-80b-a3b": 79674,
    "qwen3.5-9b": 8954,
    "qwen3.5-27b": 26896,
    "qwen3.5-35b-a3b": 34661,
}
QUANTISED_PARAMS = {"deepseek-v3": 671026, "gpt-oss-20b": 20910, "gpt-oss-120b": 116830}
GPT_PARAMS = {"gpt2": 124.44, "gpt2-xl": 1557.6, "gpt-neo-125m": 125.2, "gpt-neo-2.7b": 2651.3}
DENSE_PARAMS = {
    "gemma-4-31b": 30700,
    "gemma-4-26b-a4b": 25230,
    "afm-4.5b": 4619,
    "command-r": 34981,
    "command-r7b": 8028,
    "glm-4-9b": 9400,
    "ministral-3-8b": 8490,
    "olmo-2-7b": 7299,
    "olmo-3-7b": 7298,
    "phi-2": 2780,
    "phi-4": 14659.5,
    "phi-4-mini": 3836,
    "pythia-6.9b": 6857,
    "seed-oss-36b": 36151,
    "smollm3-3b": 3075,
    "starcoder2-7b": 7174,
}
DTYPES = {**dict.fromkeys(GPT_PARAMS, "float32"), **dict.fromkeys(["command-r", "phi-2", "pythia-6.9b"], "float16")}
GPUS = [parse_target(name) for name in ("h200", "h200x2", "h200x4", "h200x8")]
TPUS = [parse_target(name) for name in ("v5e:4x4", "v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1")]
SUM_BYTES = 2 * 4096 * 2  # bytes per token of the two all-reduces of a layer


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stub compiled steps with 100 kB of temporaries per token and, on several chips, two all-reduces per layer."""

    def step_program(num_tokens: int, num_devices: int) -> StepProgram:
        sums = (Collective("all-reduce", 2, SUM_BYTES * num_tokens),) if num_devices > 1 else ()
        return StepProgram(num_tokens, 100_000 * num_tokens, sums)

    def step_programs(self: StepCompiler, arch: Any, buckets: Sequence[int]) -> list[StepProgram]:
        return [step_program(num_tokens, self.target.num_devices) for num_tokens in buckets]

    def compile_times(self: StepCompiler, arch: Any, max_steps: int) -> dict[str, float]:
        multi_step = self.schedule.multi_step_buckets(max_steps)
        return {
            "set_slot": 1.5,
            **{f"step {size}": 2.0 for size in self.schedule.buckets()},
            f"multi-step {multi_step}": 3.0,
        }

    monkeypatch.setattr(StepCompiler, "step_programs", step_programs)
    monkeypatch.setattr(StepCompiler, "compile_times", compile_times)
    monkeypatch.setattr(Chip, "unavailable", lambda _: None)
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)


def plan_of(model: str, target: str | Target = "h200", **options: Any) -> Plan:
    target = parse_target(target) if isinstance(target, str) else target
    return make_plan(EngineConfig(model=model, tensor_parallel_size=target.num_devices, **options), target)


def with_memory(target: Target, memory_bytes: int) -> Target:
    assert target.sheet is not None
    return dataclasses.replace(target, sheet=dataclasses.replace(target.sheet, memory_bytes=memory_bytes))


@pytest.mark.parametrize("name", [*PARAMS, *QUANTISED_PARAMS, *GPT_PARAMS, *DENSE_PARAMS])
def test_shapes_that_come_along_have_the_parameters_they_are_known_for(name: str) -> None:
    called, arch = read_model(name)
    assert called == name
    millions = {**PARAMS, **QUANTISED_PARAMS, **GPT_PARAMS, **DENSE_PARAMS}[name]
    assert registry.num_params(arch) / 1e6 == pytest.approx(millions, rel=0.001)
    assert arch.dtype == DTYPES.get(name, "bfloat16")


def test_whole_experts_take_the_same_memory_and_links_but_few_tokens_read_more_of_them() -> None:
    """One row reads two whole experts of the two on a chip, or a quarter of each of two."""
    sliced, divided = (plan_of("mixtral-8x7b", "h200x4", expert_parallel_size=n) for n in (1, 4))
    assert divided.memory.weights == sliced.memory.weights
    assert sliced.speed is not None
    assert divided.speed is not None
    assert divided.speed.step_ms[1] > 2 * sliced.speed.step_ms[1]
    assert divided.speed.step_ms[256] == sliced.speed.step_ms[256]
    report = build_report(divided)
    assert report["expert_parallel_size"] == 4
    assert report["collective_bytes_per_step"] == 32 * 256 * SUM_BYTES
    assert "on h200x4, each device with 1 of 4 shares of the experts: fits" in render(divided)
    with pytest.raises(ConfigError, match="expert_parallel_size must be 1, as LlamaForCausalLM has no experts"):
        plan_of("llama-3.1-8b", "h200x4", expert_parallel_size=4)


def test_learned_positions_are_on_every_chip_and_end_the_model() -> None:
    plan, (_, arch) = plan_of("gpt-neo-2.7b", "h200x4"), read_model("gpt-neo-2.7b")
    num_params = registry.num_params(arch) + 3 * arch.max_position * arch.hidden_size
    assert plan.memory.weights == pytest.approx(2 * num_params / 4, rel=0.001)
    assert plan.schedule.max_model_len == arch.max_position == 2048
    assert plan.schedule.kv_groups.windows == (None, 256)
    with pytest.raises(ConfigError, match=r"max_model_len must be at most .* got 2049 and 2048"):
        plan_of("gpt-neo-2.7b", max_model_len=2049)


def test_a_config_file_and_a_directory_are_the_same_model(tmp_path: Path) -> None:
    content = (Path(__file__).parents[2] / "weights" / "default" / "config.json").read_text()
    for name in ("config.json", "other.json"):
        (tmp_path / name).write_text(content)
    archs = [read_model(str(path))[1] for path in (tmp_path, tmp_path / "config.json", tmp_path / "other.json")]
    assert archs == [read_model(None)[1]] * 3


@pytest.mark.parametrize(("content", "message"), [("[1]", "must hold a JSON object"), ("{", "must be JSON")])
def test_a_file_that_is_no_config(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_model(str(tmp_path / "bad.json"))


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 32, "max_num_seqs": 3},
        {"kv_cache_dtype": "int8", "quantization": "int8"},
        *(
            pytest.param(options, marks=pytest.mark.full)
            for options in ({}, {"kv_cache_dtype": "int8"}, {"quantization": "int8"})
        ),
    ],
)
def test_a_cpu_is_planned_as_its_engine_allocates(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Programs, "warm_up", lambda *_, **__: None)  # no program is run
    config = EngineConfig(compile_ahead="minimal", max_num_batched_tokens=16, **{"max_num_seqs": 8, **options})
    plan, arch = make_plan(config, parse_target("cpu")), build_arch(config)
    report, runner = build_report(plan), build_runners(config, arch)[0]
    assert report["weights_bytes_per_chip"] == pytest.approx(device_bytes(runner.params), rel=0.02)
    assert report["kv_bytes_per_chip"] == device_bytes(runner.state.kv_pages)
    assert report["slots_bytes_per_chip"] == device_bytes(runner.state.slots)
    assert plan.schedule == dataclasses.replace(
        runner.schedule, has_split_steps=False
    )  # they take no memory of their own
    assert plan.backend == runner.programs._backend


def on_a_machine_of(num_bytes: int, model: str, **options: Any) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=num_bytes))
        return plan_of(model, "cpu", **options)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "llama-3.1-8b" else pytest.mark.full) for name in PARAMS]
)
def test_a_machine_has_what_its_cpu_serves(name: str) -> None:
    """The missing bytes are weights, slots and a pool of one request less the machine's memory."""
    small = on_a_machine_of(8 * 10**9, name, max_model_len=1024, max_num_seqs=1)
    memory = small.memory
    assert memory.missing == memory.weights + memory.slots + memory.request - 8 * 10**9 > 10**9
    assert memory.weights == pytest.approx(2 * PARAMS[name] * 1e6, rel=0.001)
    told = build_report(small)
    assert (told["fits"], told["missing_bytes_per_chip"], told["limit_bytes_per_chip"]) == (False, memory.missing, 8e9)
    assert f"does not fit: this machine lacks {memory.missing / 1e9:.2f} GB\n" in render(small)
    enough = 8 * 10**9 + memory.missing
    assert on_a_machine_of(enough, name, max_model_len=1024, max_num_seqs=1).fits
    assert on_a_machine_of(enough - 1, name, max_model_len=1024, max_num_seqs=1).memory.missing == 1


def test_a_cpu_is_planned_alike_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = plan_of("llama-3.1-8b", "cpu").memory.weights
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert plan_of("llama-3.1-8b", "cpu").memory.weights == here


@pytest.mark.parametrize(("gigabytes", "who"), [(16, "this machine"), (200, "the pool"), (500, None), (1000, None)])
def test_the_pool_of_a_machine_is_a_sixteenth_of_it_at_most(gigabytes: int, who: str | None) -> None:
    """The weights do not fit in 16 GB; of 200 GB only the pool, a sixteenth, is too small for a request."""
    plan = on_a_machine_of(gigabytes * 10**9, "llama-3.1-8b", max_model_len=65536, max_num_seqs=2)
    memory = plan.memory
    pool = min(gigabytes * 10**9 / 16 - memory.slots, 2 * memory.request)
    assert memory.num_pages * memory.page == pytest.approx(pool, abs=memory.page)
    assert plan.fits == (who is None) == (pool >= memory.request)
    assert "the pool has 1/16 of it at most\n" in render(plan)
    if who == "the pool":
        assert memory.missing == memory.request - memory.pool_limit
    if who is not None:
        assert f"does not fit: {who} lacks {memory.missing / 1e9:.2f} GB\n" in render(plan)


@given(
    limit=st.integers(0, 10**12),
    weights=st.integers(0, 10**12),
    temp=st.integers(0, 10**11),
    pool_limit=st.integers(-(10**12), 10**12),
    page=st.integers(1, 10**7),
    num_pages=st.integers(1, 10**4),
)
def test_what_is_missing_is_no_more_than_it_lacks(
    limit: int, weights: int, temp: int, pool_limit: int, page: int, num_pages: int
) -> None:
    slots = 10**6
    memory = Memory(limit, weights, slots, temp, pool_limit, page, request=num_pages * page)

    def with_more(more: int) -> Memory:
        return dataclasses.replace(memory, limit=limit + more, pool_limit=pool_limit + more)

    beside = weights + slots + temp
    fits = memory.num_pages >= num_pages and beside + memory.num_pages * page <= limit
    assert fits == (not memory.missing)
    assert fits or with_more(memory.missing - 1).missing
    if beside + pool_limit <= limit:  # the engine's reserve suffices for the steps
        assert not with_more(memory.missing).missing


@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param(
            name,
            target,
            id=f"{name}-{target.name}",
            marks=[] if name == "llama-3.1-8b" or (name, target) == ("llama-3.1-405b", TPUS[-1]) else pytest.mark.full,
        )
        for name in PARAMS
        for target in [*GPUS, *TPUS]
    ],
)
def test_each_chip_has_its_share(name: str, target: Target) -> None:
    _, arch = read_model(name)
    length = min(8192, arch.max_position)
    plan = plan_of(name, target, max_model_len=length)
    memory, num_chips = plan.memory, target.num_chips
    copies = max(1, target.num_devices // arch.num_kv_heads)  # copies of each KV head
    num_layers = len(arch.attended_windows)
    kv_size = num_layers * 2 * arch.num_kv_heads * arch.head_dim
    num_params = registry.num_params(arch) + (copies - 1) * kv_size * arch.hidden_size
    whole = [spec for spec in registry.param_specs(arch) if spec.exact and spec.split_dimension is None]
    routers = sum(math.prod(spec.shape) for spec in whole)
    num_params += (target.num_devices - 1) * routers  # every device has all of them
    assert memory.weights == pytest.approx(2 * num_params / num_chips, rel=0.001)
    kv_token_bytes = copies * kv_size * 2
    group_token_bytes = kv_token_bytes * arch.kv_group_layers // num_layers
    assert memory.page == group_token_bytes * plan.schedule.page_size // num_chips
    assert memory.request == memory.page * plan.schedule.kv_groups.num_pages(length)
    if len(arch.kv_windows) == 1:
        assert memory.request == kv_token_bytes * length // num_chips
    layer_token_bytes = 4 * arch.local(target.num_devices).num_kv_heads * arch.head_dim
    assert plan.schedule.page_size == (16 if target in GPUS else min(128, 128 * 1024 // layer_token_bytes))
    assert plan.num_requests == plan.kv_tokens // length
    assert plan.fits == (memory.missing == 0) == (plan.num_requests > 0)
    assert (plan.speed is not None) == plan.fits
    assert target.sheet is not None
    limit = target.sheet.memory_bytes * (0.9 if target in GPUS else 1)
    assert memory.limit == pytest.approx(limit)
    assert memory.weights + memory.slots + memory.temp + memory.num_pages * memory.page <= limit or not plan.fits


@pytest.mark.parametrize(
    ("name", "smallest"),
    [
        ("llama-3.1-8b", "h200"),
        ("llama-3.1-70b", "h200x2"),
        pytest.param("qwen3-32b", "h200", marks=pytest.mark.full),
        pytest.param("llama-3.1-405b", "h200x8", marks=pytest.mark.full),
    ],
)
def test_what_fits_on_how_many(name: str, smallest: str | None) -> None:
    fitting = [target.name for target in GPUS if plan_of(name, target, max_model_len=8192).fits]
    assert (fitting[0] if fitting else None) == smallest
    assert fitting == [target.name for target in GPUS][len(GPUS) - len(fitting) :]


@pytest.mark.parametrize("target", mainly(["h200x8"], "v6e:4x4", "tpu7x:2x2x1"))
def test_every_chip_has_whole_latents_of_576_elements(target: str) -> None:
    plan = plan_of("deepseek-v3", target, max_model_len=8192)
    assert plan.memory.page == 61 * 576 * 2 * plan.schedule.page_size * plan.target.devices_per_chip
    assert plan.fits == (target != "v6e:4x4")  # 692 GB of 512


@pytest.mark.parametrize(("name", "gigabytes"), [("gpt-oss-20b", 13.76), ("gpt-oss-120b", 65.25)])
def test_experts_have_the_bytes_that_are_published(name: str, gigabytes: float) -> None:
    """Elements of four bits and a byte for 32 of them; whatever else there is has 16 bits."""
    plan = plan_of(name)
    assert plan.memory.weights / 1e9 == pytest.approx(gigabytes, rel=0.001)
    assert plan.fits
    assert plan.schedule.kv_groups.windows == (128, None)


def test_the_last_missing_byte_makes_it_fit() -> None:
    plan = plan_of("llama-3.1-70b", max_model_len=8192)
    assert not plan.fits
    assert plan.target.sheet is not None
    memory_bytes = plan.target.sheet.memory_bytes + math.ceil(plan.memory.missing / 0.9)
    assert plan_of("llama-3.1-70b", with_memory(plan.target, memory_bytes + 10), max_model_len=8192).fits
    almost = plan_of("llama-3.1-70b", with_memory(plan.target, memory_bytes - 10), max_model_len=8192)
    assert 0 < almost.memory.missing <= 10


def test_more_memory_is_more_pages_and_narrow_ones_are_half_as_wide() -> None:
    kinds = ("auto", "fp8", "int4")
    plain, narrow, narrowest = (plan_of("llama-3.1-8b", kv_cache_dtype=kind).memory for kind in kinds)
    assert narrow.pool_limit == narrowest.pool_limit == plain.pool_limit
    assert narrow.page == plain.page * (128 + 2) / 256  # one scale per 128 elements of a token and head
    assert narrowest.page == plain.page * (64 + 8) / 256
    assert narrowest.num_pages > 3.5 * plain.num_pages
    pages = [
        plan_of("llama-3.1-8b", with_memory(parse_target("h200"), n * 10**9)).memory.num_pages for n in (100, 120, 140)
    ]
    assert pages[2] - pages[1] == pytest.approx(20e9 * 0.9 / plain.page, abs=1)
    assert pages[1] - pages[0] == pytest.approx(20e9 * 0.9 / plain.page, abs=1)


def test_xla_takes_what_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert plan_of("llama-3.1-8b").memory.limit == 141e9 / 2
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "most")
    with pytest.raises(ConfigError, match="XLA_PYTHON_CLIENT_MEM_FRACTION must be a number"):
        plan_of("llama-3.1-8b")


def test_a_decode_step_of_one_row_reads_all_weights_and_its_own_tokens() -> None:
    plan = plan_of("llama-3.1-8b")
    assert plan.speed is not None
    embedding = 128256 * 4096 * 2
    num_bytes = plan.memory.weights - embedding + MIN_FEW_TOKENS * 4096 * 2 + (1024 + 1) * 131072
    assert plan.speed.step_ms[1] == pytest.approx(num_bytes / 4.8e12 * 1e3, rel=1e-6)


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
    ("name", "num_links"), [("v5e:1x1", 0), ("v6e:2x4", 3), ("v5p:2x2x1", 2), ("v5p:4x4x4", 6), ("h200x8", 1)]
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


def test_capacity_is_what_whole_pages_hold() -> None:
    plan = plan_of("llama-3.1-8b")
    for length in (1, 15, 16, 17, 1000, 100_000, 131_072):
        pages = math.ceil(length / 16)
        assert plan.capacity(length) * pages <= plan.memory.num_pages < (plan.capacity(length) + 1) * pages


def test_the_capacity_curve_ends_with_the_longest_request() -> None:
    plan = plan_of("llama-3.1-8b", max_model_len=5000)
    curve = capacity_curve(plan)
    assert list(curve) == [128, 256, 512, 1024, 2048, 4096, 5000]
    assert list(curve.values()) == sorted(curve.values(), reverse=True)
    assert curve[5000] == plan.num_requests


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


def test_the_report_has_all_figures_and_survives_json() -> None:
    keys = {"fits", "weights_bytes_per_chip", "temp_bytes_per_chip", "kv_bytes_per_chip", "kv_tokens"}
    keys |= {"collectives_per_layer", "compile_s", "step_ms", "tokens_per_s", "ttft_ms", "missing_bytes_per_chip"}
    shown = [build_report(plan) for plan in (plan_of("llama-3.1-8b", "h200x2"), plan_of("llama-3.1-405b"))]
    shown.append(build_report(make_plan(EngineConfig(), parse_target("cpu"))))
    for report in shown:
        assert keys <= report.keys()
        assert json.loads(json.dumps(report)).keys() == report.keys() == shown[0].keys()
    fitting, too_large, cpu = shown
    assert fitting["fits"]
    assert not fitting["missing_bytes_per_chip"]
    bucket = fitting["compiled_tokens"][1]
    assert fitting["collectives_per_layer"] == [{"kind": "all-reduce", "count": 2, "num_bytes": SUM_BYTES * bucket}]
    assert not too_large["fits"]
    assert too_large["missing_bytes_per_chip"] > 700e9
    assert too_large["ttft_ms"] is None
    assert cpu["compile_s"] is None
    assert too_large["compile_s"] is None


def test_what_the_compiler_estimates_is_shown_where_it_does() -> None:
    plan = plan_of("llama-3.1-8b", "v6e:1x1", max_model_len=8192)
    assert plan.largest is not None
    assert "estimate" not in render(plan)
    told = dataclasses.replace(plan, largest=dataclasses.replace(plan.largest, estimate_ms=1.5))
    assert "1.5 ms for 2048 tokens" in render(told)
    assert build_report(told)["compiler_estimate_ms"] == [1.5, None]


def test_all_programs_of_the_engine_are_told_where_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["plan", "--target", "v6e:1x1", "--model", "llama-3.1-8b", "--max-model-len", "8192", "--programs"]
    assert cli.main([*options, "--json"]) == 0
    programs = json.loads(capsys.readouterr().out)["programs"]
    steps = (16, 64, 256, 384, 512, 768, 1024, 1536, 2048)
    assert list(programs["seconds"]) == ["set_slot", *(f"step {size}" for size in steps), "multi-step (16,)"]
    assert (programs["count"], programs["total_s"]) == (11, 1.5 + 9 * 2 + 3)
    assert cli.main(options) == 0
    shown = capsys.readouterr().out
    assert "the engine has 11 programs there, which took 22 s to compile here" in shown
    assert build_report(plan_of("llama-3.1-8b"))["programs"] is None


def test_the_table_says_what_is_predicted() -> None:
    assert "predicted, not measured" in render(plan_of("llama-3.1-8b"))
    text = render(plan_of("llama-3.1-405b"))
    assert "does not fit: each chip lacks" in text
    assert "predicted" not in text
    assert "predicted" not in render(make_plan(EngineConfig(), parse_target("cpu")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "h300"], "as v6e:2x4, got 'h300'"),
        (["--target", "h200x9"], "h200x2 to h200x8"),
        (["--target", "v6e:2x2x2"], "v6e must have chips in 2 directions, as v6e:2x2, got 'v6e:2x2x2'"),
        (["--sweep", "cpu", "h300"], "as v6e:2x4, got 'h300'"),
        (["--target", "cpu", "--prices", "x.toml"], "give --sweep, or drop --prices"),
        (["--target", "cpu", "--programs"], "give it by --target, or drop --programs"),
        (["--sweep", "cpu", "--programs"], "give it by --target, or drop --programs"),
        (["--target", "cpu", "--attention-backend", "mosaic_tpu"], "it runs on TPUs only"),
        (["--target", "cpu", "--multi-step", "0"], "multi_step must be"),
        (["--target", "cpu", "--batch", "65"], "batch must be in [1, max_num_seqs], got 65 and 64"),
        (["--target", "cpu", "--plot", "no/such/place.png"], "plot must be a file in a directory that exists"),
        (["--target", "cpu", "--model", "llama-9"], "model must be a checkpoint directory, a config.json or one of"),
        (["--target", "cpu", "--max-model-len", "99999"], "max_model_len must be at most"),
        (["--target", "cpu", "--prompt-len", "0"], "prompt_len must be in [1, max_model_len], got 0 and 1024"),
        (["--target", "cpu", "--context-len", "2000"], "context_len must be in [1, max_model_len], got 2000 and 1024"),
        (["--target", "h200x8"], "tensor_parallel_size must divide num_attention_heads, got 8 and 4"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chip, "unavailable", lambda _: "this is missing")
    for name, package in (("h200", f"jax-cuda13-plugin=={jax.__version__}"), ("v6e:2x4", "libtpu")):
        message = rf"to plan for {name}, .* but this is missing; .*: pip install --target '/a b' --no-deps .*{package}"
        with pytest.raises(ConfigError, match=message):
            find_target(name, Path("/a b"))
    assert find_target("cpu", Path()) == parse_target("cpu")


FIND_COMPILERS = """
import sys
from jaxserve.cli import main
code = main(["plan", "--target", "h200", *sys.argv[1:]])
import jax_plugins.xla_cuda13
print(code, "nvidia.cu13" in sys.modules)
"""


@pytest.mark.skipif(bool(list(metadata.distributions(name="jax-cuda13-plugin"))), reason="a CUDA plugin is installed")
@pytest.mark.parametrize("is_default", [True, False])
def test_compilers_are_found_in_a_folder_of_their_own(is_default: bool, tmp_path: Path) -> None:
    """A plugin of a wrong version is reported before jax loads it; compilers beside it are importable by jax."""
    folder = tmp_path / "jaxserve" / "compilers" if is_default else tmp_path / "elsewhere"
    for package in ("jax_plugins/xla_cuda13", "nvidia/cu13"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").touch()
    (folder / "jax_cuda13_plugin-0.0.1.dist-info").mkdir()
    (folder / "jax_cuda13_plugin-0.0.1.dist-info" / "METADATA").write_text("Name: jax-cuda13-plugin\nVersion: 0.0.1\n")
    run = subprocess.run(
        [sys.executable, "-c", FIND_COMPILERS, *([] if is_default else ["--compilers", str(folder)])],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout == "2 True\n"
    assert f"must have the version of jax, {jax.__version__}, and 0.0.1 was found" in run.stderr
    assert f"pip install --target {folder} --no-deps jax-cuda13-plugin=={jax.__version__}" in run.stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_prints_the_plan(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--json"] if as_json else []
    assert cli.main(["plan", "--target", "cpu", "--max-num-seqs", "4", *flags]) == 0
    plan = make_plan(EngineConfig(max_num_seqs=4), parse_target("cpu"))
    shown = capsys.readouterr().out
    report = json.loads(json.dumps(build_report(plan)))
    assert json.loads(shown) == report if as_json else shown == render(plan) + "\n"


def test_sliding_windows_save_the_pages_behind_them(tmp_path: Path) -> None:
    config = json.loads((Path(jaxserve.planner.__file__).parent / "configs/mistral-7b-v0.3.json").read_text())
    requests = {}
    for window in (None, 4096):
        path = tmp_path / f"{window}.json"
        path.write_text(json.dumps({**config, "sliding_window": window, "max_position_embeddings": 32768}))
        requests[window] = plan_of(str(path), GPUS[0]).num_requests
    assert requests[4096] == pytest.approx(8 * requests[None], rel=0.05)
