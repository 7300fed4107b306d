"""Vision towers against transformers' image features in float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import weights
from jaxserve.errors import ConfigError
from jaxserve.models.params import matrix_transform
from jaxserve.models.vision import tower
from tests.own_programs import UNOPTIMIZED
from tests.vision_checkpoints import FAMILIES


@partial(jax.jit, static_argnames="arch", compiler_options=UNOPTIMIZED)
def encode(params, arch, inputs):
    return tower.encode(params, arch, inputs)


def load_tower(path, make_transform=matrix_transform):
    """Return the arch and the parameters of the tower at `path` in float32."""
    arch = tower.read_tower(weights.read_config(path))
    specs = tower.tower_specs(arch)
    params = weights.load(path, specs, jnp.float32, transform=make_transform(specs), prefix=tower.PREFIXES)
    return arch, params["vision"]


def random_images(arch, grids, sizes=()):
    """Return images of these grids with random patches; `sizes` has the pixels, and the tiles, of each."""
    rng = np.random.default_rng(0)
    tiles = [tiles for _, tiles in sizes] or [1] * len(grids)
    shapes = [(rows * columns * number, arch.patch_size) for (rows, columns), number in zip(grids, tiles, strict=True)]
    images = [(grid, rng.standard_normal(size).astype(np.float32)) for grid, size in zip(grids, shapes, strict=True)]
    return [(*image, size) for image, (size, _) in zip(images, sizes, strict=True)] if sizes else images


BY_DEFAULT = ("llava", "onevision", "mistral3", "gemma3", "gemma4_clipped", "qwen2_5_vl", "qwen3_vl")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.long) for name in FAMILIES]
)
def test_embeddings_are_those_of_transformers(name, tmp_path):
    family = FAMILIES[name]
    model = family.write(tmp_path)
    arch, params = load_tower(tmp_path)
    images = random_images(arch, family.grids, family.sizes)
    size = 25 * sum(tiles for _, tiles in family.sizes) or None  # together more than the largest bucket
    inputs = tower.pack(arch, images, size)
    embeddings = np.asarray(encode(params, arch, inputs))
    expected = family.embeddings(model, images)
    if family.sizes:
        counts = [arch.tiles.num_embeddings(arch.grid, size) for size, _ in family.sizes]
    else:
        counts = [arch.num_embeddings(grid) for grid in family.grids]
    assert expected.shape == (sum(counts), arch.row_size)
    assert len(embeddings) == arch.max_embeddings(len(inputs.patches)) >= len(expected)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(embeddings[: len(expected)], expected, rtol=0, atol=1e-4)
    assert np.isfinite(embeddings).all()


def test_more_patches_than_the_largest_bucket_are_refused(tmp_path):
    arch = tower.read_tower(FAMILIES["llava"].config_dict())
    with pytest.raises(ConfigError, match=r"at most 100 patches, got 125"):
        tower.pack(arch, random_images(arch, ((5, 5),) * 5))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vision_feature_layer": -5}, r"vision_feature_layer must be from -4 to 3.*got \[-5\]"),
        ({"vision_feature_select_strategy": "last"}, "vision_feature_select_strategy must be one of .*default"),
        ({"projector_hidden_act": "tanh"}, "projector_hidden_act must be"),
        ({"vision_config": {"model_type": "sam"}}, "model_type must be"),
        ({"vision_config": {"hidden_size": 30, "num_attention_heads": 4}}, "num_attention_heads must divide"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "must be full for an encoder without a class token"),
    ],
)
def test_unsupported_settings_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        tower.read_tower(FAMILIES["llava"].config_dict() | fields)
