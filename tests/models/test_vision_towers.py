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


def random_images(arch, grids):
    """Return images of these grids with random patches."""
    rng = np.random.default_rng(0)
    sizes = [(rows * columns, arch.patch_size) for rows, columns in grids]
    return [(grid, rng.standard_normal(size).astype(np.float32)) for grid, size in zip(grids, sizes, strict=True)]


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_are_those_of_transformers(name, tmp_path):
    family = FAMILIES[name]
    model = family.write(tmp_path)
    arch, params = load_tower(tmp_path)
    images = random_images(arch, family.grids)
    inputs = tower.pack(arch, images)
    embeddings = np.asarray(encode(params, arch, inputs))
    expected = family.embeddings(model, images)
    assert len(expected) == sum(arch.num_embeddings(grid) for grid in family.grids)
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
