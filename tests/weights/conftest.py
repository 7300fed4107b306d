from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve import weights
from tests.weights.llama_files import CONFIG, SPECS


@pytest.fixture
def params() -> dict[str, Any]:
    return weights.dummy(SPECS, 0, jnp.float32)


@pytest.fixture
def checkpoint(tmp_path: Path, params: dict[str, Any]) -> Path:
    weights.save(tmp_path / "model", SPECS, params, CONFIG)
    return tmp_path / "model"
