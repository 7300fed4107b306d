"""Checkpoint and engines shared by all checks: one engine for each number of devices, of few programs."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jaxtyping
import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.assembly.driven import DrivenEngine
from tests.checkpoints import write_checkpoint
from tests.sharded.devices.sizes import MIXTURE, MODEL, SHARD_SIZES, SIZES
from tests.soon_compiled import few_programs

Start = Callable[..., DrivenEngine]


@pytest.fixture(autouse=True, scope="session")
def fewer_programs() -> Iterator[None]:
    """Give engines few sizes of steps: how tokens are padded has nothing to do with the number of devices."""
    with few_programs():
        yield


@pytest.fixture
def types_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check types and shapes in runs that leave that to others, too."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", False)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, "llama", **MODEL)
    return path


@pytest.fixture(scope="session")
def start(model: Path) -> Start:
    """Start an engine of some devices for each of some replicas, or reuse it.

    The oracle of the others, on one device, has one program: it goes single steps. So do replicas.
    """
    engines: dict[str, DrivenEngine] = {}

    def start(num_devices: int = 1, num_replicas: int = 1, **options: Any) -> DrivenEngine:
        key = repr((num_devices, num_replicas, options))
        if key not in engines:
            sizes = SIZES | {"tensor_parallel_size": num_devices, "data_parallel_size": num_replicas}
            if num_replicas > 1 or num_devices == 1:
                sizes["multi_step"] = 1
            engines[key] = DrivenEngine(EngineConfig(str(model), **sizes | options))
        engines[key].reset_prefix_cache()
        return engines[key]

    return start


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, DrivenEngine]]:
    """Write the checkpoint of a family with experts; return it with its engine on one device, the oracle of others."""

    @cache
    def mixture(family: str) -> tuple[Path, DrivenEngine]:
        path = tmp_path_factory.mktemp(family)
        write_checkpoint(path, family, **MIXTURE)
        return path, DrivenEngine(EngineConfig(str(path), **SHARD_SIZES))

    return mixture
