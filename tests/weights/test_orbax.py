"""Orbax: the same tree back, in the form asked for, or an error that names what differs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from weights import CheckpointError, orbax_store

PARAMS = {
    "embed": jnp.arange(12, dtype=jnp.float32).reshape(4, 3),
    "layers": [{"w": jnp.ones((2, 3), jnp.bfloat16)}, {"w": jnp.full((2, 3), 2, jnp.bfloat16)}],
}


def abstract(tree=PARAMS, dtype=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype), tree)


@pytest.fixture
def path(tmp_path):
    orbax_store.save(tmp_path / "params", PARAMS, {"seed": 3, "config": {"vocab_size": 4}})
    return tmp_path / "params"


def assert_equal(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, tree, expected)
    assert jax.tree.map(lambda x: x.dtype, tree) == jax.tree.map(lambda x: x.dtype, expected)


def test_round_trip(path):
    assert_equal(orbax_store.restore(path, abstract()), PARAMS)
    assert orbax_store.read_metadata(path) == {"seed": 3, "config": {"vocab_size": 4}}


def test_restores_into_dtype_and_sharding(path):
    sharding = SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=sharding), abstract())
    restored = orbax_store.restore(path, wanted)
    assert_equal(restored, jax.tree.map(lambda x: x.astype(jnp.float32), PARAMS))
    assert all(x.sharding == sharding for x in jax.tree.leaves(restored))


def test_save_replaces(path):
    new = {"a": jnp.ones(3)}
    orbax_store.save(path, new)
    assert_equal(orbax_store.restore(path, abstract(new)), new)
    assert orbax_store.read_metadata(path) == {}


def test_differences_are_named(path):
    wanted = {"embed": jax.ShapeDtypeStruct((5, 3), jnp.float32), "final_norm": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with pytest.raises(CheckpointError) as error:
        orbax_store.restore(path, wanted)
    for text in ("1 missing: final_norm", "2 unexpected: layers/0/w, layers/1/w", "embed (4, 3) instead of (5, 3)"):
        assert text in str(error.value)


@pytest.mark.parametrize("made", [False, True])
def test_no_checkpoint(tmp_path, made):
    path = tmp_path / "none"
    if made:
        path.mkdir()
        (path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="must be an Orbax checkpoint"):
        orbax_store.restore(path, abstract())
    with pytest.raises(CheckpointError, match="must be an Orbax checkpoint"):
        orbax_store.read_metadata(path)
