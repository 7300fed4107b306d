"""Logits of every family over any number of devices, against transformers in float32."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxserve import weights
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.sharding import TENSOR, named_sharding, over_devices, tensor_mesh
from jaxserve.models import decoder, registry
from jaxserve.models.params import matrix_transform, stack_layers
from jaxserve.pallas_kernels import packed_linear
from tests.checkpoints import FAMILIES, reference_logits, write_checkpoint
from tests.models.test_parity import whole_sequence
from tests.parameters import some_by_default

pytestmark = pytest.mark.usefixtures("types_are_checked")
PACKED = packed_linear.unsupported("float32", "cpu") is None
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True},
    "mistral": {"num_key_value_heads": 1},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 4, "vocab_size": 136},
    "gemma2": {"num_key_value_heads": 4},
    "gemma3": {"num_key_value_heads": 2},
    "gpt2": {},
    "gpt_neo": {"tie_word_embeddings": False},
    "mixtral": {"num_key_value_heads": 4},
    "olmoe": {"num_key_value_heads": 2},
    "granite_moe_hybrid": {"mamba_proj_bias": True},
    "qwen3_next": {"linear_num_key_heads": 8, "linear_num_value_heads": 16},
    "qwen3_5": {"linear_num_key_heads": 8, "linear_num_value_heads": 8},
    "qwen3_5_moe": {"linear_num_key_heads": 8, "linear_num_value_heads": 16},
}


def split_logits(path: Path, token_ids: np.ndarray, n: int, *, packed: bool = PACKED, stacked: bool = False) -> Any:
    """Return logits [T, V] of one sequence over n devices."""
    arch, mesh = registry.from_hf_config(weights.read_config(path)).divided(n), tensor_mesh(n)
    assert mesh is not None
    specs = registry.param_specs(arch)
    shardings = {spec.path: named_sharding(mesh, spec.axes) for spec in specs}.__getitem__
    params = weights.load(path, specs, jnp.float32, shardings, matrix_transform(specs, native=packed))
    params = stack_layers(params, arch.period, num_first=arch.num_first_layers) if stacked else params

    def run(params: Any, token_ids: jax.Array) -> jax.Array:
        hidden, _ = decoder.forward(params, arch.local(n), token_ids, whole_sequence(token_ids))
        return decoder.compute_logits(params, arch.local(n), hidden)

    ids = jax.device_put(token_ids, named_sharding(mesh, ()))
    program = over_devices(run, mesh, (params, ids), PartitionSpec(None, TENSOR))
    logits = jax.jit(program, compiler_options={"xla_backend_optimization_level": 0})(params, ids)
    return np.asarray(logits)[:, : arch.vocab_size]


def test_types_are_checked_here() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        rms_norm(jnp.ones((2, 3)), jnp.ones(4), 1e-6)


FAMILIES_OVER = [f"{family} over {n}" for family in FAMILIES for n in (2, 4, 8)]
SOME = ("qwen2 over 4", "gemma3 over 2", "gpt2 over 4")  # check_experts.py has mixtures


@pytest.mark.parametrize("case", some_by_default(FAMILIES_OVER, *SOME))
def test_logits_match_transformers(tmp_path: Path, case: str) -> None:
    """Two and eight devices have packed matrices, four have others."""
    family, n = case.split(" over ")
    sizes = {"num_attention_heads": 8, "head_dim": 8, **SIZES.get(family, {})}
    model = write_checkpoint(tmp_path, family, **sizes)
    token_ids = np.random.default_rng(0).integers(0, 131, 30).astype(np.int32)
    expected = reference_logits(model, token_ids)
    logits = split_logits(tmp_path, token_ids, int(n), packed=PACKED and n != "4")
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))


def test_scanned_layers_are_split_as_well(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "llama")
    token_ids = np.random.default_rng(0).integers(0, 131, 7).astype(np.int32)
    logits = split_logits(tmp_path, token_ids, 2, packed=False, stacked=True)
    np.testing.assert_allclose(logits, reference_logits(model, token_ids), rtol=0, atol=1e-4)
