"""A toy delta by row, added between matmul and reduction, against merged weights; its shards are in test_linear.py."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import weights
from jaxserve.layers.linear import LinearContext, WrappedMatrix, row_groups
from jaxserve.layers.token_context import TokenContext
from jaxserve.models import decoder, registry
from tests.checkpoints import write_checkpoint
from tests.models.test_parity import TRANSFORMS, assert_close
from training.dense_model import DenseAttention

ROWS, LENGTH, RANK, NAMES = 3, 5, 2, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
NAMES += ("experts_gate_up", "experts_down", "shared_gate_up", "shared_down")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted(WrappedMatrix):
    a: jax.Array  # [rows, groups, rank, in]
    b: jax.Array  # [rows, groups, out, rank]

    def delta(self, x: jax.Array, row: jax.Array, group: jax.Array | int = 0) -> jax.Array:
        return jnp.einsum("ti,tri,tor->to", x, self.a[row, group], self.b[row, group])

    def multiply(self, x: jax.Array, context: LinearContext) -> jax.Array:
        return super().multiply(x, context) + self.delta(x, context.tokens.row)

    def multiply_groups(self, x: jax.Array, group_sizes: jax.Array, context: LinearContext) -> jax.Array:
        delta = self.delta(x, context.tokens.row, row_groups(group_sizes, len(x)))
        return super().multiply_groups(x, group_sizes, context) + delta

    def merged(self, row: int) -> np.ndarray:
        return np.asarray(self.matrix) + np.einsum("gor,gri->goi", self.b[row], self.a[row]).reshape(self.shape)


def adapted(matrix: Any, num_groups: int, rng: np.random.Generator) -> Adapted:
    out, inner = matrix.shape
    shapes = (ROWS, num_groups, RANK, inner), (ROWS, num_groups, out // num_groups, RANK)
    return Adapted(matrix, *(jnp.asarray(0.2 * rng.normal(size=shape), jnp.float32) for shape in shapes))


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
@pytest.mark.parametrize("make_transform", TRANSFORMS)
def test_each_row_has_the_tokens_of_its_merged_weights(tmp_path, family, make_transform):
    write_checkpoint(tmp_path, family, num_hidden_layers=1)
    arch = registry.from_hf_config(weights.read_config(tmp_path))
    specs, rng = registry.param_specs(arch), np.random.default_rng(0)
    plain, held = (
        weights.load(tmp_path, specs, jnp.float32, transform=t(specs)) for t in (TRANSFORMS[0], make_transform)
    )
    [p], [held_p] = plain["layers"], held["layers"]
    num_experts = arch.layers[0].experts.num_experts if arch.experts else 1
    wrapped = {n: adapted(p[n], num_experts if n.startswith("experts") else 1, rng) for n in NAMES if n in p}
    ids = jnp.asarray(rng.integers(0, arch.vocab_size, ROWS * LENGTH), jnp.int32)

    def logits(p, ids, row):
        tokens = TokenContext(jnp.arange(len(ids)) % LENGTH, DenseAttention(LENGTH), row)
        return decoder.compute_logits(plain, arch, decoder.forward({**plain, "layers": [p]}, arch, ids, tokens)[0])

    served = {name: dataclasses.replace(each, matrix=held_p[name]) for name, each in wrapped.items()}
    found = jax.jit(logits)({**held_p, **served}, ids, jnp.arange(ROWS).repeat(LENGTH))
    for row, (some, its_ids) in enumerate(zip(found.reshape(ROWS, LENGTH, -1), ids.reshape(ROWS, -1), strict=True)):
        merged = {name: jnp.asarray(each.merged(row)) for name, each in wrapped.items()}
        assert_close(np.asarray(some), np.asarray(logits({**p, **merged}, its_ids, None)))
