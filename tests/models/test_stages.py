"""Division of layers among pipeline stages: as even as any division is, and every tensor in its place."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import ConfigError
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.stages import divide, layer_costs
from jaxserve.tools.planner.models import read_model

MODELS = ("llama-3.2-1b", "gpt2", "gemma-3-27b", "deepseek-v2-lite", "qwen3-next-80b-a3b")


def llama(num_layers: int) -> ArchConfig:
    _, arch = read_model("llama-3.2-1b")
    return replace(arch, layers=arch.layers[:1] * num_layers)


@given(costs=st.lists(st.integers(1, 20), min_size=4, max_size=9), num_stages=st.integers(2, 4))
def test_no_division_has_a_cheaper_most_expensive_stage(costs: list[int], num_stages: int) -> None:
    num_layers = len(costs) - 1
    if num_stages > num_layers:
        return
    arch = llama(num_layers)
    stages = divide(arch, num_stages, [*map(float, costs)])

    def most(starts: tuple[int, ...]) -> int:
        parts = [sum(costs[start:stop]) for start, stop in pairwise((*starts, num_layers))]
        return max(*parts[:-1], parts[-1] + costs[-1])

    found = most(tuple(stage.stage.first_layer for stage in stages))
    assert found == min(most((0, *rest)) for rest in combinations(range(1, num_layers), num_stages - 1))
    assert sum(stage.num_layers for stage in stages) == num_layers


@pytest.mark.parametrize("name", MODELS)
def test_stages_together_have_the_tensors_of_the_model(name: str) -> None:
    _, arch = read_model(name)
    stages = divide(arch, 3)
    whole = {name: spec.shape for spec in registry.param_specs(arch) for name in spec.hf_names}
    first, middle, last = (
        {name: spec.shape for spec in registry.param_specs(stage) for name in spec.hf_names} for stage in stages
    )
    assert first | middle | last == whole
    shared = (first.keys() & middle.keys()) | (first.keys() & last.keys()) | (middle.keys() & last.keys())
    tables = {name for spec in registry.param_specs(arch) if spec.path[0] != "layers" for name in spec.hf_names}
    assert shared <= tables, "the final norm, which has the model's dtype, and tied embeddings"
    groups = [layer.group for stage in stages for layer in stage.kv_layout.layers]
    assert groups == [layer.group for layer in arch.kv_layout.layers]
    for stage in stages:
        assert len(stage.kv_layout.forms) == len(arch.kv_layout.forms)
        taken = [(each.group, each.position) for each in stage.kv_layout.layers]
        assert len({*taken}) == len(taken)


def test_the_head_counts() -> None:
    """Llama's head is worth several layers: the first stage has more of them. Prompts hardly compute it."""
    _, arch = read_model("llama-3.2-1b")
    first, last = divide(arch, 2)
    assert first.num_layers > last.num_layers
    assert 2 * layer_costs(arch)[-1] == arch.vocab_size * arch.hidden_size


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be at most 3, the number of stages with attention.*got 4"):
        divide(llama(3), 4)
