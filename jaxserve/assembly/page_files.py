"""Page movers of an engine's runners, with a file each in `kv_offloading_path`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxserve.api.config import EngineConfig
from jaxserve.api.metrics import EngineStats
from jaxserve.errors import ConfigError
from jaxserve.execution.page_mover import PageMover
from jaxserve.execution.runner import Runner
from jaxserve.models.arch import ArchConfig
from jaxserve.scheduling.executor_protocol import Executor
from jaxserve.scheduling.kv_cache.page_archive import PageArchive


def check_model(config: EngineConfig, arch: ArchConfig, *, is_distributed: bool) -> None:
    """Raise ConfigError if pages on disk are requested and cannot be used.

    Args:
        config: engine options.
        arch: sizes of the model.
        is_distributed: True in a run over several processes, which would each need the same files.
    """
    if config.kv_offloading_path is None:
        return
    for reason, is_true in (
        (
            "needs a model without recurrent layers, whose states are not kept on disk",
            arch.state is not None,
        ),
        ("is for models that generate, as pooling keeps no pages", arch.pooler is not None),
        ("is for runs of one process", is_distributed),
        ("needs file locks of Linux or macOS", sys.platform == "win32"),
    ):
        if is_true:
            raise ConfigError(f"kv_offloading_path {reason}, got {config.kv_offloading_path!r}; drop it")


def build_movers(config: EngineConfig, executors: Sequence[Executor], stats: EngineStats) -> list[PageMover | None]:
    """Return the page mover of each executor; None without `kv_offloading_path`, or for executors without a pool.

    Raises:
        ConfigError: a file cannot be opened or holds no page.
    """
    if config.kv_offloading_path is None:
        return [None] * len(executors)
    directory, max_bytes = Path(config.kv_offloading_path), int(config.kv_offloading_disk_size * 2**30)

    def open_archive(fingerprint: bytes, page_bytes: int) -> PageArchive:
        try:
            archive = PageArchive(directory / fingerprint.hex(), fingerprint, page_bytes, max_bytes)
        except OSError as error:
            raise ConfigError(
                f"kv_offloading_path must be a directory that can be written, got {str(directory)!r}: {error}"
            ) from error
        if not archive.num_slots:
            raise ConfigError(
                f"kv_offloading_disk_size must be at least one page of {page_bytes:,} bytes, "
                f"got {config.kv_offloading_disk_size} GiB; raise it"
            )
        return archive

    return [PageMover(each, open_archive, stats) if isinstance(each, Runner) else None for each in executors]
