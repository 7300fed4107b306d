"""From a configuration and a target to what would lie on each chip, and how fast a step could be."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import weights
from jaxserve.config import EngineConfig, ScheduleConfig, gpu_memory_fraction, resolve_schedule
from jaxserve.engine.build import (
    accelerator_pool_bytes,
    compute_dtype,
    cpu_pool_bytes,
    page_bytes,
    pool_dtype,
    select_backend,
)
from jaxserve.engine.step import abstract_state
from jaxserve.errors import ConfigError
from jaxserve.metrics import Ceilings
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.planner.program import StepCompiler, StepProgram
from jaxserve.planner.speed import Roofline
from jaxserve.planner.targets import DataSheet, Target

_CONFIGS = Path(__file__).parent / "configs"
_ROWS = (1, 8, 32, 64, 128, 256)  # of decode steps that are predicted, as far as they fit
_TOKENS = 1024  # of prompts and contexts that are predicted, where the model serves as many


@dataclass(frozen=True)
class Memory:
    """What lies on one chip, in bytes.

    Attributes:
        limit: that XLA takes; None on a CPU, where only the pool is bounded.
        weights: all of them.
        slots: what the device remembers of each row of a step.
        temp: temporaries of the largest step; 0 where nothing was compiled.
        pool_limit: that the engine gives to the pool at most; negative where not even the weights and what it keeps
            free for temporaries fit.
        page: one page of the pool.
        request: one of max_model_len in the pool: whole pages.
    """

    limit: int | None
    weights: int
    slots: int
    temp: int
    pool_limit: int
    page: int
    request: int

    @property
    def num_pages(self) -> int:
        """Of the pool that the engine makes."""
        return max(0, self.pool_limit // self.page)

    @property
    def missing(self) -> int:
        """What one request of max_model_len lacks; 0 where it fits."""
        lacking = self.request - self.pool_limit
        if self.limit is not None:
            pool = max(self.request, self.num_pages * self.page)
            lacking = max(lacking, self.weights + self.slots + self.temp + pool - self.limit)
        return max(0, lacking)


@dataclass(frozen=True)
class Speed:
    """What a data sheet allows, not measured.

    Attributes:
        context_tokens: of every row in decode.
        step_ms: of a decode step, by its rows.
        tokens_per_s: of all rows together, by their number.
        prompt_tokens: of a request that is alone.
        ttft_ms: of that request.
    """

    context_tokens: int
    step_ms: dict[int, float]
    tokens_per_s: dict[int, float]
    prompt_tokens: int
    ttft_ms: float


@dataclass(frozen=True)
class Plan:
    """What a model would be on a target.

    Attributes:
        model: as it was named.
        target: the chips.
        num_layers: of the model.
        dtype: of weights and activations.
        kv_dtype: of the pool.
        backend: of attention.
        schedule: sizes of steps and pool; of a model that does not fit, the pool has one request of max_model_len.
        memory: of one chip.
        largest: the step of most tokens; None on a CPU, for which nothing is compiled.
        decode: the step of max_num_seqs rows in decode; None on a CPU.
        speed: None on a CPU, and of what does not fit.
    """

    model: str
    target: Target
    num_layers: int
    dtype: str
    kv_dtype: str
    backend: str
    schedule: ScheduleConfig
    memory: Memory
    largest: StepProgram | None
    decode: StepProgram | None
    speed: Speed | None

    @property
    def fits(self) -> bool:
        """Whether a request of max_model_len can be served."""
        return not self.memory.missing

    @property
    def kv_tokens(self) -> int:
        """In the pool of all chips together."""
        return self.memory.num_pages * self.schedule.page_size

    @property
    def num_requests(self) -> int:
        """Of max_model_len that fit in the pool at the same time."""
        return self.memory.num_pages // self.schedule.max_pages_per_row


def read_model(name: str | None) -> tuple[str, ArchConfig]:
    """A checkpoint directory, a config.json, or shapes that come with the planner, by name; with what it is called.

    Raises:
        ConfigError: it is none of these, or not supported.
    """
    path = EngineConfig(model=name).model_path
    known = sorted(file.stem for file in _CONFIGS.glob("*.json"))
    if name is not None and not path.exists() and name in known:
        path = _CONFIGS / f"{name}.json"
    if not path.exists():
        raise ConfigError(f"model must be a checkpoint directory, a config.json or one of {known}, got {name!r}")
    return name or path.name, registry.from_hf_config(_read_config(path))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else weights.read_config(path)
    except weights.CheckpointError as error:
        raise ConfigError(str(error)) from error
    except ValueError as error:
        raise ConfigError(f"{path} must be JSON, but: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def make_plan(
    config: EngineConfig, target: Target, *, prompt_tokens: int | None = None, context_tokens: int | None = None
) -> Plan:
    """Sizes everything as the engine does on the target, and compiles its steps for that.

    Args:
        config: `model` may also be what `read_model` takes; of the sizes, None is as the engine resolves it there.
        target: the chips, over all of which the model is split.
        prompt_tokens: of the prompt whose TTFT is predicted.
        context_tokens: of the rows whose decode steps are predicted.

    Raises:
        ConfigError: the model, or a size, is not one that the engine takes on this target.
    """
    name, arch = read_model(config.model)
    sheet, local = target.sheet, arch.local(target.num_chips)
    dtype = compute_dtype(config, arch, on_cpu=sheet is None)
    kv_dtype = pool_dtype(config, dtype)
    backend = _backend(config, sheet, local, kv_dtype)
    schedule = resolve_schedule(config, max_position=arch.max_position, on_cpu=sheet is None, num_pages=1)
    prompt_tokens = _predicted_tokens("prompt_len", prompt_tokens, schedule)
    context_tokens = _predicted_tokens("context_len", context_tokens, schedule)
    memory = _memory(config, sheet, local, dtype, schedule, kv_dtype=kv_dtype, backend=backend)
    schedule = dataclasses.replace(schedule, num_pages=memory.num_pages or schedule.max_pages_per_row)
    largest = decode = speed = None
    if sheet is not None:
        # Of a pool as large as the memory XLA thinks that it does not fit, and looks long for what to compute again.
        small = dataclasses.replace(schedule, num_pages=schedule.max_pages_per_row)
        compiler = StepCompiler(sheet.chip, target.num_chips, small, dtype, kv_dtype, backend)
        largest = compiler.step_program(arch, schedule.max_num_batched_tokens)
        decode = compiler.step_program(arch, decode_bucket(schedule))
        memory = dataclasses.replace(memory, temp=max(largest.temp_bytes, decode.temp_bytes))
        if not memory.missing:
            roofline = _roofline(target.num_chips, sheet, local, dtype, memory, schedule, largest)
            speed = _speed(roofline, memory.num_pages, prompt_tokens, context_tokens)
    names = (name, target, arch.num_layers, dtype.name, kv_dtype.name, backend)
    return Plan(*names, schedule, memory, largest, decode, speed)


def decode_bucket(schedule: ScheduleConfig) -> int:
    """Of a step in which as many rows as possible are in decode."""
    return min(size for size in schedule.buckets() if size >= schedule.max_num_seqs)


def _backend(config: EngineConfig, sheet: DataSheet | None, local: ArchConfig, kv_dtype: jnp.dtype) -> str:
    if sheet is None:
        return select_backend(config, local, kv_dtype, platform="cpu")
    with jax.sharding.use_abstract_mesh(sheet.chip.mesh()):
        return select_backend(config, local, kv_dtype)


def _predicted_tokens(name: str, given: int | None, schedule: ScheduleConfig) -> int:
    if given is None:
        return min(_TOKENS, schedule.max_model_len)
    if not 0 < given <= schedule.max_model_len:
        raise ConfigError(f"{name} must be in [1, max_model_len], got {given} and {schedule.max_model_len}")
    return given


def _memory(
    config: EngineConfig,
    sheet: DataSheet | None,
    local: ArchConfig,
    dtype: jnp.dtype,
    schedule: ScheduleConfig,
    *,
    kv_dtype: jnp.dtype,
    backend: str,
) -> Memory:
    """All but the temporaries, for which steps must be compiled."""
    page = page_bytes(config, local, kv_dtype, backend)
    state = abstract_state(local, schedule, kv_dtype=kv_dtype, backend=backend)
    weight_bytes = sum(math.prod(spec.shape) for spec in registry.param_specs(local)) * dtype.itemsize
    if sheet is None:
        limit, pool_limit = None, cpu_pool_bytes(config, local, page)
    else:
        limit = int(sheet.memory_bytes * gpu_memory_fraction())
        pool_limit = accelerator_pool_bytes(config, local, limit_bytes=limit, used_bytes=weight_bytes)
    return Memory(
        limit=limit,
        weights=weight_bytes,
        slots=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.slots)),
        temp=0,
        pool_limit=math.floor(pool_limit),
        page=page,
        request=schedule.max_pages_per_row * page,
    )


def _roofline(
    num_chips: int,
    sheet: DataSheet,
    local: ArchConfig,
    dtype: jnp.dtype,
    memory: Memory,
    schedule: ScheduleConfig,
    program: StepProgram,
) -> Roofline:
    embedding_row_bytes = local.hidden_size * dtype.itemsize
    unread = 0 if local.tied_embeddings else local.vocab_size * embedding_row_bytes
    return Roofline(
        arch=local,
        schedule=schedule,
        ceilings=Ceilings(sheet.flops_per_s[dtype.name], sheet.bytes_per_s),
        link_bytes_per_s=sheet.link_bytes_per_s,
        num_chips=num_chips,
        matrix_bytes=memory.weights - unread,
        embedding_row_bytes=embedding_row_bytes,
        kv_token_bytes=memory.page // schedule.page_size,
        collectives=program.collectives,
        collective_tokens=program.num_tokens,
    )


def _speed(roofline: Roofline, num_pages: int, prompt_tokens: int, context_tokens: int) -> Speed:
    schedule = roofline.schedule
    most = min(schedule.max_num_seqs, num_pages // -(-context_tokens // schedule.page_size))
    rows = sorted({count for count in (*_ROWS, most) if count <= most})
    step_ms = {count: roofline.decode_ms(count, context_tokens) for count in rows}
    return Speed(
        context_tokens=context_tokens,
        step_ms=step_ms,
        tokens_per_s={count: count / ms * 1e3 for count, ms in step_ms.items()},
        prompt_tokens=prompt_tokens,
        ttft_ms=roofline.ttft_ms(prompt_tokens),
    )
