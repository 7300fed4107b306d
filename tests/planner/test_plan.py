"""Memory of plans: those of accelerators with stubbed compiled steps, those of a CPU against its engine."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxserve.tools.planner
from jaxserve import EngineConfig
from jaxserve.assembly.build import build_runners
from jaxserve.assembly.generation_defaults import build_arch
from jaxserve.errors import ConfigError
from jaxserve.execution.programs import Programs
from jaxserve.models import registry
from jaxserve.models.params import device_bytes
from jaxserve.tools.planner.models import read_model
from jaxserve.tools.planner.plan import Plan, make_plan
from jaxserve.tools.planner.program import StepCompiler, StepProgram
from jaxserve.tools.planner.report import build_report, capacity_curve, render
from jaxserve.tools.planner.sizes import Memory
from jaxserve.tools.planner.targets import Target, parse_target
from tests.parameters import mainly
from tests.planner.plans import (
    DENSE_PARAMS,
    DTYPES,
    GPT_PARAMS,
    GPUS,
    PARAMS,
    QUANTISED_PARAMS,
    SUM_BYTES,
    TPUS,
    plan_of,
    with_memory,
)

pytestmark = pytest.mark.usefixtures("no_compiler")


@pytest.mark.parametrize("name", [*PARAMS, *QUANTISED_PARAMS, *GPT_PARAMS, *DENSE_PARAMS])
def test_packaged_configs_have_the_published_parameter_counts(name: str) -> None:
    called, arch = read_model(name)
    assert called == name
    millions = {**PARAMS, **QUANTISED_PARAMS, **GPT_PARAMS, **DENSE_PARAMS}[name]
    assert registry.num_params(arch) / 1e6 == pytest.approx(millions, rel=0.001)
    assert arch.dtype == DTYPES.get(name, "bfloat16")


@pytest.mark.long
def test_stages_have_a_part_of_the_weights_each_and_steps_of_the_most_expensive_one() -> None:
    name, options = "llama-3.1-8b", {"max_model_len": 8192}
    whole, staged = (plan_of(name, "h200x2", pipeline_parallel_size=n, **options) for n in (1, 2))
    assert sum(stage.num_layers for stage in staged.stages) == whole.num_layers == 32
    assert sum(stage.weights for stage in staged.stages) == pytest.approx(whole.memory.weights, rel=1e-5)  # final norms
    assert staged.num_chips == 2 * whole.num_chips == 4
    assert staged.kv_tokens > 1.8 * whole.kv_tokens, "a token has about half its layers in each stage"
    assert staged.speed is not None
    assert whole.speed is not None
    times = [stage.decode_ms or 0 for stage in staged.stages]
    assert staged.speed.step_ms[256] == pytest.approx(2 * max(times))
    assert staged.speed.step_ms[1] == pytest.approx(whole.speed.step_ms[1], rel=0.01), "a row passes all layers"
    assert staged.speed.tokens_per_s[256] > whole.speed.tokens_per_s[256]
    report, text = build_report(staged), render(staged)
    assert report["pipeline_parallel_size"] == 2
    assert [stage["decode_ms"] for stage in report["stages"]] == times
    assert "h200x2 for each of 2 pipeline stages" in text
    assert f"wait for the most expensive one for {100 * (1 - sum(times) / 2 / max(times)):.1f}% of decode" in text


def test_more_stages_than_layers_are_refused_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"must be at most 16, .* 16 layers .* got 17"):
        plan_of("llama-3.2-1b", "h200", pipeline_parallel_size=17)


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
    assert "on h200x4, each device with 1 of 4 shards of the experts: fits" in render(divided)
    with pytest.raises(ConfigError, match="expert_parallel_size must be 1, as LlamaForCausalLM has no experts"):
        plan_of("llama-3.1-8b", "h200x4", expert_parallel_size=4)


def test_data_parallel_attention_multiplies_the_capacity() -> None:
    """A chip has all latents of its own requests, and attention whole: their part of the weights is not divided."""
    everywhere, divided = (
        make_plan(
            EngineConfig(
                model="deepseek-v3",
                tensor_parallel_size=8,
                expert_parallel_size=8,
                enable_dp_attention=num_shares > 1,
                max_model_len=8192,
                max_num_seqs=128 // num_shares,
                max_num_batched_tokens=1024 // num_shares,
            ),
            parse_target("h200x8"),
            context_tokens=8192,
        )
        for num_shares in (1, 8)
    )
    assert divided.schedule.max_num_seqs == everywhere.schedule.max_num_seqs
    assert divided.memory.page == everywhere.memory.page
    more = divided.memory.weights - everywhere.memory.weights
    assert divided.memory.pool_limit == pytest.approx(everywhere.memory.pool_limit - more, rel=0.01)
    assert divided.schedule.num_pages == 8 * divided.memory.num_pages
    assert divided.num_requests == 8 * (divided.memory.num_pages // 512) > 4 * everywhere.num_requests
    assert divided.speed is not None
    assert everywhere.speed is not None
    assert max(everywhere.speed.step_ms) < max(divided.speed.step_ms) == 128, "more rows fit"
    spared = 64 * 8192 * everywhere.memory.page // 16 * 7 // 8 - more  # bytes that a chip reads less
    assert everywhere.speed.step_ms[64] - divided.speed.step_ms[64] == pytest.approx(spared / 4.8e9, rel=0.1)
    assert divided.speed.ttft_ms > everywhere.speed.ttft_ms, "a prompt alone is computed by one share"
    assert "shards of the experts and of the requests: fits" in render(divided)


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


@pytest.mark.parametrize(
    ("content", "message"),
    [("[1]", "must hold a JSON object"), ("{", "must be a readable JSON file"), ("[" * 10**5, "must nest arrays")],
)
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
    assert report["weights_bytes_per_chip"] == device_bytes(runner.params)
    assert report["kv_bytes_per_chip"] == device_bytes(runner.state.kv_pages)
    assert report["slots_bytes_per_chip"] == device_bytes(runner.state.slots)
    assert plan.schedule == dataclasses.replace(
        runner.schedule, has_split_steps=False
    )  # they take no memory of their own
    assert plan.backend == runner.programs.lowering.backend


def on_a_machine_of(num_bytes: int, model: str, **options: Any) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxserve.system.machine_memory.machine_bytes", lambda: num_bytes)
        return plan_of(model, "cpu", **options)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "llama-3.1-8b" else pytest.mark.full) for name in PARAMS]
)
def test_a_machine_has_what_its_cpu_serves(name: str) -> None:
    """The missing bytes are weights, slots and a pool of one request less the machine's memory."""
    small = on_a_machine_of(8 * 10**9, name, max_model_len=1024, max_num_seqs=1)
    memory = small.memory
    assert memory.missing == memory.weights + memory.slots + memory.request - 8 * 10**9 > 10**9
    num_params = PARAMS[name] * 1e6
    _, arch = read_model(name)
    if (latent := arch.attention.mla) is not None:  # packed once for queries of latents, once to expand these
        num_params += (
            len(arch.attention_layers)
            * arch.attention.kv.rank
            * arch.attention.num_heads
            * (latent.nope_dim + latent.value_dim)
        )
    assert memory.weights == pytest.approx(2 * num_params, rel=0.001)
    told = build_report(small)
    assert (told["fits"], told["missing_bytes_per_chip"], told["limit_bytes_per_chip"]) == (False, memory.missing, 8e9)
    assert f"does not fit: this machine lacks {memory.missing / 1e9:.2f} GB; " in render(small)
    enough = 8 * 10**9 + memory.missing
    assert on_a_machine_of(enough, name, max_model_len=1024, max_num_seqs=1).fits
    assert on_a_machine_of(enough - 1, name, max_model_len=1024, max_num_seqs=1).memory.missing == 1


def test_a_cpu_plan_is_the_same_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert f"does not fit: {who} lacks {memory.missing / 1e9:.2f} GB; " in render(plan)


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


def is_split_by_heads(name: str, target: Target) -> bool:
    """Return whether a model has keys and values of heads, and a target divides its heads."""
    _, arch = read_model(name)
    return arch.attention.mla is None and arch.attention.num_heads % target.num_devices == 0


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
        if is_split_by_heads(name, target)
    ],
)
def test_tensor_parallelism_divides_the_weights(name: str, target: Target) -> None:
    _, arch = read_model(name)
    length = min(8192, arch.max_position)
    plan = plan_of(name, target, max_model_len=length)
    memory, num_chips = plan.memory, target.num_chips
    copies = max(1, target.num_devices // arch.attention.num_kv_heads)  # copies of each KV head
    num_layers = len(arch.attention_layers)
    kv_size = num_layers * 2 * arch.attention.num_kv_heads * arch.attention.head_dim
    num_params = registry.num_params(arch) + (copies - 1) * kv_size * arch.hidden_size
    whole = [spec for spec in registry.param_specs(arch) if spec.exact and spec.split_dimension is None]
    routers = sum(math.prod(spec.shape) for spec in whole)
    num_params += (target.num_devices - 1) * routers  # every device has all of them
    assert memory.weights == pytest.approx(2 * num_params / num_chips, rel=0.001)
    kv_token_bytes = copies * kv_size * 2
    group_token_bytes = kv_token_bytes * arch.kv_layout.num_pool_layers // num_layers
    assert memory.page == group_token_bytes * plan.schedule.page_size // num_chips
    assert memory.request == memory.page * plan.schedule.kv_groups.num_pages(length)
    if len(arch.kv_layout.windows) == 1:
        assert memory.request == kv_token_bytes * length // num_chips
    layer_token_bytes = 4 * arch.local(target.num_devices).attention.num_kv_heads * arch.attention.head_dim
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
def test_models_fit_on_the_expected_number_of_chips(name: str, smallest: str | None) -> None:
    fitting = [target.name for target in GPUS if plan_of(name, target, max_model_len=8192).fits]
    assert (fitting[0] if fitting else None) == smallest
    assert fitting == [target.name for target in GPUS][len(GPUS) - len(fitting) :]


@pytest.mark.parametrize("target", mainly(["h200x8"], "v6e:4x4", "tpu7x:2x2x1"))
def test_every_chip_has_whole_latents_of_576_elements(target: str) -> None:
    plan = plan_of("deepseek-v3", target, max_model_len=8192)
    columns = 576 if target == "h200x8" else 640  # whole memory tiles of 128 on TPUs
    assert plan.memory.page == 61 * columns * 2 * plan.schedule.page_size * plan.target.devices_per_chip
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


def test_steps_are_compiled_with_few_pages_however_long_requests_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA tries to rematerialise, and says so, where a pool for 131072 tokens leaves little of the chip's memory."""
    seen, stub = list[int](), StepCompiler.step_programs

    def step_programs(self: StepCompiler, arch: object, buckets: Sequence[int]) -> list[StepProgram]:
        seen.append(self.schedule.num_pages)
        return stub(self, arch, buckets)

    monkeypatch.setattr(StepCompiler, "step_programs", step_programs)
    plans = [plan_of("llama-3.1-8b", "h100", max_model_len=length) for length in (256, 131_072)]
    assert seen == [16, 1024]
    assert plans[1].memory.num_pages > 20_000


def test_the_memory_limit_follows_the_utilization_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert plan_of("llama-3.1-8b").memory.limit == 141e9 / 2
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "most")
    with pytest.raises(ConfigError, match="XLA_PYTHON_CLIENT_MEM_FRACTION must be a number"):
        plan_of("llama-3.1-8b")


def test_capacity_is_what_whole_pages_hold() -> None:
    plan = plan_of("llama-3.1-8b")
    for length in (1, 15, 16, 17, 1000, 100_000, 131_072):
        pages = math.ceil(length / 16)
        assert plan.capacity(length) * pages <= plan.memory.num_pages < (plan.capacity(length) + 1) * pages


def test_a_budget_lets_more_requests_sample_at_the_same_time() -> None:
    sizes = {"max_model_len": 8192}
    dense = plan_of("llama-3.1-8b", **sizes)
    for method in ("snapkv", "streaming_llm"):
        evicting = plan_of("llama-3.1-8b", kv_eviction={"method": method, "budget": 1024}, **sizes)
        assert evicting.memory == dense.memory, "a prompt is computed with all its keys"
        assert evicting.num_requests == pytest.approx(dense.num_requests * 512 / 65, rel=0.02)
        assert evicting.capacity(1024) == dense.capacity(1024)
    choosing = plan_of("llama-3.1-8b", sparse_attention={"method": "quest", "budget": 1024}, **sizes)
    assert choosing.memory.page == dense.memory.page * 17 // 16, "a page of 16 tokens has the bounds of its keys"


def test_the_capacity_curve_ends_with_the_longest_request() -> None:
    plan = plan_of("llama-3.1-8b", max_model_len=5000)
    curve = capacity_curve(plan)
    assert list(curve) == [128, 256, 512, 1024, 2048, 4096, 5000]
    assert list(curve.values()) == sorted(curve.values(), reverse=True)
    assert curve[5000] == plan.num_requests


def test_sliding_windows_release_the_pages_before_them(tmp_path: Path) -> None:
    config = json.loads((Path(jaxserve.tools.planner.__file__).parent / "configs/mistral-7b-v0.3.json").read_text())
    requests = {}
    for window in (None, 4096):
        path = tmp_path / f"{window}.json"
        path.write_text(json.dumps({**config, "sliding_window": window, "max_position_embeddings": 32768}))
        requests[window] = plan_of(str(path), GPUS[0]).num_requests
    assert requests[4096] == pytest.approx(8 * requests[None], rel=0.05)
