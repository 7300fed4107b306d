"""Device memory: layout and size of the KV pool, and the memory reserved for everything else."""

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax._src import xla_bridge  # jax does not say elsewhere whether its backend runs
from jax.typing import DTypeLike

from jaxserve.api.config import EngineConfig
from jaxserve.assembly.parameters import adapter_layout, compute_dtype
from jaxserve.errors import ConfigError
from jaxserve.execution.sampling import LogprobLayout
from jaxserve.execution.state import new_encoder_cache, new_pool, new_slots, new_states
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig, Stage
from jaxserve.models.family import widest_output
from jaxserve.models.vision.tower import num_flops, tower_specs
from jaxserve.pallas_kernels.op import UnsupportedBackendError
from jaxserve.pallas_kernels.ragged_paged_attention.layout import SMALL_PAGE_TOKENS
from jaxserve.scheduling.kv_cache.groups import KVGroups
from jaxserve.scheduling.schedule_config import (
    MAX_STEP_TOKENS,
    MULTI_STEP_ROWS,
    SPECULATIVE_ROWS,
    ScheduleConfig,
    default_batch,
    default_snapshots,
    resolve_schedule,
)
from jaxserve.system import machine_memory
from jaxserve.system.environment import (
    DEFAULT_GPU_MEMORY_FRACTION,
    DEFAULT_PINNED_GIB,
    allowing_pinned_memory,
    claiming_gpu_memory,
    gpu_memory_fraction,
    pinned_memory_gib,
)

logger = logging.getLogger(__name__)

SCRATCH_BYTES = 64_000_000  # temporaries per step that do not grow with the model, mainly partial attention results
DEFAULT_ENCODER_ROWS = 8192  # embeddings of images in the encoder cache
# fraction of the machine's memory; the pool never exceeds max_num_seqs requests of maximum length
CPU_POOL_FRACTION = 1 / 16
# memory fraction that XLA claimed on each device when an engine started jax, by platform
_claimed: dict[str, float] = {}
_claimed_pinned: dict[str, int] = {}  # limit on pinned host memory in GiB, likewise


@runtime_checkable
class Memory(Protocol):
    """Protocol of a device that may report its memory."""

    def memory_stats(self) -> Mapping[str, int] | None:
        """Bytes in use and their limit, among others; None if not reported."""


def claim_memory(config: EngineConfig) -> None:
    """Start jax's backend, unless it runs, and have XLA claim `gpu_memory_utilization` of each GPU.

    XLA also gets a limit on pinned host memory that leaves its default beside the pages of `kv_offloading_size`.
    """
    pages_gib = float(config.kv_offloading_size or 0) * config.data_parallel_size
    if not xla_bridge.backends_are_initialized():
        with (
            claiming_gpu_memory(config.gpu_memory_utilization) as fraction,
            allowing_pinned_memory(pages_gib),
        ):
            jax.default_backend()
        _claimed["gpu"] = fraction
        _claimed_pinned["gpu"] = pinned_memory_gib() or DEFAULT_PINNED_GIB + math.ceil(pages_gib)
    if pages_gib and jax.default_backend() == "gpu":
        _check_pinned(pages_gib)


def _check_pinned(pages_gib: float) -> None:
    """Warn if XLA's limit of pinned host memory has no capacity for pages of `pages_gib` GiB."""
    limit_gib = _claimed_pinned.get("gpu") or pinned_memory_gib() or DEFAULT_PINNED_GIB
    if pages_gib > limit_gib:
        logger.warning(
            "kv_offloading_size: pages may take %s GiB of pinned host memory, but XLA's limit was %s GiB when jax "
            "started, and pages beyond it are not kept; start jaxserve before anything else uses jax, or set "
            "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=%s",
            pages_gib,
            limit_gib,
            DEFAULT_PINNED_GIB + math.ceil(pages_gib),
        )


def pool_dtype(config: EngineConfig, dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of keys and values in the pool for a model that computes in `dtype`."""
    return dtype if config.kv_cache_dtype == "auto" else jnp.dtype(config.kv_cache_dtype)


def select_backend(config: EngineConfig, arch: ArchConfig, kv_dtype: jnp.dtype, *, platform: str | None = None) -> str:
    """Return the attention backend for one device's shard; ConfigError if the requested one cannot run it.

    Args:
        config: engine options.
        arch: sizes of one device's shard.
        kv_dtype: pool dtype.
        platform: platform as in `ragged_paged_attention.select_backend`.
    """
    try:
        return arch.kv_layout.pool.select_backend(
            config.attention_backend,
            num_query_heads=arch.attention.num_heads,
            page_size=config.page_size,
            kv_dtype=kv_dtype,
            platform=platform,
        )
    except UnsupportedBackendError as error:
        raise ConfigError(str(error)) from error


def choose_page_size(config: EngineConfig, arch: ArchConfig, kv_dtype: jnp.dtype, backend: str) -> int:
    """Return the tokens per page in a device's pool, for `backend`'s layout and the shard `arch`."""
    if config.page_size is not None:
        return config.page_size
    return arch.kv_layout.pool.default_page_size(backend, kv_dtype)


def build_schedule(
    config: EngineConfig,
    arch: ArchConfig,
    kv_dtype: jnp.dtype,
    backend: str,
    stages: Sequence[tuple[ArchConfig, Sequence[Memory]]],
    draft_page: Callable[[Stage, int], int] = lambda stage, page_size: 0,
) -> ScheduleConfig:
    """Return the resolved sizes; the pool size comes from `num_pages` or from free memory.

    Args:
        config: engine options.
        arch: sizes of one device's shard.
        kv_dtype: pool dtype.
        backend: attention backend, which determines the pool layout.
        stages: each pipeline stage's sizes on one device, and its devices in all replicas; the device with the least
            free memory decides.
        draft_page: page bytes of a draft model's pool, by stage and tokens per page.
    """
    page_size = choose_page_size(config, arch, kv_dtype, backend)
    counts = []
    for stage, devices in stages:
        num_bytes = page_bytes(stage, page_size, kv_dtype, backend) + draft_page(stage.stage, page_size)
        require_memory(config, stage, num_bytes, devices)
        counts.append(config.num_pages or _num_pages_that_fit(config, stage, page_size, num_bytes, devices))
    num_pages = min(counts)
    return resolve_schedule(
        config,
        max_position=arch.max_position,
        platform=jax.default_backend(),
        page_size=page_size,
        num_pages=num_pages,
        windows=arch.kv_layout.windows,
        has_states=arch.state is not None,
        pools=arch.pooler is not None,
        num_encoder_rows=encoder_rows(config, arch),
        encoder_costs=encoder_costs(arch),
        num_encoder_layers=1 if arch.images is None else arch.images.tower.num_layers,
        score_costs=score_costs(config, arch),
        has_position_axes=arch.images is not None and arch.images.has_axes,
        sees_images=arch.sees_images,
    )


def require_memory(config: EngineConfig, arch: ArchConfig, page_bytes: int, devices: Sequence[Memory]) -> None:
    """Raise ConfigError if the options allocate more than a device's free memory.

    Args:
        config: engine options.
        arch: sizes of one device's shard.
        page_bytes: bytes per page.
        devices: devices in all replicas; the one with the least free memory decides.
    """
    free_bytes = min(map(free_memory, devices), default=math.inf)
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu:  # all devices share it
        free_bytes /= config.num_devices
    seqs, tokens = default_batch(config, on_cpu=on_cpu)
    logits = 0 if arch.pooler is not None else 4 * seqs * arch.vocab_size
    needed = {
        f"num_pages={config.num_pages}": (config.num_pages or 1) * page_bytes,
        f"max_num_seqs={seqs} and max_model_len={config.max_model_len or arch.max_position}": logits
        + slot_bytes(config, arch, on_cpu=on_cpu),
        f"max_num_batched_tokens={tokens}": 8 * tokens * arch.hidden_size,  # residual stream, before and after a layer
    }
    total_bytes = sum(needed.values())
    if total_bytes > free_bytes:
        name = max(needed, key=needed.__getitem__)
        options = re.findall(r"(\w+)=", name)
        raise ConfigError(
            f"the device must have {total_bytes:,} bytes free for the KV cache and the state of requests, of which "
            f"{name} needs {needed[name]:,}, got {int(free_bytes):,} bytes free; lower {' or '.join(options)}"
        )


def free_memory(device: Memory) -> float:
    """Return the bytes that a device can still allocate; infinity if it does not report them."""
    if jax.default_backend() == "cpu":
        return float(machine_memory.available_bytes())
    stats = device.memory_stats()
    if stats is None or "bytes_limit" not in stats:
        return math.inf
    return float(stats["bytes_limit"] - stats.get("bytes_in_use", 0))


def page_bytes(arch: ArchConfig, page_size: int, kv_dtype: jnp.dtype, backend: str) -> int:
    """Return the bytes per page in the pool of a device with the shard `arch`."""
    page = jax.eval_shape(partial(new_pool, arch, 1, page_size, kv_dtype=kv_dtype, backend=backend))
    return tree_bytes(page)


def slot_bytes(config: EngineConfig, arch: ArchConfig, *, on_cpu: bool) -> int:
    """Return the bytes of slot tables, states and adapters on a device with the shard `arch`."""
    seqs, _ = default_batch(config, on_cpu=on_cpu)
    num_bytes = tree_bytes(jax.eval_shape(partial(new_states, arch, seqs + default_snapshots(config, seqs))))
    num_bytes += adapter_bytes(config, arch, on_cpu=on_cpu)
    num_bytes += encoder_cache_bytes(config, arch, compute_dtype(config, arch, on_cpu=on_cpu))
    if arch.pooler is not None:
        return num_bytes + 4 * seqs * arch.hidden_size
    return num_bytes + tree_bytes(
        jax.eval_shape(partial(new_slots, arch.vocab_size, seqs, config.max_model_len or arch.max_position))
    )


def adapter_bytes(config: EngineConfig, arch: ArchConfig, *, on_cpu: bool) -> int:
    """Return the bytes of all LoRA adapters on a device with the shard `arch`."""
    layout = adapter_layout(config, arch, platform="cpu" if on_cpu else "gpu")
    return 0 if layout is None else tree_bytes(layout.abstract(arch, None))


def encoder_rows(config: EngineConfig, arch: ArchConfig) -> int:
    """Return the capacity of the encoder cache in embeddings; 0 if the model takes no images."""
    if arch.images is None:
        return 0
    return config.encoder_cache_size or max(DEFAULT_ENCODER_ROWS, default_batch(config, on_cpu=False)[1])


def encoder_costs(arch: ArchConfig) -> tuple[tuple[int, int], ...]:
    """Return, for each program of the vision tower, its patches and the number of text tokens with as many FLOPs."""
    if arch.images is None:
        return ()
    tower, per_token = arch.images.tower, registry.flop_counts(arch).per_token
    return tuple((size, -(-num_flops(tower, size) // per_token)) for size in tower.buckets)


def score_costs(config: EngineConfig, arch: ArchConfig) -> tuple[tuple[int | None, float], ...]:
    """Return, for each window, the FLOPs per score in its layers in tokens with as many FLOPs; empty for one stage."""
    if config.pipeline_parallel_size == 1:
        return ()
    flops, counts = registry.flop_counts(arch), Counter(layer.window for layer in arch.attention_layers)
    return tuple((window, count * flops.per_score / flops.per_token) for window, count in counts.items())


def encoder_cache_bytes(config: EngineConfig, arch: ArchConfig, dtype: DTypeLike) -> int:
    """Return the bytes of the encoder cache on a device, for embeddings in `dtype`."""
    return tree_bytes(jax.eval_shape(partial(new_encoder_cache, arch, encoder_rows(config, arch), dtype)))


def _encoder_bytes(arch: ArchConfig) -> int:
    """Return a generous bound on the temporaries of the vision tower's largest program; 0 without a tower."""
    if (tower := arch.tower) is None:
        return 0
    widest = max(spec.token_rows for spec in tower_specs(tower) if spec.is_matrix)
    return 4 * tower.buckets[-1] * (2 * widest + 4 * tower.hidden_size + 2 * tower.patch_size)


def _begun_image_bytes(arch: ArchConfig) -> int:
    """Return a bound on an image's hidden states between two encoded parts; 0 without a tower."""
    if (tower := arch.tower) is None:
        return 0
    return 4 * tower.buckets[-1] * (tower.hidden_size * len({0, *tower.feature_layers}) + tower.head_dim + 4)


def state_bytes(arch: ArchConfig) -> int:
    """Return the recurrent state bytes per sequence on a device with the shard `arch`."""
    return tree_bytes(jax.eval_shape(partial(new_states, arch, 1)))


def tree_bytes(tree: Any) -> int:
    """Return the total bytes of the arrays in a tree, or of arrays with its shapes and dtypes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _num_pages_that_fit(
    config: EngineConfig, arch: ArchConfig, page_size: int, page_bytes: int, devices: Sequence[Memory]
) -> int:
    """Return how many pages with `page_bytes` bytes fit in every device's memory; ConfigError if none fits."""
    if jax.default_backend() == "cpu":
        budget = cpu_pool_bytes(config, arch, page_size, page_bytes)
    else:
        budget = min(_free_bytes(config, arch, device.memory_stats()) for device in devices)
    if budget < page_bytes:
        raise ConfigError(
            f"the KV pool must hold at least one page of {page_bytes} bytes, got {max(0, int(budget))} bytes free "
            "beside the state of requests and the temporaries of a step; lower max_num_seqs, max_model_len or "
            "max_num_batched_tokens, raise gpu_memory_utilization, or set num_pages"
        )
    return int(budget // page_bytes)


def cpu_pool_bytes(config: EngineConfig, arch: ArchConfig, page_size: int, page_bytes: int) -> float:
    """Return the pool size on a CPU: a fraction of its memory, but no more than max_num_seqs requests can use."""
    row_pages = KVGroups(page_size, arch.kv_layout.windows).num_pages(config.max_model_len or arch.max_position)
    max_num_seqs = default_batch(config, on_cpu=True)[0] // config.num_data_shards
    pool_bytes = machine_memory.machine_bytes() * CPU_POOL_FRACTION / (config.num_devices)
    return float(min(pool_bytes - slot_bytes(config, arch, on_cpu=True), max_num_seqs * row_pages * page_bytes))


def _free_bytes(config: EngineConfig, arch: ArchConfig, stats: Mapping[str, int] | None) -> float:
    """Return the bytes for the pool on an accelerator with jax's memory `stats`; warn if XLA may use too little."""
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
    """Return the bytes left for the pool on an accelerator; negative if other needs exceed its memory.

    Args:
        config: options, including the memory fraction to use.
        arch: sizes of one device's shard.
        total_bytes: device memory.
        limit_bytes: memory claimed by XLA.
        used_bytes: memory in use, mainly by weights.
    """
    pool_bytes = min(total_bytes * config.gpu_memory_utilization, limit_bytes)
    temporaries = max(activation_bytes(config, arch), _encoder_bytes(arch))  # a step and the tower run in turn
    kept = temporaries + slot_bytes(config, arch, on_cpu=False) + _begun_image_bytes(arch)
    return float(pool_bytes - used_bytes - kept)


def activation_bytes(config: EngineConfig, arch: ArchConfig) -> int:
    """Return a generous bound on a step's temporaries: float32 logits several times, and one layer's activations."""
    seqs, tokens = default_batch(config, on_cpu=False)
    token_size = widest_output(registry.param_specs(arch)) + 4 * arch.hidden_size
    num_logits = 4 * seqs
    if config.speculation is not None:  # logits of all drafted tokens, with the weights of draft and model
        nodes = 1 + config.speculation.max_drafts + config.speculation.num_spare_drafts
        num_logits = max(num_logits, 8 * min(seqs, SPECULATIVE_ROWS) * nodes)
    computed = 4 * (num_logits * arch.vocab_size + 2 * tokens * token_size)
    return (
        SCRATCH_BYTES
        + computed
        + _choice_bytes(config, arch, seqs, tokens)
        + _logprob_bytes(config, arch, seqs + tokens)
    )


def _choice_bytes(config: EngineConfig, arch: ArchConfig, num_rows: int, num_tokens: int) -> int:
    """Return the bytes by which a step's rows choose among their tokens; 0 if they attend to all."""
    max_len, page_size = config.max_model_len or arch.max_position, config.page_size or SMALL_PAGE_TOKENS
    return arch.kv_layout.pool.choice_bytes(num_rows, num_tokens, arch.attention.num_heads, max_len, page_size)


def _logprob_bytes(config: EngineConfig, arch: ArchConfig, num_positions: int) -> int:
    """Return the log probability bytes for `num_positions` positions, while computed and as output."""
    layout = LogprobLayout.from_sizes(config.selected_logprobs, arch.vocab_size * config.tensor_parallel_size)
    num_positions += min(config.max_steps * MULTI_STEP_ROWS, MAX_STEP_TOKENS) if config.selected_logprobs >= 0 else 1
    return 4 * 2 * num_positions * layout.num_words
