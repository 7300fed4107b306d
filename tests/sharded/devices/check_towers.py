"""Vision towers over several devices: the embeddings of one device, whether or not sizes divide."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxserve import weights
from jaxserve.layers.sharding import named_sharding, over_devices, replicated, tensor_mesh
from jaxserve.models.params import matrix_transform
from jaxserve.models.vision import tower
from tests.vision_checkpoints import FAMILIES, random_tensors


@pytest.mark.parametrize(
    ("name", "num_devices", "is_split"),
    [("llava", 2, True), ("qwen2_5_vl", 2, True), ("gemma4_clipped", 2, True), ("mistral3", 4, False)],
)
def test_embeddings_are_those_of_one_device(name: str, num_devices: int, is_split: bool) -> None:
    family = FAMILIES[name]
    arch = tower.read_tower(family.config_dict()).divided(num_devices)
    specs, mesh = tower.tower_specs(arch), tensor_mesh(num_devices)
    assert mesh is not None
    assert arch.is_split == is_split
    rng, tensors = np.random.default_rng(0), random_tensors(specs)
    grids = family.grids[:2]
    shapes = [(rows * columns, arch.patch_size) for rows, columns in grids]
    images = [(grid, rng.standard_normal(shape).astype(np.float32)) for grid, shape in zip(grids, shapes, strict=True)]
    size = None if arch.grid is None else sum(rows * columns for rows, columns in grids)
    inputs = jax.tree.map(jnp.asarray, tower.pack(arch, images, size))
    whole = weights.assemble(tensors, specs, jnp.float32, transform=matrix_transform(specs))["vision"]
    one_device = dataclasses.replace(arch, num_devices=1)
    expected = jax.jit(tower.encode, static_argnums=1)(whole, one_device, inputs)
    shardings = {spec.path: named_sharding(mesh, spec.axes) for spec in specs}.__getitem__
    transform = matrix_transform(specs)
    params = weights.assemble(tensors, specs, jnp.float32, shardings, transform=transform)["vision"]
    args = params, jax.device_put(inputs, replicated(mesh))
    encode = over_devices(lambda p, x: tower.encode(p, arch.local(), x), mesh, args, PartitionSpec())
    np.testing.assert_allclose(jax.jit(encode)(*args), expected, rtol=0, atol=1e-5)
    queries = params["layers"][0]["q_proj" if name == "gemma4_clipped" else "qkv_proj"]
    assert (queries.sharding.shard_shape(queries.shape) == queries.shape) == (not is_split)
