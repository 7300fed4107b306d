"""Vectors of a model over several devices: those of one device."""

from pathlib import Path

import numpy as np
import pytest

from jaxserve import LLM
from tests.e2e.workloads import tokens
from tests.sharded.devices.sizes import SIZES

PROMPTS = [tokens(n, n) for n in (50, 3, 33)]


@pytest.mark.parametrize(
    "options",
    [
        {"convert": "embed", "pooler_config": {"pooling_type": "MEAN", "normalize": False}},
        pytest.param({"convert": "embed", "pooler_config": {"normalize": False}}, marks=pytest.mark.full),
    ],
    ids=["mean", "last"],
)
def test_vectors_are_those_of_one_device(model: Path, options: dict[str, object]) -> None:
    vectors = []
    for num_devices in (1, 2):
        llm = LLM(str(model), tensor_parallel_size=num_devices, **SIZES, **options)
        vectors.append([output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)])
        llm.close()
    for one, two in zip(*vectors, strict=True):
        np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)
