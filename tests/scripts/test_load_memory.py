"""Memory that loading a checkpoint takes beside the weights, of a whole process."""

import itertools
from math import prod
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxserve import weights
from jaxserve.models.registry import from_hf_config, param_specs
from load_memory import load_apart

CONFIG = {  # 108M parameters
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 24_000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 9,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the resident set from /proc")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    specs, path = param_specs(from_hf_config(CONFIG)), tmp_path_factory.mktemp("model")
    weights.save(path, specs, weights.dummy(specs, 0, jnp.bfloat16), CONFIG)
    return path


@pytest.fixture(scope="module")
def orbax(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("orbax")
    weights.convert(checkpoint, path, param_specs(from_hf_config(CONFIG)))
    return path


QUICK = [("checkpoint", "int8", 4)]


@pytest.mark.parametrize(
    ("form", "quantization", "num_devices"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.full)
        for case in itertools.product(["checkpoint", "orbax"], ["none", "int8"], [1, 4])
    ],
)
@pytest.mark.long
def test_peak_is_at_most_1_3_of_the_weights(
    request: pytest.FixtureRequest, form: str, quantization: str, num_devices: int
) -> None:
    """Weights on four devices share one memory: it holds all their parts, and no whole tensor beside them."""
    bytes_per_weight = {"none": 2, "int8": 1 + 4 / 64}[quantization]  # a CPU keeps the bfloat16 of the checkpoint
    directory = request.getfixturevalue(form)
    figures = load_apart(directory, quantization, num_devices)
    num_weights = sum(prod(spec.shape) for spec in param_specs(from_hf_config(CONFIG)))
    assert figures["weights_mb"] == pytest.approx(num_weights * bytes_per_weight / 1e6, rel=0.01)
    assert 1 < figures["peak_ratio"] < 1.3, figures
