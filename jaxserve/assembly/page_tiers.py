"""Tiers of KV pages below device memory: host memory, and a file per replica in `kv_offloading_path`."""

import hashlib
import logging
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxserve import weights
from jaxserve.api.config import EngineConfig
from jaxserve.api.kv_store_config import CONSUMER
from jaxserve.api.metrics import EngineStats
from jaxserve.assembly.parameters import compute_dtype, storage_name
from jaxserve.core.prefix_lookups import PrefixLookups
from jaxserve.errors import ConfigError
from jaxserve.execution.lowering import Lowering
from jaxserve.execution.page_bytes import PageBytes
from jaxserve.execution.page_media import DiskPages, HostPages, Medium
from jaxserve.execution.page_mover import PageMover
from jaxserve.execution.pipeline import Pipeline
from jaxserve.execution.program_store import described
from jaxserve.execution.proposer import PagedProposer
from jaxserve.execution.runner import Runner
from jaxserve.execution.store_pages import StorePages
from jaxserve.layers.kv_forms import HeadVectors, MixedHeads
from jaxserve.layers.sharding import tensor_size
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.scheduling.executor_protocol import Executor
from jaxserve.scheduling.kv_cache.page_archive import PageArchive
from jaxserve.scheduling.kv_cache.shared_store import Seal
from jaxserve.scheduling.schedule_config import ScheduleConfig

logger = logging.getLogger(__name__)

# Host memory that pages take by default: a replica's, that of all replicas, and the fraction of the machine's. XLA
# allows 64 GiB of pinned memory, which other copies need too.
DEFAULT_HOST_GIB, DEFAULT_TOTAL_GIB, DEFAULT_HOST_FRACTION = 8.0, 32.0, 1 / 8


def with_host_tier(
    config: EngineConfig, arch: ArchConfig, platform: str, memory_bytes: float, *, is_distributed: bool = False
) -> EngineConfig:
    """Return options that keep pages in host memory, which is the default on accelerators that support it.

    Args:
        config: engine options.
        arch: sizes of the model.
        platform: platform of the devices.
        memory_bytes: memory of the host.
        is_distributed: True in a run over several processes.
    """
    total_gib = min(DEFAULT_TOTAL_GIB, DEFAULT_HOST_FRACTION * memory_bytes / 2**30)
    size_gib = min(DEFAULT_HOST_GIB, total_gib / config.data_parallel_size)
    if config.kv_offloading_size is not None or platform == "cpu" or size_gib < 1:
        return config
    try:
        tiered = replace(config, kv_offloading_size=size_gib)
        check_model(tiered, arch, is_distributed=is_distributed)
    except ConfigError:  # other options or the model support no tier
        return config
    return tiered


def check_model(config: EngineConfig, arch: ArchConfig, *, is_distributed: bool) -> None:
    """Raise ConfigError if lower tiers are requested and cannot be used.

    Args:
        config: engine options.
        arch: sizes of the model.
        is_distributed: True in a run over several processes, which would each need the same pages.
    """
    if (option := config.offloading_option) is None:
        return
    on_disk = config.kv_offloading_path is not None
    for reason, is_true in (
        ("is for models that generate, as pooling keeps no pages", arch.pooler is not None),
        ("is for runs of one process", is_distributed),
        ("needs file locks of Linux or macOS", on_disk and sys.platform == "win32"),
    ):
        if is_true:
            raise ConfigError(f"{option} {reason}, got {getattr(config, option)!r}; drop it")


def build_movers(
    config: EngineConfig, executors: Sequence[Executor], stats: EngineStats, content: Callable[[], bytes]
) -> list[PageMover | None]:
    """Return the page mover of each executor; None without lower tiers, or for executors without a pool.

    Args:
        config: engine options.
        executors: the replicas' executors.
        stats: totals to which pages are added.
        content: returns the current weights' digest.

    Raises:
        ConfigError: a file cannot be opened, or a tier holds no page.
    """
    if config.offloading_option is None:
        return [None] * len(executors)
    if config.kv_offloading_size and jax.default_backend() == "cpu":
        logger.warning(
            "kv_offloading_size=%s: on a CPU, pages in host memory take the same memory as the pool; "
            "raise num_pages instead, or keep pages on disk (kv_offloading_path)",
            config.kv_offloading_size,
        )
    stages = [each.stages if isinstance(each, Runner | Pipeline) else () for each in executors]
    proposers = [each.programs.lowering.proposer for replica in stages for each in replica]
    draft = layer_content(config) if any(isinstance(each, PagedProposer) for each in proposers) else b""
    with ExitStack() as stack:  # closes what is open if another tier fails
        movers = [
            _build_mover(config, each, stats, lambda: content() + draft, stack) if each else None for each in stages
        ]
        stack.pop_all()
    return movers


def layer_content(config: EngineConfig) -> bytes:
    """Return the digest of a draft layer's own directory; empty without one, or without pages on disk.

    Keys and values of the layer are stored with the pages.
    """
    speculation = config.speculation
    if not config.keeps_pages or speculation is None or speculation.model is None:
        return b""
    with registry.config_errors():
        return weights.content_digest(speculation.model)


def _build_mover(
    config: EngineConfig, stages: Sequence[Runner], stats: EngineStats, content: Callable[[], bytes], stack: ExitStack
) -> PageMover:
    """Return a replica's page mover, with its tiers, which `stack` closes."""
    lowerings = [stage.programs.lowering for stage in stages]
    page_bytes, state_bytes = new_page_bytes(lowerings), new_state_bytes(lowerings)
    media: list[Medium] = []
    if config.kv_offloading_size:
        state_pages = 1 if state_bytes is None else -(-state_bytes.host_size // page_bytes.host_size)
        num_pages = _num_pages("kv_offloading_size", config.kv_offloading_size, page_bytes.host_size, state_pages)
        media.append(HostPages(num_pages, stats, state_pages))
    if config.kv_offloading_path is not None:
        directory, size_gib = Path(config.kv_offloading_path), config.kv_offloading_disk_size

        def open_archive() -> PageArchive:
            key = fingerprint(content(), config, lowerings)
            try:
                archive = PageArchive(directory / key.hex(), key, page_bytes.size, int(size_gib * 2**30))
            except OSError as error:
                raise ConfigError(
                    f"kv_offloading_path must be a directory that can be written, got {str(directory)!r}: {error}"
                ) from error
            state_pages = 1 if state_bytes is None else -(-state_bytes.size // page_bytes.size)
            _num_pages("kv_offloading_disk_size", size_gib, archive.slot_bytes, state_pages)
            return archive

        media.append(DiskPages(open_archive, page_bytes, state_bytes, stats))
        stack.callback(media[-1].close)
    if (store := config.store) is not None:
        seal_key = store.read_key()
        num_pages = _num_pages("size_gib of kv_store", store.size_gib, page_bytes.size, 1)
        media.append(
            StorePages(
                store,
                lambda: Seal(seal_key, fingerprint(content(), config, lowerings)),
                num_pages,
                page_bytes,
                state_bytes,
                stats,
                writes=config.kv_role != CONSUMER,
            )
        )
        stack.callback(media[-1].close)
    return PageMover(stages, media, stats)


def new_lookups(config: EngineConfig, mover: PageMover | None, schedule: ScheduleConfig) -> PrefixLookups | None:
    """Return the lookups in the shared store, by the first replica's connection; None without a store."""
    if mover is None or config.kv_store is None:
        return None
    store = mover.media[-1]
    assert isinstance(store, StorePages), "the store is the last tier"
    return PrefixLookups(len(mover.media), schedule.kv_groups, store.find)


def shared_pages(mover: Any) -> str:
    """Return the identity of a replica's pages in the shared store; empty without one."""
    store = mover.media[-1] if isinstance(mover, PageMover) else None
    return store.pages if isinstance(store, StorePages) else ""


def _num_pages(option: str, size_gib: float, page_bytes: int, state_pages: int) -> int:
    """Return the number of pages that fit an option's size; ConfigError if a page or state snapshot does not.

    Args:
        option: name of the option.
        size_gib: its value.
        page_bytes: bytes of a page.
        state_pages: pages that take as many bytes as a state snapshot.
    """
    num_pages = int(size_gib * 2**30) // page_bytes
    if num_pages < state_pages:
        content = "page" if state_pages == 1 else "state snapshot"
        raise ConfigError(
            f"{option} must be at least one {content} of {state_pages * page_bytes:,} bytes, got {size_gib} GiB; "
            "raise it",
            about=(option,),
        )
    return num_pages


def new_page_bytes(stages: Sequence[Lowering]) -> PageBytes:
    """Return the conversion between pages in host memory and bytes on disk, given the pipeline stages' programs."""
    leaves = [leaf for each in stages for leaf in jax.tree.leaves(each.page_programs.abstract_page())]
    form = stages[0].arch.kv_layout.pool
    if not all(map(_is_canonical, stages)) or not isinstance(form, HeadVectors):
        return PageBytes(leaves)
    num_heads, num_devices = form.num_kv_heads, tensor_size(stages[0].mesh)
    return PageBytes(leaves, num_heads, math.lcm(num_heads, num_devices) // num_heads)


def new_state_bytes(stages: Sequence[Lowering]) -> PageBytes | None:
    """Return the conversion between state snapshots in host memory and bytes on disk; None without recurrent layers."""
    programs = [each.state_programs for each in stages]
    leaves = [leaf for each in programs if each is not None for leaf in jax.tree.leaves(each.abstract_page())]
    return PageBytes(leaves) if leaves else None


def _is_canonical(lowering: Lowering) -> bool:
    """Return whether bytes are independent of devices and backend.

    They are not if layers differ in their KV heads: pages then have the larger heads' layout, also if they hold vectors
    for smaller ones. A recurrent state has the order of its channels on each device, and a draft layer its own heads.
    """
    has_others = lowering.arch.state is not None or isinstance(lowering.proposer, PagedProposer)
    return not (isinstance(lowering.arch.kv_layout.pool, MixedHeads) or has_others)


def fingerprint(content: bytes, config: EngineConfig, stages: Sequence[Lowering]) -> bytes:
    """Return 16 bytes that identify weights, model and page layout, which determine a page together with its tokens.

    They depend neither on the attention backend nor on `tensor_parallel_size`, but on the division into stages.

    Args:
        content: digest of the weights, also of a draft layer's.
        config: engine options.
        stages: programs of the engine's pipeline stages.
    """
    last = stages[-1]
    models = [replace(each.arch, eos_ids=frozenset(), num_devices=1) for each in stages]  # host only: the ids
    rounding = storage_name(config, last.arch), config.activation_quantization, str(compute_dtype(config, last.arch))
    draft = last.proposer.page_layout if isinstance(last.proposer, PagedProposer) else None
    is_canonical = all(map(_is_canonical, stages))
    layout = (
        str(last.kv_dtype),
        rounding,
        new_page_bytes(stages).size,
        None if is_canonical else (last.backend, tensor_size(last.mesh), draft),
        replace(last.schedule.kv_groups, num_snapshots=None),
    )
    parts = described((*models, *layout)), content.hex()
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).digest()
