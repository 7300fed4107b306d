"""Tiers of KV pages below device memory: host memory, and a file per replica in `kv_offloading_path`."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxserve.api.config import EngineConfig
from jaxserve.api.metrics import EngineStats
from jaxserve.errors import ConfigError
from jaxserve.execution.page_media import DiskPages, HostPages, Medium, num_page_bytes
from jaxserve.execution.page_mover import PageMover, fingerprint
from jaxserve.execution.page_programs import abstract_page
from jaxserve.execution.runner import Runner
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params
from jaxserve.scheduling.executor_protocol import Executor
from jaxserve.scheduling.kv_cache.page_archive import PageArchive

logger = logging.getLogger(__name__)


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
        ("needs a model without recurrent layers, whose states are not kept in lower tiers", arch.state is not None),
        ("is for models that generate, as pooling keeps no pages", arch.pooler is not None),
        ("is for runs of one process", is_distributed),
        ("needs file locks of Linux or macOS", on_disk and sys.platform == "win32"),
    ):
        if is_true:
            raise ConfigError(f"{option} {reason}, got {getattr(config, option)!r}; drop it")


def build_movers(config: EngineConfig, executors: Sequence[Executor], stats: EngineStats) -> list[PageMover | None]:
    """Return the page mover of each executor; None without lower tiers, or for executors without a pool.

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
    return [_build_mover(config, each, stats) if isinstance(each, Runner) else None for each in executors]


def _build_mover(config: EngineConfig, runner: Runner, stats: EngineStats) -> PageMover:
    """Return the page mover of a runner, with its tiers."""
    lowering = runner.programs.lowering
    pool = lowering.abstract_state.kv_pages
    shapes = [abstract_page(leaf, lowering.mesh) for leaf in jax.tree.leaves(pool)]
    page_bytes = num_page_bytes(shapes)
    media: list[Medium] = []
    if config.kv_offloading_size:
        media.append(HostPages(_num_pages("kv_offloading_size", config.kv_offloading_size, page_bytes), stats))
    if config.kv_offloading_path is not None:
        directory, size_gib = Path(config.kv_offloading_path), config.kv_offloading_disk_size

        def open_archive(params: Params) -> PageArchive:
            key = fingerprint(params, lowering)
            try:
                archive = PageArchive(directory / key.hex(), key, page_bytes, int(size_gib * 2**30))
            except OSError as error:
                raise ConfigError(
                    f"kv_offloading_path must be a directory that can be written, got {str(directory)!r}: {error}"
                ) from error
            _num_pages("kv_offloading_disk_size", size_gib, archive.slot_bytes)
            return archive

        media.append(DiskPages(open_archive, runner.params, shapes, stats))
    return PageMover(runner, media, stats)


def _num_pages(option: str, size_gib: float, page_bytes: int) -> int:
    """Return the number of pages that fit an option's size; ConfigError if it is 0."""
    num_pages = int(size_gib * 2**30) // page_bytes
    if not num_pages:
        raise ConfigError(
            f"{option} must be at least one page of {page_bytes:,} bytes, got {size_gib} GiB; raise it", about=(option,)
        )
    return num_pages
