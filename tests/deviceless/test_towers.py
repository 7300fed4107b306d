"""Vision towers of published sizes, compiled for chips: temporaries are small, and layers on TPUs are a loop."""

import jax
import jax.numpy as jnp
import pytest

from jaxserve.models.vision import tower
from jaxserve.tools.planner.program import temp_bytes
from jaxserve.weights.rows import build_tree
from tests.vision_checkpoints import PUBLISHED, published

pytestmark = pytest.mark.deviceless


def abstract(arch, num_patches, is_scanned):
    """Return the shapes of a program's parameters and inputs."""
    shapes = {spec.path: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16) for spec in tower.tower_specs(arch)}
    params = build_tree(tower.tower_specs(arch), lambda spec: shapes[spec.path])["vision"]
    if is_scanned:
        params = jax.eval_shape(lambda params: tower.stacked(params, arch), params)
    inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tower.pack(arch, [], num_patches))
    return params, inputs


@pytest.mark.parametrize("target", ["h200", "v6e:1x1"])
@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("qwen2.5-vl-7b", 3),
        *(
            pytest.param(name, index, marks=pytest.mark.full)
            for name in PUBLISHED
            for index in range(len(published(name).buckets))
            if (name, index) != ("qwen2.5-vl-7b", 3)
        ),
    ],
)
def test_temporaries_are_small(targets, name, index, target):
    """No array has a score for each pair of patches: these would be 8 GB in one of these towers."""
    target, arch = targets(target), published(name)
    chip, num_patches = target.sheet.chip, arch.buckets[index]
    params, inputs = abstract(arch, num_patches, is_scanned=chip.platform == "tpu")
    lowered = chip.lower(lambda params, inputs: tower.encode(params, arch, inputs), (params, inputs), (), None)
    (program,) = chip.compile_all([lowered])
    activations = num_patches * max(4 * arch.hidden_size, arch.ffn_size * 2, arch.patch_size) * 4
    assert temp_bytes(program) <= 8 * activations + 2**26
