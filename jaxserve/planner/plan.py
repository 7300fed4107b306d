"""Plan of a model on a target: memory on each chip, and the fastest possible steps."""

import dataclasses
import math
import time
from bisect import bisect_left
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve import weights
from jaxserve.config import EngineConfig
from jaxserve.engine.checkpoint import resolve_quantization
from jaxserve.engine.memory import (
    accelerator_pool_bytes,
    choose_page_size,
    cpu_pool_bytes,
    machine_bytes,
    page_bytes,
    pool_dtype,
    select_backend,
    state_bytes,
    tree_bytes,
)
from jaxserve.engine.parameters import compute_dtype, matrix_dtype, not_packed
from jaxserve.errors import ConfigError
from jaxserve.execution.state import abstract_state
from jaxserve.metrics import PeakRates
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params
from jaxserve.models.weight_reads import WeightReads
from jaxserve.planner.models import read_model
from jaxserve.planner.program import Collective, StepCompiler, StepProgram, abstract_params
from jaxserve.planner.speed import Roofline
from jaxserve.planner.targets import DataSheet, Target
from jaxserve.quant import weight_format
from jaxserve.schedule_config import ScheduleConfig, resolve_schedule

_ROWS = (1, 8, 32, 64, 128, 256)  # batch sizes of the predicted decode steps, as far as they fit
_COMPILED_PAGES = 1024  # most pages of a device in compiled steps, whose figures do not depend on their number
_TOKENS = 1024  # default length of predicted prompts and contexts, at most max_model_len


@dataclass(frozen=True)
class Memory:
    """Memory in bytes of one chip, or of one jax device if a chip has several.

    Attributes:
        limit: memory that XLA may allocate; on a CPU, the machine's memory.
        weights: all weights.
        slots: state of all decode slots, with snapshots of states.
        temp: temporaries of the step that needs most; 0 if nothing was compiled.
        pool_limit: largest pool that the engine would allocate; negative if the weights and the reserve for temporaries
            do not fit.
        page: one page of the pool.
        request: whole pages of one request of max_model_len tokens.
    """

    limit: int
    weights: int
    slots: int
    temp: int
    pool_limit: int
    page: int
    request: int

    @property
    def num_pages(self) -> int:
        """Number of pages in the pool that the engine would allocate."""
        return max(0, self.pool_limit // self.page)

    @property
    def missing(self) -> int:
        """Bytes missing to serve one request of max_model_len tokens; 0 if it fits."""
        return max(0, self.missing_in_pool, self._missing_in_all)

    @property
    def missing_in_pool(self) -> int:
        """Bytes missing if the pool's limit, not the total memory, is the tighter bound; else 0."""
        lacking = self.request - self.pool_limit
        return max(0, lacking) if lacking > self._missing_in_all else 0

    @property
    def num_fitting_pages(self) -> int:
        """Number of pages that the pool can have next to everything else; 0 if nothing is left."""
        return max(0, min(self.pool_limit, self.limit - self.weights - self.slots - self.temp)) // self.page

    @property
    def _missing_in_all(self) -> int:
        pool = max(self.request, self.num_pages * self.page)
        return self.weights + self.slots + self.temp + pool - self.limit

    def times(self, count: int) -> "Memory":
        """Return the sizes multiplied by `count`, the number of devices per chip."""
        return Memory(**{name: count * size for name, size in dataclasses.asdict(self).items()})


@dataclass(frozen=True)
class Speed:
    """Speed that the data sheet allows; predicted, not measured.

    Attributes:
        context_tokens: context length of every row in decode.
        step_ms: time of a decode step, by its number of rows.
        tokens_per_s: decode throughput of all rows together, by their number.
        prompt_tokens: prompt length of a request that runs alone.
        ttft_ms: time to first token of that request.
    """

    context_tokens: int
    step_ms: dict[int, float]
    tokens_per_s: dict[int, float]
    prompt_tokens: int
    ttft_ms: float


@dataclass(frozen=True)
class Plan:
    """Predicted memory and speed of a model on a target.

    Attributes:
        model: name that the user gave.
        target: the chips.
        num_layers: number of layers of the model.
        dtype: dtype of weights and activations.
        quantization: quantisation of the weights, on load or as the checkpoint has them.
        kv_dtype: dtype of the KV pool.
        backend: attention backend.
        schedule: sizes of steps and pool; if the model does not fit, the pool holds one request of max_model_len.
        memory: memory of one chip.
        largest: step with the most tokens, on one device; None if nothing is compiled: on a CPU, for chips on which the
            weights and one request do not fit, and where the caller wants no compilation.
        decode: step with max_num_seqs rows in decode; None if nothing is compiled.
        compile_s: seconds to trace and compile both steps on this machine.
        program_s: seconds to trace and compile each of the engine's programs on this machine, by name; None if not
            requested, or nothing is compiled.
        speed: predicted speed; None on a CPU, and if the model does not fit.
        num_expert_shards: number of shares of whole experts that devices have; 1 if they have a part of each.
        fitting_len: if the model does not fit, the largest max_model_len with which it does; 0 if there is none, None
            if the model fits.
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
        """Return how many requests of `num_tokens` tokens fit in the pool, or those of all shards, at the same time."""
        num_pages = self.schedule.kv_groups.num_pages(num_tokens)
        return self.schedule.num_data_shards * (self.memory.num_pages // num_pages)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model on a target, as the engine would choose them.

    Attributes:
        name: name of the model.
        target: the chips.
        arch: sizes of the whole model.
        local: sizes of one device's part.
        dtype: dtype of weights and activations.
        kv_dtype: dtype of the KV pool.
        quantization: format in which matrices are quantised while they are loaded; None to take them as they are.
        backend: attention backend.
        params: shapes of the weights of a device.
        schedule: sizes of steps and pool; if the model does not fit, the pool holds one request of max_model_len.
        memory: memory of one device, without temporaries.
    """

    name: str
    target: Target
    arch: ArchConfig
    local: ArchConfig
    dtype: jnp.dtype
    kv_dtype: jnp.dtype
    quantization: str | None
    backend: str
    params: Params
    schedule: ScheduleConfig
    memory: Memory

    @classmethod
    def of(cls, config: EngineConfig, target: Target) -> "Sizes":
        """Resolve the sizes; see `make_plan`."""
        name, arch = read_model(config.model)
        config = resolve_quantization(config, arch)
        arch = arch.within(config.max_model_len or arch.max_position)
        arch = arch.divided(target.num_devices, config.expert_parallel_size, config.num_data_shards)
        sheet, local = target.sheet, arch.local(target.num_devices)
        dtype = compute_dtype(config, arch, on_cpu=sheet is None)
        kv_dtype = pool_dtype(config, dtype)
        backend = _backend(config, sheet, local, kv_dtype)
        schedule = resolve_schedule(
            config,
            max_position=arch.max_position,
            platform=target.platform,
            page_size=choose_page_size(config, local, kv_dtype, backend),
            num_pages=1,
            windows=arch.kv_windows,
            has_states=arch.state is not None,
        )
        matrices = matrix_dtype(config, arch, on_cpu=sheet is None)
        form = weight_format(config.quantization, arch.schemes)
        try:
            params = abstract_params(
                *(arch, dtype, config.quantization, target.num_devices),
                matrix_dtype=matrices,
                native=sheet is None and not_packed(config, form, matrices, "cpu") is None,
            )
        except weights.CheckpointError as error:  # so many devices cannot share a matrix of the checkpoint
            raise ConfigError(str(error), about=("tensor_parallel_size",)) from error
        memory = _memory(config, sheet, local, tree_bytes(params), schedule, kv_dtype=kv_dtype, backend=backend)
        num_pages = memory.num_pages or schedule.kv_groups.num_pages(schedule.max_model_len)
        schedule = dataclasses.replace(schedule, num_pages=num_pages * schedule.num_data_shards)
        return cls(
            *(name, target, arch, local, dtype, kv_dtype, config.quantization, backend, params, schedule, memory)
        )

    def roofline(self, collectives: tuple[Collective, ...] = (), collective_tokens: int = 1) -> Roofline:
        """Return the roofline of steps on chips with a data sheet; the arguments are those of `Roofline`."""
        target, sheet, local, pool = self.target, self.target.sheet, self.local, self.schedule
        assert sheet is not None, "this machine has no data sheet"
        share = 1 / target.devices_per_chip
        return Roofline(
            arch=local,
            schedule=pool,
            peak_rates=PeakRates(share * sheet.flops_per_s[self.dtype.name], share * sheet.bytes_per_s),
            link_bytes_per_s=target.num_links * sheet.link_bytes_per_s,
            num_chips=target.num_chips,
            weight_reads=WeightReads.of(self.params, registry.param_specs(local), tree_bytes),
            kv_token_bytes=int(self.memory.page * local.num_layers_read // (pool.page_size * local.kv_group_layers)),
            state_bytes=state_bytes(local),
            collectives=collectives,
            collective_tokens=collective_tokens,
        )


def make_plan(
    config: EngineConfig,
    target: Target,
    *,
    prompt_tokens: int | None = None,
    context_tokens: int | None = None,
    batch: int | None = None,
    compiles: bool = True,
    all_programs: bool = False,
) -> Plan:
    """Size everything as the engine would on the target, and compile its steps for the target.

    Args:
        config: engine options; `model` may be anything that `read_model` takes, and sizes that are None are resolved as
            the engine would on the target.
        target: chips, over all of which the model is split.
        prompt_tokens: length of the prompt whose TTFT is predicted.
        context_tokens: context length of the rows whose decode steps are predicted.
        batch: rows of a decode step that is predicted besides the usual ones.
        compiles: False to compile nothing: temporaries of steps, and exchanges between chips, are then not counted.
        all_programs: True to compile all of the engine's programs and time each.

    Raises:
        ConfigError: the engine does not support the model or a size on this target, or the steps cannot be compiled.
    """
    sizes = Sizes.of(config, target)
    arch, sheet, schedule, memory = sizes.arch, target.sheet, sizes.schedule, sizes.memory
    prompt_tokens = _predicted("prompt_len", prompt_tokens, "max_model_len", schedule.max_model_len)
    context_tokens = _predicted("context_len", context_tokens, "max_model_len", schedule.max_model_len)
    batch = _predicted("batch", batch, "max_num_seqs", schedule.max_num_seqs)
    stored = sizes.quantization or (None if arch.schemes is None else arch.schemes.method)
    dtypes = sizes.dtype.name, stored, sizes.kv_dtype.name
    names = (sizes.name, target, arch.num_layers, *dtypes, sizes.backend, schedule)
    if sheet is None or memory.missing:
        return Plan(
            *names,
            memory.times(target.devices_per_chip),
            num_expert_shards=config.expert_parallel_size,
            fitting_len=_fitting_len(config, target, memory, schedule),
        )
    lengths = prompt_tokens, context_tokens, batch
    if not compiles:
        return Plan(
            *names,
            memory.times(target.devices_per_chip),
            speed=_speed(sizes.roofline(), memory.num_pages, *lengths),
            num_expert_shards=config.expert_parallel_size,
        )
    # With a pool that fills the memory, XLA assumes that the program does not fit and spends long on rematerialisation.
    num_pages = schedule.num_data_shards * min(_COMPILED_PAGES, schedule.kv_groups.num_pages(schedule.max_model_len))
    small = dataclasses.replace(schedule, num_pages=num_pages)
    started = time.perf_counter()
    kinds = sizes.dtype, sizes.kv_dtype, sizes.backend, sizes.quantization, config.linear_backend
    compiler = StepCompiler(target, small, *kinds)
    buckets = (schedule.max_num_batched_tokens, decode_bucket(schedule))
    compiled = {program.num_tokens: program for program in compiler.step_programs(arch, list(dict.fromkeys(buckets)))}
    largest, decode = (compiled[bucket] for bucket in buckets)
    compile_s = time.perf_counter() - started
    program_s = compiler.compile_times(arch, config.max_steps) if all_programs else None
    memory = dataclasses.replace(memory, temp=max(largest.temp_bytes, decode.temp_bytes))
    speed = None
    if not memory.missing:
        roofline = sizes.roofline(largest.collectives, largest.num_tokens)
        speed = _speed(roofline, memory.num_pages, *lengths)
    compiled_facts = (largest, decode, compile_s, program_s, speed)
    fitting_len = _fitting_len(config, target, memory, schedule)
    chip_memory = memory.times(target.devices_per_chip)
    return Plan(*names, chip_memory, *compiled_facts, config.expert_parallel_size, fitting_len)


def _fitting_len(config: EngineConfig, target: Target, memory: Memory, schedule: ScheduleConfig) -> int | None:
    """Return the largest max_model_len that fits, given the memory of a device; None if all fits, 0 if nothing does."""
    # Slots grow with max_model_len: by those of the longest requests a length is sure to fit, by those of a shorter
    # length no longer request does.
    if not memory.missing:
        return None

    def sized(length: int) -> Memory:
        sizes = Sizes.of(dataclasses.replace(config, max_model_len=length), target)
        return dataclasses.replace(sizes.memory, temp=memory.temp)

    def bound(memory: Memory) -> int:
        tokens = schedule.kv_groups.most_tokens(memory.num_fitting_pages)
        return schedule.max_model_len - 1 if tokens is None else min(tokens, schedule.max_model_len - 1)

    if (least := bound(memory)) <= 0:
        return 0
    lengths = range(least + 1, bound(sized(least)) + 1)
    return least + bisect_left(lengths, True, key=lambda length: sized(length).missing > 0)


def decode_bucket(schedule: ScheduleConfig) -> int:
    """Return the bucket of a step with max_num_seqs rows in decode."""
    return min(size for size in schedule.buckets() if size >= schedule.max_num_seqs)


def _backend(config: EngineConfig, sheet: DataSheet | None, local: ArchConfig, kv_dtype: jnp.dtype) -> str:
    if sheet is None:
        return select_backend(config, local, kv_dtype, platform="cpu")
    with jax.sharding.use_abstract_mesh(sheet.chip.mesh()):
        return select_backend(config, local, kv_dtype)


def _predicted(name: str, given: int | None, limit_name: str, limit: int) -> int:
    if given is None:
        return min(_TOKENS, limit)
    if not 0 < given <= limit:
        raise ConfigError(f"{name} must be in [1, {limit_name}], got {given} and {limit}")
    return given


def _memory(
    config: EngineConfig,
    sheet: DataSheet | None,
    local: ArchConfig,
    weight_bytes: int,
    schedule: ScheduleConfig,
    *,
    kv_dtype: jnp.dtype,
    backend: str,
) -> Memory:
    """Return the memory of one device without the temporaries, which are known only once steps are compiled."""
    page = page_bytes(local, schedule.page_size, kv_dtype, backend)
    state = abstract_state(local, schedule, kv_dtype=kv_dtype, backend=backend)
    if sheet is None:
        limit, pool_limit = machine_bytes(), cpu_pool_bytes(config, local, schedule.page_size, page)
    else:
        limit = sheet.limit_bytes(config.gpu_memory_utilization)
        sizes = {"total_bytes": sheet.device_bytes, "limit_bytes": limit, "used_bytes": weight_bytes}
        pool_limit = accelerator_pool_bytes(config, local, **sizes)
    return Memory(
        limit=limit,
        weights=weight_bytes,
        slots=tree_bytes((state.slots, state.states)),
        temp=0,
        pool_limit=math.floor(pool_limit),
        page=page,
        request=schedule.kv_groups.num_pages(schedule.max_model_len) * page,
    )


def _speed(roofline: Roofline, num_pages: int, prompt_tokens: int, context_tokens: int, batch: int) -> Speed:
    schedule = roofline.schedule
    most = schedule.num_data_shards * (num_pages // schedule.kv_groups.num_pages(context_tokens))
    most = min(schedule.max_num_seqs, most)
    rows = sorted({count for count in (*_ROWS, batch, most) if count <= most})
    step_ms = {count: roofline.decode_ms(count, context_tokens) for count in rows}
    return Speed(
        context_tokens=context_tokens,
        step_ms=step_ms,
        tokens_per_s={count: count / ms * 1e3 for count, ms in step_ms.items()},
        prompt_tokens=prompt_tokens,
        ttft_ms=roofline.ttft_ms(prompt_tokens),
    )
