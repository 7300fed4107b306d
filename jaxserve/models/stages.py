"""Division of a model's layers among pipeline stages: consecutive layers with costs as equal as possible."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from math import inf
from operator import add

from jaxserve.errors import ConfigError
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig


def divide(arch: ArchConfig, num_stages: int, costs: Sequence[float] | None = None) -> list[ArchConfig]:
    """Return a model's stages, with costs as equal as possible.

    The first stage has the embeddings, the last one the final norm and the head.

    Args:
        arch: the whole model's sizes.
        num_stages: number of stages.
        costs: cost of each layer, followed by the head's; by default, multiply-adds per token.

    Raises:
        ConfigError: the layers cannot be divided into so many stages.
    """
    if num_stages == 1:
        return [arch]
    if arch.per_layer_embeddings is not None:
        raise ConfigError(
            f"pipeline_parallel_size must be 1 for {arch.architecture}, whose embeddings enter all layers, got "
            f"{num_stages}; take tensor_parallel_size",
            about=("pipeline_parallel_size",),
        )
    costs = layer_costs(arch) if costs is None else costs
    most = _max_stages(arch)
    if most < num_stages:
        raise ConfigError(
            f"pipeline_parallel_size must be at most {most}, the number of stages with attention into which the "
            f"{arch.num_layers} layers of {arch.architecture} can be divided, got {num_stages}; lower it",
            about=("pipeline_parallel_size",),
        )
    return [arch.part(layers) for layers in _cheapest_division(arch, num_stages, costs)]


def layer_costs(arch: ArchConfig) -> list[float]:
    """Return the multiply-adds per token in each layer's matrices, and half of the head's.

    Decode computes the head for every token, prefill for hardly any; a stage has either time too long.
    """
    costs = [0.0] * arch.num_layers
    for spec in registry.param_specs(arch):
        if spec.is_matrix and spec.path[0] == "layers":
            costs[int(spec.path[1])] += spec.token_rows * spec.shape[1]
    return [*costs, arch.vocab_size * arch.hidden_size / 2]


def _starts(arch: ArchConfig) -> list[int]:
    """Return the layers at which a stage may begin: later layers must not read what earlier ones make.

    They may read earlier layers' keys and values, their choice of tokens, or features of images in the first stage.
    """
    sources = [layer.attention.kv_source if layer.state is None else None for layer in arch.layers]
    first_read = [
        *accumulate((arch.num_layers if each is None or each < 0 else each for each in reversed(sources)), min)
    ][::-1]
    shares = [layer.state is None and layer.attention.shares_choice for layer in arch.layers]
    has_features = [0 < layer < arch.num_deep_layers for layer in range(arch.num_layers)]
    return [
        layer
        for layer, first in enumerate(first_read)
        if first >= layer and not shares[layer] and not has_features[layer]
    ]


def _max_stages(arch: ArchConfig) -> int:
    """Return the maximum number of stages that each have a layer with attention."""
    starts, count, has_attention = {*_starts(arch)}, 0, True
    for index, layer in enumerate(arch.layers):
        if index in starts and has_attention and any(each.state is None for each in arch.layers[index:]):
            count, has_attention = count + 1, False
        has_attention |= layer.state is None
    return count


def _cheapest_division(arch: ArchConfig, num_stages: int, costs: Sequence[float]) -> list[range]:
    """Return the layers of each stage: the most expensive one is as cheap as possible, the others are as even.

    Among equal divisions it takes the one whose first stages are the smallest, as these have the embeddings.
    """
    starts, num_layers = _starts(arch), arch.num_layers
    before = [*accumulate(costs[:-1], initial=0.0)]
    num_attention = [*accumulate((layer.state is None for layer in arch.layers), initial=0)]

    def cost(start: int, stop: int) -> float:
        """Return the cost of a stage; infinity if it has no attention."""
        has_attention = num_attention[stop] > num_attention[start]
        return before[stop] - before[start] + (costs[-1] if stop == num_layers else 0.0) if has_attention else inf

    def divisions(
        stage_cost: Callable[[int, int], float], join: Callable[[float, float], float]
    ) -> tuple[float, tuple[int, ...]]:
        """Return the lowest joint cost of stages, and their first layers, by dynamic programming."""

        @cache
        def best(start: int, count: int) -> tuple[float, tuple[int, ...]]:
            if count == 1:
                return stage_cost(start, num_layers), (start,)
            options = []
            for stop in starts:
                if stop > start:
                    rest, later = best(stop, count - 1)
                    options.append((join(stage_cost(start, stop), rest), (start, *later)))
            return min(options, default=(inf, ()))

        return best(0, num_stages)

    limit, _ = divisions(cost, max)
    _, begins = divisions(lambda *each: cost(*each) ** 2 if cost(*each) <= limit else inf, add)
    return [range(*pair) for pair in zip(begins, (*begins[1:], num_layers), strict=True)]
