"""Tensors of models whose layers have a state in place of attention."""

from collections.abc import Callable

from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import ParamSpec

_OF_ATTENTION = ("qkv_proj", "qkv_bias", "o_proj", "o_bias", "q_norm", "k_norm")


def replace_attention(
    specs: list[ParamSpec], arch: ArchConfig, own: Callable[[ArchConfig, int], list[ParamSpec]]
) -> list[ParamSpec]:
    """Return `specs` with the rows of `own` in place of those of attention in layers with a state."""
    kept = [spec for spec in specs if spec.path[-1] not in _OF_ATTENTION or spec.path[1] not in arch.state_layers]
    return kept + [spec for layer in range(arch.num_layers) if layer in arch.state_layers for spec in own(arch, layer)]
