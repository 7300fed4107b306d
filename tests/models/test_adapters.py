"""A toy delta by row, added between matmul and reduction, against merged weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jaxserve import weights
from jaxserve.layers.linear import LinearContext, Matrix, as_matrix, linear, row_groups
from jaxserve.layers.token_context import TokenContext
from jaxserve.models import decoder, registry
from tests.checkpoints import write_checkpoint
from tests.models.test_parity import TRANSFORMS, assert_close
from training.dense_model import DenseAttention

ROWS, LENGTH, RANK, NAMES = 3, 5, 2, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
NAMES += ("experts_gate_up", "experts_down", "shared_gate_up", "shared_down")


@struct.dataclass
class Adapted(Matrix):
    matrix: Any
    a: jax.Array  # [rows, groups, rank, in]
    b: jax.Array  # [rows, groups, out, rank]
    shape = property(lambda self: self.matrix.shape)

    def delta(self, x: jax.Array, row: jax.Array, group: jax.Array | int = 0) -> jax.Array:
        return jnp.einsum("ti,tri,tor->to", x, self.a[row, group], self.b[row, group])

    def multiply(self, x: jax.Array, context: LinearContext) -> jax.Array:
        return as_matrix(self.matrix).multiply(x, context) + self.delta(x, context.tokens.row)

    def multiply_groups(self, x: jax.Array, group_sizes: jax.Array, context: LinearContext) -> jax.Array:
        group = row_groups(group_sizes, len(x))
        return as_matrix(self.matrix).multiply_groups(x, group_sizes, context) + self.delta(
            x, context.tokens.row, group
        )

    def rows(self, ids: jax.Array) -> jax.Array:
        return as_matrix(self.matrix).rows(ids)

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

    served = {name: each.replace(matrix=held_p[name]) for name, each in wrapped.items()}
    found = jax.jit(logits)({**held_p, **served}, ids, jnp.arange(ROWS).repeat(LENGTH))
    for row, (some, its_ids) in enumerate(zip(found.reshape(ROWS, LENGTH, -1), ids.reshape(ROWS, -1), strict=True)):
        merged = {name: jnp.asarray(each.merged(row)) for name, each in wrapped.items()}
        assert_close(np.asarray(some), np.asarray(logits({**p, **merged}, its_ids, None)))


def test_shards_add_parts_of_the_delta():
    """Two devices: one has a part of the rows of W and B, the other way a part of the columns of W and A."""
    rng, row = np.random.default_rng(0), jnp.arange(4) % ROWS
    x, bias, matrix = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((4, 6), 8, (8, 6)))
    whole = adapted(matrix, 1, rng)
    wanted = np.stack([x @ whole.merged(r).T + bias[None] for r in range(ROWS)])[row, np.arange(4)]
    tokens = TokenContext(jnp.arange(4), DenseAttention(4), row)

    def halves(array, axis):
        return jnp.stack(jnp.split(array, 2, axis))

    def by_rows(matrix, b, bias):
        return linear(x, Adapted(matrix, whole.a, b), tokens, bias=bias)

    found = jax.vmap(by_rows, out_axes=1)(halves(whole.matrix, 0), halves(whole.b, 2), halves(bias, 0))
    np.testing.assert_allclose(found.reshape(4, -1), wanted, rtol=1e-5, atol=1e-5)

    def by_columns(matrix, a, x):
        return linear(x, Adapted(matrix, a, whole.b), tokens, bias=bias, axis="tensor")

    for each in jax.vmap(by_columns, axis_name="tensor")(halves(whole.matrix, 1), halves(whole.a, 3), halves(x, 1)):
        np.testing.assert_allclose(each, wanted, rtol=1e-5, atol=1e-5)
