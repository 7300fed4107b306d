"""Plan of a model on a target: memory on each chip, and the fastest possible steps."""

import dataclasses
import time
from dataclasses import dataclass

from jaxserve.api.config import EngineConfig
from jaxserve.assembly.parameters import adapter_layout
from jaxserve.errors import ConfigError
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.tools.planner.host_memory import HostMemory
from jaxserve.tools.planner.images import ImagePlan, plan_images
from jaxserve.tools.planner.program import StepCompiler, StepProgram
from jaxserve.tools.planner.remedies import Remedy, find_fitting_len, find_remedies
from jaxserve.tools.planner.sizes import Memory, Sizes
from jaxserve.tools.planner.speed import StageTimes
from jaxserve.tools.planner.targets import Target

_ROWS = (1, 8, 32, 64, 128, 256)  # batch sizes of the predicted decode steps, as far as they fit
_COMPILED_PAGES = 1024  # maximum pages per device in compiled steps, whose figures do not depend on it
_TOKENS = 1024  # default length of predicted prompts and contexts, at most max_model_len


@dataclass(frozen=True)
class Speed:
    """Speed that the data sheet allows; predicted, not measured.

    Attributes:
        context_tokens: context length per row.
        step_ms: decode step time by row count.
        tokens_per_s: total decode throughput by row count.
        prompt_tokens: prompt length of a request that runs alone.
        ttft_ms: this request's time to first token.
    """

    context_tokens: int
    step_ms: dict[int, float]
    tokens_per_s: dict[int, float]
    prompt_tokens: int
    ttft_ms: float


@dataclass(frozen=True)
class StagePlan:
    """A pipeline stage on its chips.

    Attributes:
        num_layers: layer count.
        weights: weight bytes per chip.
        decode_ms: decode time of a step with its part of the most rows; None on a CPU, and if the model does not fit.
        prefill_ms: time of a step full of prompt tokens.
    """

    num_layers: int
    weights: int
    decode_ms: float | None = None
    prefill_ms: float | None = None


@dataclass(frozen=True)
class Plan:
    """Predicted memory and speed of a model on a target.

    Attributes:
        model: name that the user gave.
        target: the chips.
        num_layers: layer count.
        dtype: weight and activation dtype.
        quantization: weight quantisation, on load or in the checkpoint.
        kv_dtype: KV pool's dtype.
        backend: attention backend.
        schedule: step and pool sizes; if the model does not fit, the pool holds one request of max_model_len.
        memory: memory per chip.
        largest: step with the most tokens, on one device; None if nothing is compiled: on a CPU, if the weights and one
            request do not fit, and if the caller wants no compilation.
        decode: step with max_num_seqs decoding rows; None if nothing is compiled.
        compile_s: seconds to trace and compile both steps on this machine.
        program_s: seconds to trace and compile each of the engine's programs on this machine, by name; None if not
            requested, or nothing is compiled.
        speed: predicted speed; None on a CPU, and if the model does not fit.
        num_expert_shards: number of expert shards; 1 if every device has a part of each expert.
        fitting_len: if the model does not fit, the largest max_model_len that fits, or 0 if none does; None if it fits.
        host: host memory for pages; None for none.
        remedies: options with which the model fits, or lacks less memory, if no max_model_len fits.
        stages: pipeline stages; other attributes are for the one with the least memory for pages, except `speed` and
            `images`.
        images: vision tower; None if the model takes no images.
    """

    model: str
    target: Target
    num_layers: int
    dtype: str
    quantization: str | None
    kv_dtype: str
    backend: str
    schedule: ScheduleConfig
    memory: Memory
    largest: StepProgram | None = None
    decode: StepProgram | None = None
    compile_s: float | None = None
    program_s: dict[str, float] | None = None
    speed: Speed | None = None
    num_expert_shards: int = 1
    fitting_len: int | None = None
    host: HostMemory | None = None
    remedies: tuple[Remedy, ...] = ()
    stages: tuple[StagePlan, ...] = ()
    images: ImagePlan | None = None

    @property
    def num_chips(self) -> int:
        """Number of chips of all pipeline stages."""
        return self.target.num_chips * max(len(self.stages), 1)

    @property
    def fits(self) -> bool:
        """True if a request of max_model_len tokens can be served."""
        return not self.memory.missing

    @property
    def kv_tokens(self) -> int:
        """Tokens that the pools of all chips hold in requests of max_model_len tokens."""
        num_tokens, num_shards = self.schedule.max_model_len, self.schedule.num_data_shards
        return num_shards * self.memory.num_pages * num_tokens // self.schedule.kv_groups.num_pages(num_tokens)

    @property
    def num_requests(self) -> int:
        """Number of requests of max_model_len tokens that fit in the pool at the same time."""
        return self.capacity(self.schedule.max_model_len)

    def capacity(self, num_tokens: int) -> int:
        """Return the number of requests with `num_tokens` tokens that fit in all shards' pools at the same time."""
        num_pages = self.schedule.kv_groups.num_decoding_pages(num_tokens)
        return self.schedule.num_data_shards * (self.memory.num_pages // num_pages)


def make_plan(
    config: EngineConfig,
    target: Target,
    *,
    prompt_tokens: int | None = None,
    context_tokens: int | None = None,
    batch: int | None = None,
    compiles: bool = True,
    all_programs: bool = False,
    advises: bool = True,
) -> Plan:
    """Choose all sizes as the engine would on the target, and compile its steps for the target.

    Args:
        config: engine options; `model` may be anything that `read_model` takes; sizes that are None are resolved as on
            the target.
        target: chips that the model is split over.
        prompt_tokens: prompt length for the predicted TTFT.
        context_tokens: context length for the predicted decode steps.
        batch: additional number of rows for which a decode step is predicted.
        compiles: False to compile nothing: step temporaries and exchanges between chips are then not counted.
        all_programs: True to compile all of the engine's programs and time each.
        advises: False to look for no remedies if the model does not fit; each of them takes another plan.

    Raises:
        ConfigError: the engine does not support the model or a size on this target, or the steps cannot be compiled.
    """
    stages = Sizes.resolve_stages(config, target)
    sizes = min(stages, key=lambda stage: stage.tightness)
    arch, sheet, schedule, memory = sizes.arch, target.sheet, sizes.schedule, sizes.memory
    prompt_tokens = _predicted("prompt_len", prompt_tokens, "max_model_len", schedule.max_model_len)
    context_tokens = _predicted("context_len", context_tokens, "max_model_len", schedule.max_model_len)
    batch = _predicted("batch", batch, "max_num_seqs", schedule.max_num_seqs)
    stored = sizes.quantization or (None if arch.schemes is None else arch.schemes.method)
    dtypes = sizes.dtype.name, stored, sizes.kv_dtype.name
    names = (sizes.name, target, arch.num_layers, *dtypes, sizes.backend, schedule)
    chip_memory, num_shards = memory.times(target.devices_per_chip), config.expert_parallel_size
    divided = tuple(
        StagePlan(stage.arch.num_layers, stage.memory.weights * target.devices_per_chip) for stage in stages
    )
    images = next(filter(None, map(plan_images, stages)), None)
    plan = Plan(*names, chip_memory, num_expert_shards=num_shards, host=sizes.host, stages=divided, images=images)
    if sheet is None or memory.missing:
        return _advised(plan, config, memory, advises)
    lengths = prompt_tokens, context_tokens, batch
    if not compiles:
        return _predicted_plan(plan, StageTimes([stage.roofline() for stage in stages]), memory.num_pages, *lengths)
    # With a pool that fills the memory, XLA assumes that the program does not fit and spends long on rematerialisation.
    num_pages = schedule.num_data_shards * min(_COMPILED_PAGES, schedule.kv_groups.num_pages(schedule.max_model_len))
    small = dataclasses.replace(schedule, num_pages=num_pages)
    started = time.perf_counter()
    kinds = sizes.dtype, sizes.kv_dtype, sizes.backend, sizes.quantization, config.linear_backend
    adapters = adapter_layout(config, arch, platform=sheet.chip.platform)
    compiler = StepCompiler(target, small, *kinds, adapters)
    buckets = (schedule.max_num_batched_tokens, decode_bucket(schedule))
    compiled = {program.num_tokens: program for program in compiler.step_programs(arch, list(dict.fromkeys(buckets)))}
    largest, decode = (compiled[bucket] for bucket in buckets)
    compile_s = time.perf_counter() - started
    program_s = compiler.compile_times(arch, config.max_steps) if all_programs else None
    memory = dataclasses.replace(memory, temp=max(largest.temp_bytes, decode.temp_bytes))
    compiled_plan = dataclasses.replace(
        plan,
        memory=memory.times(target.devices_per_chip),
        largest=largest,
        decode=decode,
        compile_s=compile_s,
        program_s=program_s,
    )
    if not memory.missing:
        times = StageTimes([stage.roofline(largest.collectives, largest.num_tokens) for stage in stages])
        compiled_plan = _predicted_plan(compiled_plan, times, memory.num_pages, *lengths)
    return _advised(compiled_plan, config, memory, advises)


def _advised(plan: Plan, config: EngineConfig, memory: Memory, advises: bool) -> Plan:
    """Return the plan with the largest max_model_len that fits, and remedies if none does.

    Args:
        plan: plan without both.
        config: options of the plan.
        memory: memory per device, with the temporaries of compiled steps.
        advises: False to look for no remedies.
    """
    fitting_len = find_fitting_len(config, plan.target, memory, plan.schedule)
    remedies = tuple(find_remedies(config, plan.target, memory)) if advises and fitting_len == 0 else ()
    return dataclasses.replace(plan, fitting_len=fitting_len, remedies=remedies)


def decode_bucket(schedule: ScheduleConfig) -> int:
    """Return the padded number of tokens in a step with max_num_seqs decoding rows."""
    return min(size for size in schedule.buckets() if size >= schedule.max_num_seqs)


def _predicted(name: str, given: int | None, limit_name: str, limit: int) -> int:
    """Return `given`, by default the smaller of `_TOKENS` and `limit`; ConfigError if it is not in [1, limit]."""
    if given is None:
        return min(_TOKENS, limit)
    if not 0 < given <= limit:
        raise ConfigError(f"{name} must be in [1, {limit_name}], got {given} and {limit}")
    return given


def _predicted_plan(
    plan: Plan, times: StageTimes, num_pages: int, prompt_tokens: int, context_tokens: int, batch: int
) -> Plan:
    """Return the plan with its speed and its stages' times; see `_speed` for the arguments."""
    speed, budget = _speed(times, num_pages, prompt_tokens, context_tokens, batch), plan.schedule.max_num_batched_tokens
    part = times.part(max(speed.step_ms, default=1))
    stages = tuple(
        dataclasses.replace(
            stage,
            decode_ms=roofline.decode_ms(part, context_tokens),
            prefill_ms=roofline.step_ms([0], [budget // plan.schedule.num_data_shards]),
        )
        for stage, roofline in zip(plan.stages, times.rooflines, strict=True)
    )
    return dataclasses.replace(plan, speed=speed, stages=stages)


def _speed(times: StageTimes, num_pages: int, prompt_tokens: int, context_tokens: int, batch: int) -> Speed:
    """Predict a prompt's prefill and decode steps with several numbers of rows, `batch` among them.

    Args:
        times: the model's stages on the target.
        num_pages: pages in a shard's pool, which limit the rows.
        prompt_tokens: prompt length.
        context_tokens: context length per row.
        batch: additional number of rows.
    """
    schedule = times.rooflines[0].schedule
    most = schedule.num_data_shards * (num_pages // schedule.kv_groups.num_decoding_pages(context_tokens))
    most = min(schedule.max_num_seqs, most)
    rows = sorted({count for count in (*_ROWS, batch, most) if count <= most})
    step_ms = {count: times.decode_ms(count, context_tokens) for count in rows}
    return Speed(
        context_tokens=context_tokens,
        step_ms=step_ms,
        tokens_per_s={count: count / ms * 1e3 for count, ms in step_ms.items()},
        prompt_tokens=prompt_tokens,
        ttft_ms=times.ttft_ms(prompt_tokens),
    )
