"""Random weights: reproducible, independent of each other, and distributed as documented."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import weights
from jaxserve.weights.rows import leaf_at


@dataclass(frozen=True)
class Row:
    path: tuple
    shape: tuple
    init: str = "normal"
    hf_names: tuple = ()
    hf_rows: tuple = ()
    transposed: bool = False
    stacked: bool = False
    num_matrices: int = 1
    unread: tuple = ()

    @property
    def is_matrix(self):
        return len(self.shape) == 2


ROWS = [
    Row(("embed",), (301, 64)),
    Row(("layers", 0, "w"), (96, 64)),
    Row(("layers", 0, "norm"), (64,), "ones"),
    Row(("layers", 1, "w"), (96, 64)),
    Row(("layers", 1, "norm"), (64,), "zeros"),
]


def test_dummy_shapes_and_constants():
    params = weights.dummy(ROWS, 0, jnp.bfloat16)
    assert jax.tree.map(jnp.shape, params) == {
        "embed": (301, 64),
        "layers": [{"w": (96, 64), "norm": (64,)}, {"w": (96, 64), "norm": (64,)}],
    }
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))
    assert (params["layers"][0]["norm"] == 1).all()
    assert (params["layers"][1]["norm"] == 0).all()


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40])
def test_values_depend_only_on_seed_and_path(seed):
    params = weights.dummy(ROWS, seed, jnp.float32)
    for row in ROWS[:2]:
        alone = weights.dummy([row], seed, jnp.float32)
        np.testing.assert_array_equal(leaf_at(alone, row.path), leaf_at(params, row.path))
    other = weights.dummy(ROWS, seed + 1, jnp.float32)
    assert correlation(params["embed"], other["embed"]) < 0.05
    assert correlation(params["layers"][0]["w"], params["layers"][1]["w"]) < 0.05


def test_dummy_weights_are_nearly_normal():
    x = np.asarray(weights.dummy([Row(("w",), (1001, 512))], 3, jnp.float32)["w"])
    assert abs(x.mean()) < 1e-4
    assert abs(x.std() - 0.02) < 1e-4
    assert abs(np.mean(np.abs(x) < 0.02) - 0.683) < 0.02
    assert correlation(x[1:], x[:-1]) < 0.01
    assert correlation(x[:, 1:], x[:, :-1]) < 0.01
    singular = np.linalg.svd(x[:512], compute_uv=False)
    assert singular[0] < 0.02 * 2 * 512**0.5 * 1.05


def correlation(x, y):
    return abs(np.corrcoef(np.ravel(x), np.ravel(y))[0, 1])
