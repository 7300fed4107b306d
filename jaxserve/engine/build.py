"""From an EngineConfig to what the engine runs: checkpoint, tokenizer, sizes, runner."""

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import psutil
from jax._src import xla_bridge  # jax does not say elsewhere whether its backend runs
from jax.sharding import Mesh, NamedSharding

from jaxserve import weights
from jaxserve.config import (
    DEFAULT_DRAFTS,
    DEFAULT_GPU_MEMORY_FRACTION,
    FREE_TOKENS,
    MAX_STEP_TOKENS,
    MULTI_STEP_ROWS,
    SPECULATIVE_ROWS,
    EngineConfig,
    ScheduleConfig,
    claiming_gpu_memory,
    default_batch,
    embedded_model,
    gpu_memory_fraction,
    resolve_schedule,
)
from jaxserve.distributed.peers import Follower, Leader
from jaxserve.errors import ConfigError, RequestError
from jaxserve.execution.runner import Runner
from jaxserve.execution.state import new_pool, new_slots
from jaxserve.execution.verification import Proposer
from jaxserve.execution.xla_cache import programs_dir, scope_of
from jaxserve.kv_cache.groups import KVGroups
from jaxserve.models import decoder, registry
from jaxserve.models.arch import ArchConfig, token_id_set
from jaxserve.models.family import widest_output
from jaxserve.models.params import Params, ParamSpec, matrix_transform, stack_layers
from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels import ragged_paged_attention as attention
from jaxserve.pallas_kernels.dispatch import UnsupportedBackendError
from jaxserve.quant import packed, weight_format
from jaxserve.request import SamplingParams
from jaxserve.sampling import LogprobLayout
from jaxserve.sharding import named_sharding, replica_meshes, replicated
from jaxserve.spec_decode.draft_layer import DraftLayer, LayerHead
from jaxserve.spec_decode.draft_model import DraftModel
from jaxserve.spec_decode.head_files import load_draft_layer, load_medusa
from jaxserve.spec_decode.medusa import Medusa
from jaxserve.spec_decode.ngram import NGram
from jaxserve.speculation_config import SpeculationConfig
from jaxserve.text.common_tokens import NONE, common_tokens
from jaxserve.text.tokenizer import load_tokenizer
from jaxserve.weights.rows import Shardings

logger = logging.getLogger(__name__)

_GENERATION_CONFIG = {  # Hugging Face's name -> ours, as vLLM reads them
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}

Weights = Mapping[str, Any] | str | os.PathLike[str]  # that a running engine takes

SCRATCH_BYTES = (
    64_000_000  # temporaries of a step that do not grow with the model: partial results of attention above all
)
_claimed: dict[str, float] = {}  # share of each device's memory that XLA took when an engine started jax, by platform
MIN_COMMON_SHARE = 0.01  # share of a draft model's tokens that the model must have too
CPU_POOL_SHARE = 1 / 16  # of the machine's memory; never more than max_num_seqs requests of full length need


@runtime_checkable
class Memory(Protocol):
    """A device, as far as it tells of its memory."""

    def memory_stats(self) -> Mapping[str, int] | None:
        """Bytes in use and their limit, among others; None where it does not tell."""


def build_arch(config: EngineConfig) -> ArchConfig:
    """Read config.json and generation_config.json."""
    try:
        raw = weights.read_config(config.model_path)
        generation = weights.read_generation_config(config.model_path)
    except weights.CheckpointError as error:
        raise ConfigError(str(error)) from error
    arch = registry.from_hf_config(raw)
    # generation_config.json adds the ids that end a chat turn.
    return dataclasses.replace(arch, eos_ids=arch.eos_ids | token_id_set(generation.get("eos_token_id")))


def build_sampling_params(config: EngineConfig) -> SamplingParams:
    """The checkpoint's recommendation; where it has none, SamplingParams' own defaults."""
    generation = weights.read_generation_config(config.model_path)
    wanted = {ours: generation.get(theirs) for theirs, ours in _GENERATION_CONFIG.items()}
    try:
        return SamplingParams(**{name: value for name, value in wanted.items() if value is not None})
    except RequestError as error:
        raise ConfigError(f"generation_config.json in {config.model_path}: {error}") from error


def claim_memory(config: EngineConfig) -> None:
    """Start jax's backend, if it does not run yet, and have XLA take `gpu_memory_utilization` of each GPU."""
    if not xla_bridge.backends_are_initialized():
        with claiming_gpu_memory(config.gpu_memory_utilization) as fraction:
            jax.default_backend()
        _claimed["gpu"] = fraction


def check_sizes(config: EngineConfig, arch: ArchConfig) -> None:
    """ConfigError for sizes that cannot work, before anything large is loaded."""
    resolve_schedule(
        config,
        max_position=arch.max_position,
        platform=jax.default_backend(),
        page_size=config.page_size or 1,
        num_pages=config.num_pages or 1,
    )
    _meshes(config)
    arch.local(config.tensor_parallel_size)


def build_runners(config: EngineConfig, arch: ArchConfig, peers: Leader | Follower | None = None) -> list[Runner]:
    """Build a runner for each replica: load the weights, size the pools, allocate the states and compile.

    Args:
        config: options of the engine.
        arch: of the whole model.
        peers: the other processes, which build the same.
    """
    warn_without_native_kernels()
    params, meshes = build_params(config, arch), _meshes(config)
    draft = load_draft(config, arch)
    replicas = copies(params, meshes)
    dtype, local_arch = compute_dtype(config, arch), arch.local(config.tensor_parallel_size)
    kv_dtype = pool_dtype(config, dtype)
    backend = select_backend(config, local_arch, kv_dtype)
    draft_page = partial(draft.page_bytes, kv_dtype)
    schedule = build_schedule(config, local_arch, kv_dtype, backend, _devices(meshes), draft_page)
    if peers is not None:
        schedule = dataclasses.replace(schedule, num_pages=min(peers.exchange(schedule.num_pages)))
    logger.info("KV pool: %d pages of %d tokens", schedule.num_pages, schedule.page_size)
    directory = programs_dir(config)
    runners = [
        Runner(
            arch,
            replica,
            schedule,
            kv_dtype=kv_dtype,
            backend=backend,
            seed=config.seed,
            max_steps=config.max_steps,
            programs_dir=directory,
            cache_scope=scope_of(config) if directory is None else contextlib.nullcontext,
            mesh=mesh,
            proposer=build_proposer(config, arch, schedule, kv_dtype, draft),
            draft_params=on_every_device(draft.params, mesh),
        )
        for replica, mesh in zip(replicas, meshes, strict=True)
    ]
    programs = [runner.programs for runner in runners]
    for own, before in zip(programs, [None, *programs], strict=False):
        own.warm_up(config.compile_ahead, before)
    return runners


@dataclasses.dataclass(frozen=True)
class Draft:
    """Weights and sizes of a proposer.

    Attributes:
        params: its weights, on one device; empty for look-ups.
        arch: sizes of a draft model or layer; None for look-ups and Medusa heads.
        backend: backend of its attention.
        head: kind and sizes of a draft layer; None without one.
    """

    params: Params
    arch: ArchConfig | None = None
    backend: str = ""
    head: LayerHead | None = None

    def page_bytes(self, kv_dtype: jnp.dtype, page_size: int) -> int:
        """Return the bytes of one page of its pool."""
        return 0 if self.arch is None else page_bytes(self.arch, page_size, kv_dtype, self.backend)


def load_draft(config: EngineConfig, arch: ArchConfig) -> Draft:
    """Load the weights of the proposer for the model `arch`; ConfigError if they do not fit the model."""
    speculation = config.speculation
    if speculation is None or speculation.method == "ngram":
        return Draft({})
    directory = _draft_directory(config, speculation)
    if speculation.method != "draft_model":
        return _load_heads(config, speculation, arch, directory)
    own = dataclasses.replace(
        config,
        model=str(directory),
        quantization=speculation.quantization,
        tensor_parallel_size=1,
        data_parallel_size=1,
        attention_backend="auto",
        speculative_config=None,
    )
    draft_arch = build_arch(own)
    common = _common_tokens(config, own, arch.vocab_size)
    draft_arch = _within_pages(draft_arch, arch)
    backend = select_backend(own, draft_arch, pool_dtype(config, compute_dtype(config, arch)))
    return Draft(build_params(own, draft_arch) | common, draft_arch, backend)


def _draft_directory(config: EngineConfig, speculation: SpeculationConfig) -> Path:
    """Return the directory of what drafts; ConfigError if none is given and none is embedded."""
    if speculation.model is not None:
        return Path(speculation.model)
    if config.model is not None or speculation.method not in DEFAULT_DRAFTS:
        wanted = "draft model" if speculation.method == "draft_model" else f"{speculation.method} heads"
        raise ConfigError(
            f"the speculative_config of a model must name its {wanted}, got no model; set model in it to a directory"
        )
    return embedded_model(DEFAULT_DRAFTS[speculation.method])


def _within_pages(draft: ArchConfig, arch: ArchConfig) -> ArchConfig:
    """Return the sizes of a draft that sees no further back than the pages of the model's widest KV group go."""
    group = arch.kv_windows[_widest_group(arch)]
    windows = tuple(_narrower(window, group) for window in draft.windows)
    return dataclasses.replace(draft, windows=windows, one_kv_group=True)


def _load_heads(config: EngineConfig, speculation: SpeculationConfig, arch: ArchConfig, directory: Path) -> Draft:
    """Load heads; ConfigError if Medusa's are fewer than the tokens to draft."""
    dtype = compute_dtype(config, arch)
    if speculation.method != "medusa":
        method: Literal["eagle3", "mtp"] = "eagle3" if speculation.method == "eagle3" else "mtp"
        native = packed.unsupported(weight_format(None), dtype) is None
        params, head = load_draft_layer(directory, method, arch, dtype, partial(matrix_transform, native=native))
        head = dataclasses.replace(head, arch=_within_pages(head.arch, arch))
        plain = dataclasses.replace(config, attention_backend="auto")
        return Draft(params, head.arch, select_backend(plain, head.arch, pool_dtype(config, dtype)), head)
    params = load_medusa(directory, arch, dtype)
    num_heads = len(params["blocks"])
    if speculation.max_drafts > num_heads:
        raise ConfigError(
            f"num_speculative_tokens must be at most the number of heads in {directory}, got "
            f"{speculation.max_drafts} and {num_heads}"
        )
    return Draft(params)


def _narrower(window: int | None, other: int | None) -> int | None:
    return min((each for each in (window, other) if each is not None), default=None)


def _common_tokens(config: EngineConfig, draft: EngineConfig, vocab_size: int) -> Params:
    """Return the tokens of a draft model by those of the model, as arrays; nothing if both have the same tokenizer.

    Padding of the vocabulary does not count. ConfigError if too few tokens are the same.
    """
    if config.skip_tokenizer_init:
        return {}
    paths = config.tokenizer_path, draft.model_path
    model, other = map(load_tokenizer, paths)
    if model.vocabulary() == other.vocabulary():
        return {}
    found = common_tokens(model, other)
    logger.info(
        "the draft model has another tokenizer: %d tokens of %d are in both", found.num_common, model.vocab_size
    )
    if found.num_common < MIN_COMMON_SHARE * other.vocab_size:
        raise ConfigError(
            f"a draft model must have at least {MIN_COMMON_SHARE:.0%} of its tokens in common with the model, got "
            f"{found.num_common} of {other.vocab_size} in {draft.model_path}; take another draft model"
        )
    padding = max(vocab_size - model.vocab_size, 0)
    columns = {"inputs": found.inputs + [0] * padding, "outputs": found.outputs + [NONE] * padding}
    return {name: jnp.array(ids[:vocab_size], jnp.int32) for name, ids in columns.items()}


def _widest_group(arch: ArchConfig) -> int:
    """Return the KV group whose pages go back the furthest."""
    windows = [math.inf if window is None else window for window in arch.kv_windows]
    return windows.index(max(windows))


def build_proposer(
    config: EngineConfig, arch: ArchConfig, schedule: ScheduleConfig, kv_dtype: jnp.dtype, draft: Draft
) -> Proposer | None:
    """Return the proposer of speculative decoding; None without it."""
    speculation = config.speculation
    if speculation is None:
        return None
    num_tokens = speculation.max_drafts
    if speculation.method == "ngram":
        most, fewest = speculation.prompt_lookup_max, speculation.prompt_lookup_min
        assert most is not None is not fewest, "the configuration has resolved both"
        return NGram(num_tokens, most, fewest)
    if speculation.method == "medusa":
        local, dtype = arch.local(config.tensor_parallel_size), compute_dtype(config, arch).name
        return Medusa(num_tokens, local, arch.vocab_size, schedule.max_num_seqs, dtype, speculation.tree)
    assert draft.arch is not None, "there is a draft model or a layer"
    if draft.head is not None:
        return DraftLayer(
            num_tokens,
            draft.head,
            arch.local(config.tensor_parallel_size),
            arch.vocab_size,
            schedule,
            compute_dtype(config, arch).name,
            kv_dtype.name,
            draft.backend,
            kv_group=_widest_group(arch),
        )
    return DraftModel(
        num_tokens,
        draft.arch,
        arch.vocab_size,
        schedule,
        kv_dtype.name,
        draft.backend,
        kv_group=_widest_group(arch),
        chunk=max(FREE_TOKENS if schedule.few_programs else 64, SPECULATIVE_ROWS),
        tree=speculation.tree,
        is_mapped="outputs" in draft.params,
    )


def on_every_device(params: Params, mesh: Mesh | None) -> Params:
    """Return parameters that each device of a mesh has whole."""
    placed: Params = params if mesh is None else jax.device_put(params, replicated(mesh))
    return placed


def warn_without_native_kernels() -> None:
    """Say why a CPU will be slow, and what helps."""
    if _on_cpu() and (reason := native.unavailable()) is not None:
        logger.warning(
            "steps take about three times as long as they could on this CPU: %s; "
            "with a C++ compiler (g++ or clang++) on the PATH, install jaxserve again",
            reason,
        )


def copies(params: Params, meshes: Sequence[Mesh | None]) -> list[Params]:
    """The weights of the first of some replicas, and the same on the devices of the others."""

    def copy(mesh: Mesh) -> Params:
        copied: Params = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, x.sharding.spec)), params)
        return copied

    return [params, *(copy(mesh) for mesh in meshes[1:] if mesh is not None)]


def _devices(meshes: Sequence[Mesh | None]) -> list[jax.Device]:
    """Return the devices of all replicas that this process can see."""
    devices = [device for mesh in meshes for device in ([jax.devices()[0]] if mesh is None else mesh.devices.flat)]
    return [device for device in devices if device.process_index == jax.process_index()]


def _meshes(config: EngineConfig) -> list[Mesh | None]:
    return replica_meshes(config.tensor_parallel_size, config.data_parallel_size)


def build_params(config: EngineConfig, arch: ArchConfig) -> Params:
    """Load the weights of the first replica in the serving dtype.

    Split over its devices, quantised, packed for a CPU, stacked for a scan.
    """
    dtype = compute_dtype(config, arch).name
    if config.dtype == "auto" and arch.dtype == "float32" != dtype:
        logger.warning('the float32 checkpoint is served in %s; pass dtype="float32" to keep its precision', dtype)
    return _make_params(config, arch, partial(weights.load, config.model_path, use_tqdm=True))


def prepare_params(config: EngineConfig, arch: ArchConfig, given: Weights, current: Params) -> Callable[[], Params]:
    """Other weights for the first replica, in the form that `current` has; what is returned gives them.

    Arrays are in that form by then. A directory has been looked at, but is read only when they are asked for.

    Args:
        config: of the engine.
        arch: of the model.
        given: what `LLM.update_weights` takes.
        current: shapes, dtypes and places of the weights of the first replica.

    Raises:
        ConfigError: it is not of this model.
    """
    if isinstance(given, str | os.PathLike):
        try:
            weights.check(given, registry.param_specs(arch))
        except weights.CheckpointError as error:
            raise ConfigError(str(error)) from error
        return partial(_make_params, config, arch, partial(weights.load, given))
    if not isinstance(given, Mapping):
        raise ConfigError(f"weights must be a directory, or arrays in a tree or by name, got {type(given).__name__}")
    same_form = bool(jax.tree.structure(given) == jax.tree.structure(current))  # type: ignore[operator]  # a gap of jax's stubs
    new = _placed_as(given, current) if same_form else _make_params(config, arch, partial(weights.assemble, given))
    return lambda: new


def _placed_as(given: Mapping[str, Any], current: Params) -> Params:
    """No array is copied that lies where it has to."""
    wrong = [
        f"{jax.tree_util.keystr(path)} {new.dtype}{list(new.shape)} instead of {old.dtype}{list(old.shape)}"
        for (path, new), old in zip(jax.tree.leaves_with_path(given), jax.tree.leaves(current), strict=True)
        if (new.shape, new.dtype) != (old.shape, old.dtype)
    ]
    if wrong:
        raise ConfigError(f"weights must have the shapes and dtypes of those in use, got {', '.join(wrong[:8])}")
    placed: Params = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), given, current)
    return placed


def _make_params(config: EngineConfig, arch: ArchConfig, make: Callable[..., Params]) -> Params:
    specs, dtype = registry.param_specs(arch), compute_dtype(config, arch)
    form = weight_format(config.quantization)
    if (reason := packed.unsupported(form, dtype)) is not None:
        logger.info("matrices are multiplied by XLA: %s", reason)
    transform = matrix_transform(specs, form, native=reason is None)
    try:
        with scope_of(config)():  # quantising is compiled too
            params = make(specs, dtype, _shardings(_meshes(config)[0], specs), transform)
            return stacked_if_scanned(params, arch)
    except weights.CheckpointError as error:
        raise ConfigError(str(error)) from error


def stacked_if_scanned(params: Params, arch: ArchConfig) -> Params:
    """The layers as programs take them here: on TPUs stacked, where they can be scanned; elsewhere as they are."""
    scan = jax.default_backend() == "tpu" and decoder.can_scan(arch)
    return stack_layers(params, arch.period) if scan else params


def _shardings(mesh: Mesh | None, specs: Sequence[ParamSpec]) -> Shardings | None:
    if mesh is None:
        return None
    return {spec.path: named_sharding(mesh, spec.axes) for spec in specs}.__getitem__


def compute_dtype(config: EngineConfig, arch: ArchConfig, *, on_cpu: bool | None = None) -> jnp.dtype:
    """Return the dtype of weights and activations.

    The dtype is the one asked for, else float32 on a CPU and the checkpoint's on accelerators. There a float32 one
    is served in bfloat16, as by vLLM: it would take twice the memory and a fraction of the speed.

    Args:
        config: options of the engine.
        arch: the model.
        on_cpu: True for a model that runs on a CPU; by default as in this process.
    """
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    on_cpu = _on_cpu() if on_cpu is None else on_cpu
    return jnp.dtype("float32" if on_cpu else "bfloat16" if arch.dtype == "float32" else arch.dtype)


def pool_dtype(config: EngineConfig, dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of keys and values in the pool, where the model computes in `dtype`."""
    return dtype if config.kv_cache_dtype == "auto" else jnp.dtype(config.kv_cache_dtype)


def select_backend(config: EngineConfig, arch: ArchConfig, kv_dtype: jnp.dtype, *, platform: str | None = None) -> str:
    """Return the backend that serves one device's part of a model; ConfigError if the requested one cannot.

    Args:
        config: options of the engine.
        arch: sizes of one device's part of the model.
        kv_dtype: dtype of the pool.
        platform: as of `ragged_paged_attention.select_backend`.
    """
    try:
        return attention.select_backend(
            config.attention_backend,
            num_query_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            page_size=config.page_size,
            kv_dtype=kv_dtype,
            platform=platform,
        )
    except UnsupportedBackendError as error:
        raise ConfigError(str(error)) from error


def choose_page_size(config: EngineConfig, arch: ArchConfig, kv_dtype: jnp.dtype, backend: str) -> int:
    """Return the tokens per page of a device's pool in the layout of `backend`; `arch` is its part of the model."""
    if config.page_size is not None:
        return config.page_size
    sizes = {"num_kv_heads": arch.num_kv_heads, "head_dim": arch.head_dim}
    return attention.default_page_size(backend, **sizes, kv_dtype=kv_dtype)


def build_schedule(
    config: EngineConfig,
    arch: ArchConfig,
    kv_dtype: jnp.dtype,
    backend: str,
    devices: Sequence[Memory],
    draft_page: Callable[[int], int] = lambda page_size: 0,
) -> ScheduleConfig:
    """Return the resolved sizes; the pool's come from `num_pages`, or else from free memory.

    Args:
        config: options of the engine.
        arch: sizes of one device's part of the model.
        kv_dtype: dtype of the pool.
        backend: backend of attention, whose layout the pool has.
        devices: devices of all replicas; the one with the least free memory decides.
        draft_page: bytes of a page of a draft model's pool, by tokens per page.
    """
    page_size = choose_page_size(config, arch, kv_dtype, backend)
    num_bytes = page_bytes(arch, page_size, kv_dtype, backend) + draft_page(page_size)
    num_pages = config.num_pages or _num_pages_that_fit(config, arch, page_size, num_bytes, devices)
    return resolve_schedule(
        config,
        max_position=arch.max_position,
        platform=jax.default_backend(),
        page_size=page_size,
        num_pages=num_pages,
        windows=arch.kv_windows,
    )


def page_bytes(arch: ArchConfig, page_size: int, kv_dtype: jnp.dtype, backend: str) -> int:
    """Return the bytes of a page in the pool of a device, which has `arch` of the model."""
    page = jax.eval_shape(partial(new_pool, arch, 1, page_size, kv_dtype=kv_dtype, backend=backend))
    return tree_bytes(page)


def slot_bytes(config: EngineConfig, arch: ArchConfig, *, on_cpu: bool) -> int:
    """Return the bytes of the tables by slot on a device that has `arch` of the model."""
    seqs, _ = default_batch(config, on_cpu=on_cpu)
    return tree_bytes(jax.eval_shape(partial(new_slots, arch, seqs, config.max_model_len or arch.max_position)))


def tree_bytes(tree: Any) -> int:
    """Bytes of arrays, by their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _num_pages_that_fit(
    config: EngineConfig, arch: ArchConfig, page_size: int, page_bytes: int, devices: Sequence[Memory]
) -> int:
    if _on_cpu():
        budget = cpu_pool_bytes(config, arch, page_size, page_bytes)
    else:
        budget = min(_free_bytes(config, arch, device.memory_stats()) for device in devices)
    if budget < page_bytes:
        raise ConfigError(
            f"the KV pool must hold at least one page of {page_bytes} bytes, got {int(budget)} bytes free; "
            f"raise gpu_memory_utilization, lower max_num_batched_tokens, or set num_pages"
        )
    return int(budget // page_bytes)


def cpu_pool_bytes(config: EngineConfig, arch: ArchConfig, page_size: int, page_bytes: int) -> float:
    """Return the bytes of a pool on a CPU: a share of the memory, no more than the requests of a step can use."""
    row_pages = KVGroups(page_size, arch.kv_windows).num_pages(config.max_model_len or arch.max_position)
    max_num_seqs, _ = default_batch(config, on_cpu=True)
    share = machine_bytes() * CPU_POOL_SHARE / (config.tensor_parallel_size * config.data_parallel_size)
    return float(min(share - slot_bytes(config, arch, on_cpu=True), max_num_seqs * row_pages * page_bytes))


def machine_bytes() -> int:
    """Return the bytes of this machine's memory, in use or not."""
    return int(psutil.virtual_memory().total)


def _free_bytes(config: EngineConfig, arch: ArchConfig, stats: Mapping[str, int] | None) -> float:
    if stats is None or "bytes_limit" not in stats:
        raise ConfigError("this device does not report its memory; set num_pages")
    limit_bytes = stats["bytes_limit"]
    total_bytes = limit_bytes
    if jax.default_backend() == "gpu":
        fraction = _claimed.get("gpu") or gpu_memory_fraction() or DEFAULT_GPU_MEMORY_FRACTION
        total_bytes = int(limit_bytes / fraction)
        if fraction < config.gpu_memory_utilization:
            logger.warning(
                "gpu_memory_utilization=%s of %.1f GiB would be %.1f GiB, but XLA took %.1f GiB (%s) when jax started; "
                "start jaxserve before anything else uses jax, or set XLA_CLIENT_MEM_FRACTION=%s",
                config.gpu_memory_utilization,
                total_bytes / 2**30,
                total_bytes * config.gpu_memory_utilization / 2**30,
                limit_bytes / 2**30,
                fraction,
                config.gpu_memory_utilization,
            )
    sizes = {"total_bytes": total_bytes, "limit_bytes": limit_bytes, "used_bytes": stats["bytes_in_use"]}
    return accelerator_pool_bytes(config, arch, **sizes)


def accelerator_pool_bytes(
    config: EngineConfig, arch: ArchConfig, *, total_bytes: int, limit_bytes: int, used_bytes: int
) -> float:
    """Return the bytes that the pool may take on an accelerator; negative where nothing is left for it.

    Args:
        config: options, the share of memory to use among them.
        arch: sizes of one device's part of the model.
        total_bytes: memory that the device has.
        limit_bytes: memory that XLA takes.
        used_bytes: memory in use, by the weights above all.
    """
    share = min(total_bytes * config.gpu_memory_utilization, limit_bytes)
    kept = activation_bytes(config, arch) + slot_bytes(config, arch, on_cpu=False)
    return float(share - used_bytes - kept)


def activation_bytes(config: EngineConfig, arch: ArchConfig) -> int:
    """A generous bound on a step's temporaries: logits in float32 a few times over, activations of one layer."""
    seqs, tokens = default_batch(config, on_cpu=False)
    token_size = widest_output(registry.param_specs(arch)) + 4 * arch.hidden_size
    num_logits = 4 * seqs
    if config.speculation is not None:  # of all drafted tokens, with the weights of draft and model
        nodes = 1 + config.speculation.max_drafts + config.speculation.num_spare_drafts
        num_logits = max(num_logits, 8 * min(seqs, SPECULATIVE_ROWS) * nodes)
    computed = 4 * (num_logits * arch.vocab_size + 2 * tokens * token_size)
    return SCRATCH_BYTES + computed + _logprob_bytes(config, arch, seqs + tokens)


def _logprob_bytes(config: EngineConfig, arch: ArchConfig, num_positions: int) -> int:
    """Return the bytes that log probabilities of so many positions take, computed and as an output."""
    layout = LogprobLayout.of(config.max_logprobs, arch.vocab_size * config.tensor_parallel_size)
    num_positions += min(config.max_steps * MULTI_STEP_ROWS, MAX_STEP_TOKENS) if config.max_logprobs >= 0 else 1
    return 4 * 2 * num_positions * layout.num_words


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"
