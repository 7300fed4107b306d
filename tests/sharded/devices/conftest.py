"""Checkpoint shared by all checks of engines."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import write_checkpoint
from tests.sharded.devices.sizes import MODEL
from tests.soon_compiled import few_programs


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, "llama", **MODEL)
    return path


@pytest.fixture(scope="module")
def fewer_programs() -> Iterator[None]:
    """Give engines of a module few sizes of steps."""
    with few_programs():
        yield
