"""Builds the runners of all replicas from an EngineConfig."""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import cycle

import jax
from jax.sharding import Mesh

from jaxserve.api.config import EngineConfig
from jaxserve.api.sparsity_config import COMPACTING
from jaxserve.assembly.draft import Draft
from jaxserve.assembly.memory import (
    build_schedule,
    choose_page_size,
    free_memory,
    page_bytes,
    pool_dtype,
    require_memory,
    select_backend,
    state_bytes,
)
from jaxserve.assembly.parameters import adapter_layout, build_meshes, build_stages, compute_dtype, copies
from jaxserve.distributed.peers import Follower, Leader
from jaxserve.errors import ConfigError
from jaxserve.execution.lowering import Lowering
from jaxserve.execution.pipeline import Pipeline
from jaxserve.execution.programs import Programs
from jaxserve.execution.runner import Runner, array_shapes
from jaxserve.execution.xla_cache import cache_scope, programs_dir
from jaxserve.models.arch import ArchConfig
from jaxserve.models.stages import divide
from jaxserve.pallas_kernels import native
from jaxserve.scheduling.executor_protocol import Executor
from jaxserve.scheduling.schedule_config import resolve_schedule

logger = logging.getLogger(__name__)


def check_sizes(config: EngineConfig, arch: ArchConfig) -> None:
    """Raise ConfigError if the options do not suit the model `arch` or the devices' memory, before loading weights."""
    resolve_schedule(
        config,
        max_position=arch.max_position,
        platform=jax.default_backend(),
        page_size=config.page_size or 1,
        num_pages=config.num_pages or 1,
        pools=arch.pooler is not None,
    )
    if arch.state is not None and config.speculation is not None:
        raise ConfigError(
            f"speculative_config needs a model with attention in all layers, as a recurrent state cannot "
            f"undo rejected drafts, got {arch.architecture}; drop it"
        )
    if config.eviction is not None and (arch.pooler is not None or None not in arch.kv_layout.windows):
        raise ConfigError(
            f"kv_eviction needs a model that generates, with full attention in some layers, got {arch.architecture}; "
            "drop it"
        )
    if config.eviction is not None and config.eviction.method in COMPACTING and not arch.has_alike_heads:
        raise ConfigError(
            f"kv_eviction with the method {config.eviction.method!r} needs a model with full attention and the same KV "
            f"heads in all layers, got {arch.architecture}; take 'streaming_llm'"
        )
    if config.eviction is not None and arch.token_choice is not None:
        raise ConfigError(
            f"kv_eviction must be None for {arch.architecture}, whose indexer chooses among all tokens, got "
            f"{config.eviction.method!r}; drop it"
        )
    if config.page_budget is not None and arch.pooler is not None:
        raise ConfigError(f"sparse_attention needs a model that generates, got {arch.architecture}; drop it")
    if config.count_expert_tokens and arch.experts is None:
        raise ConfigError(
            f"count_expert_tokens must be False, as {arch.architecture} has no experts, got True; drop it"
        )
    meshes, stages = build_meshes(config), divide(arch, config.pipeline_parallel_size)
    local_arch = arch.local(config.tensor_parallel_size)
    kv_dtype = pool_dtype(config, compute_dtype(config, arch))
    backend = select_backend(config, local_arch, kv_dtype)
    page_size = choose_page_size(config, local_arch, kv_dtype, backend)
    for index, stage in enumerate(stages):
        local, devices = stage.local(config.tensor_parallel_size), _devices(meshes[index :: len(stages)])
        require_memory(config, local, page_bytes(local, page_size, kv_dtype, backend), devices)


@contextlib.contextmanager
def naming_exhaustion(config: EngineConfig) -> Iterator[None]:
    """Raise a one-line ConfigError, with advice, for an out-of-memory error of jax within this context."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        known = [f"{int(free):,}" for free in map(free_memory, _devices(build_meshes(config))) if free < math.inf]
        raise ConfigError(
            f"a device has run out of memory while the engine started, with {' and '.join(known) or 'few'} bytes free: "
            f"{str(error).splitlines()[0]}; lower num_pages, max_num_seqs, max_num_batched_tokens or max_model_len, or "
            "take another quantization or kv_cache_dtype"
        ) from error


def build_executors(
    config: EngineConfig, arch: ArchConfig, peers: Leader | Follower | None = None
) -> Sequence[Executor]:
    """Build an executor per replica: a runner, or a pipeline of several; see `build_runners`."""
    runners, size = build_runners(config, arch, peers), config.pipeline_parallel_size
    if size == 1:
        return runners
    return [Pipeline(runners[first : first + size]) for first in range(0, len(runners), size)]


def build_runners(config: EngineConfig, arch: ArchConfig, peers: Leader | Follower | None = None) -> list[Runner]:
    """Build a runner per replica and pipeline stage: load weights, size pools, allocate states and compile.

    Args:
        config: engine options.
        arch: sizes of the whole model.
        peers: other processes, which build the same.
    """
    warn_without_native_kernels()
    stages, meshes = divide(arch, config.pipeline_parallel_size), build_meshes(config)
    params = build_stages(config, arch, stages)
    draft = _load_draft(config, arch)
    by_stage = [copies(each, meshes[index :: len(stages)]) for index, each in enumerate(params)]
    replicas = [each for replica in zip(*by_stage, strict=True) for each in replica]
    draft_replicas = draft.replicas(meshes, stages)
    dtype, local_arch = compute_dtype(config, arch), arch.local(config.tensor_parallel_size)
    kv_dtype = pool_dtype(config, dtype)
    backend = select_backend(config, local_arch, kv_dtype)
    draft_page = partial(draft.page_bytes, kv_dtype)
    placed = [
        (stage.local(config.tensor_parallel_size), _devices(meshes[index :: len(stages)]))
        for index, stage in enumerate(stages)
    ]
    schedule = build_schedule(config, local_arch, kv_dtype, backend, placed, draft_page)
    if peers is not None:
        schedule = dataclasses.replace(schedule, num_pages=min(peers.exchange(schedule.num_pages)))
    is_split = peers is None and not schedule.pools and len(stages) == 1 and may_constrain(config)
    schedule = dataclasses.replace(schedule, has_split_steps=is_split)
    logger.info("KV pool: %d pages of %d tokens", schedule.num_pages, schedule.page_size)
    if schedule.num_snapshots is not None:
        sizes = (schedule.max_num_seqs, schedule.num_snapshots, state_bytes(local_arch) / 1e6)
        logger.info("states: %d of sequences and %d snapshots, %.1f MB each", *sizes)
    directory = programs_dir(config)
    scope = cache_scope(config) if directory is None else contextlib.nullcontext
    programs = [
        Programs(
            Lowering(
                stage,
                array_shapes(params),
                schedule,
                kv_dtype,
                backend,
                config.linear_backend,
                max_steps=1 if schedule.pools else config.max_steps,
                mesh=mesh,
                proposer=draft.proposer(config, arch, schedule, kv_dtype, stage.stage),
                draft_shapes=array_shapes(draft_params),
                adapters=adapter_layout(config, stage),
                encoder_dtype=dtype,
            ),
            directory=directory,
            cache_scope=scope,
        )
        for stage, params, draft_params, mesh in zip(cycle(stages), replicas, draft_replicas, meshes, strict=False)
    ]
    parts = zip(programs, replicas, draft_replicas, strict=True)
    runners = [Runner(*each, seed=config.seed) for each in parts]
    for own, before in zip(programs, [None, *programs], strict=False):
        own.warm_up(config.compile_ahead, before)
    return runners


def _load_draft(config: EngineConfig, arch: ArchConfig) -> Draft:
    """Return the draft that `speculative_config` requests for the model `arch`."""
    if config.speculation is None:
        return Draft()
    from jaxserve.assembly.load_proposer import load_draft  # noqa: PLC0415 - proposers' modules, for few engines

    return load_draft(config, arch)


def may_constrain(config: EngineConfig) -> bool:
    """Return whether requests may have structured outputs while steps overlap, so that split plans are worthwhile."""
    return config.step_ahead and not config.skip_tokenizer_init and find_spec("llguidance") is not None


def _devices(meshes: Sequence[Mesh | None]) -> list[jax.Device]:
    """Return this process's devices in the replicas' `meshes`; None is a replica on the first device."""
    devices = [device for mesh in meshes for device in ([jax.devices()[0]] if mesh is None else mesh.devices.flat)]
    return [device for device in devices if device.process_index == jax.process_index()]


def warn_without_native_kernels() -> None:
    """Warn if this process runs on a CPU and lacks the native kernels; the warning has the reason and the remedy."""
    if jax.default_backend() == "cpu" and (reason := native.unavailable()) is not None:
        logger.warning(
            "steps take about three times as long as they could on this CPU: %s; "
            "with a C++ compiler (g++ or clang++) on the PATH, install jaxserve again",
            reason,
        )
