"""Layouts in which files have adapters of routed experts: all give the same arrays on the devices."""

import jax
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.models import registry
from jaxserve.models.adapter_layout import AdapterLayout
from jaxserve.weights.adapter_files import make_adapter
from tests.checkpoints import hf_dict

EXPERTS = "base_model.model.model.layers.1.mlp.experts"
RANK = 3
CONFIG = {"r": RANK, "lora_alpha": 6}
PARAMETERS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.fixture(scope="module")
def arch():
    return registry.from_hf_config(hf_dict("qwen3_moe", num_hidden_layers=2, decoder_sparse_step=1))


def pair(name, a, b):
    return {f"{EXPERTS}.{name}.lora_A.weight": a, f"{EXPERTS}.{name}.lora_B.weight": b}


def layouts(arch):
    """Yield configuration and tensors in each layout, with the outer factors shared by all experts."""
    rng, experts = np.random.default_rng(0), arch.layers[1].experts
    E, F, D = experts.num_experts, experts.ffn_size, arch.hidden_size

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    shared_a, gate_up = draw(RANK, D), draw(E, 2 * F, RANK)
    down_a, shared_b = draw(E, RANK, F), draw(D, RANK)
    gate, up = np.split(gate_up, 2, axis=1)
    every_a, every_b = (np.broadcast_to(each, (E, *each.shape)) for each in (shared_a, shared_b))
    separate = {}
    for index in range(E):
        separate |= pair(f"{index}.gate_proj", shared_a, gate[index]) | pair(f"{index}.up_proj", shared_a, up[index])
        separate |= pair(f"{index}.down_proj", down_a[index], shared_b)
    yield CONFIG, separate
    stacked = {
        f"{EXPERTS}.base_layer.lora_A.weight": every_a.reshape(-1, D),
        f"{EXPERTS}.base_layer.lora_B.weight": np.moveaxis(gate_up, 0, 2).reshape(2 * F, -1),
        f"{EXPERTS}.lora_A.weight": down_a.reshape(-1, F),
        f"{EXPERTS}.lora_B.weight": np.moveaxis(every_b, 0, 2).reshape(D, -1),
    }
    yield CONFIG | PARAMETERS, stacked
    by_expert = {
        f"{EXPERTS}.base_layer.lora_A.weight": every_a,
        f"{EXPERTS}.base_layer.lora_B.weight": np.moveaxis(gate_up, 0, 2),
        f"{EXPERTS}.lora_A.weight": down_a,
        f"{EXPERTS}.lora_B.weight": np.moveaxis(every_b, 0, 2),
    }
    yield CONFIG | PARAMETERS, by_expert
    outer = pair("w1", shared_a[None], gate) | pair("w3", shared_a[None], up) | pair("w2", down_a, shared_b[None])
    yield CONFIG, outer
    yield CONFIG, pair("gate_up_proj", shared_a[None], gate_up) | pair("down_proj", down_a, shared_b[None])


@pytest.mark.parametrize("is_native", [False, True])
def test_all_layouts_have_the_same_arrays(arch, is_native):
    layout = AdapterLayout(1, 16, dtype="float32", is_native=is_native, is_scanned=False, extras=("experts",))
    expected, *others = (
        layout.place(make_adapter(config, tensors, "it"), arch, None) for config, tensors in layouts(arch)
    )
    shapes = jax.tree.map(lambda leaf: leaf.shape, layout.abstract(arch, None))
    assert jax.tree.map(lambda leaf: leaf.shape, expected) == shapes
    assert any(map(np.any, jax.tree.leaves(expected["layers"][1]["experts_down"])))
    for found in others:
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_other_numbers_of_experts_are_refused(arch):
    layout = AdapterLayout(1, 16, dtype="float32", is_native=False, is_scanned=False, extras=("experts",))
    *_, (config, tensors) = layouts(arch)
    half = {name: array[: -(-len(array) // 2)] for name, array in tensors.items()}
    with pytest.raises(ConfigError, match="must be for 6 experts, or 1 if they share one, got"):
        layout.place(make_adapter(config, half, "it"), arch, None)


def test_experts_without_memory_are_refused_by_name(arch):
    layout = AdapterLayout(1, 16, dtype="float32", is_native=False, is_scanned=False)
    for config, tensors in layouts(arch):
        with pytest.raises(ConfigError, match=r"experts.* need lora_extras with 'experts'"):
            layout.place(make_adapter(config, tensors, "it"), arch, None)
