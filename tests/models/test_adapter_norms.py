"""Norms of adapted rows (DoRA): those of the weights as they are served, in every way in which these are stored."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.adapters import FloatFactors
from jaxserve.layers.weight_formats import int8, packed, plain
from jaxserve.models.adapter_norms import scaled
from jaxserve.models.params import ParamSpec
from jaxserve.pallas_kernels import packed_linear
from jaxserve.weights import StoredTensor

ROWS, COLUMNS, RANK = (304, 304), 64, 16
SPEC = ParamSpec(("layers", 0, "gate_up"), (sum(ROWS), COLUMNS), ("ffn", "embed"), ("a", "b"), ROWS, gated=True)
IS_NATIVE = [False] + ([True] if packed_linear.unsupported("float32", jax.default_backend()) is None else [])


@pytest.mark.parametrize("is_native", IS_NATIVE)
@pytest.mark.parametrize("form", [plain.FORMAT, int8.FORMAT], ids=["plain", "int8"])
def test_norms_are_those_of_the_stored_weights(form, is_native):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    matrix, a, b = draw(sum(ROWS), COLUMNS), draw(2 * RANK, COLUMNS), [draw(RANK, size) for size in ROWS]
    magnitudes = np.abs(draw(sum(ROWS)))
    magnitudes[ROWS[0] :] = np.nan  # a module without magnitudes
    parts = np.split(matrix, 2)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tensor = StoredTensor(parts, jnp.dtype("float32"), sharding, ThreadPoolExecutor(1))
    stored = packed.pack(form, SPEC, tensor) if is_native else form.convert(SPEC, tensor)
    weight = form.convert(SPEC, tensor)
    dense = np.asarray(weight.dense() if hasattr(weight, "dense") else weight, np.float32)
    factors = FloatFactors(jnp.asarray(a), tuple(map(jnp.asarray, b)), None, jnp.asarray(magnitudes)[None])
    found = np.asarray(jax.jit(lambda w, f: scaled(f, w, None, is_table=False).scale[0])(stored, factors))
    adapted = dense + np.concatenate([own.T @ first for first, own in zip(np.split(a, 2), b, strict=True)])
    expected = np.where(np.isnan(magnitudes), 1, magnitudes / np.linalg.norm(adapted, axis=1))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
