"""Check of the sizes in config.json against the stored tensors, before anything is allocated."""

import re
from collections.abc import Mapping
from typing import Any

from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.rows import TEXT_PART
from jaxserve.weights.stored_tensor import Tensor

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_DIMENSIONS = (  # none exceeds the largest dimension of all tensors
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("shared_intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "global_head_dim"),
    *("num_global_key_value_heads", "n_embd", "n_head", "n_inner", "num_heads", "kv_lora_rank", "q_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "mamba_n_heads", "mamba_d_state", "mamba_n_groups"),
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
)
_MAX_PACKED = 16  # elements per word in a quantised matrix
_LAYER_NAME = re.compile(r"(?:(?:model|transformer|gpt_neox)\.)?(?:layers|h)\.(\d+)\.")
_ROUTER_NAME = re.compile(r"\.(?:router|gate)\.")


def check_sizes(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: object) -> None:
    """Raise a CheckpointError if config.json has sizes too large for the stored tensors.

    The number of layers is limited by the layer indices in tensor names, the number of experts by the routers' largest
    dimension, and each other dimension by 16 times the largest in any tensor, because a word may hold 16 elements.
    Products of dimensions are not limited. Exact shapes are checked later, against the model.

    Args:
        config: content of config.json.
        tensors: every stored tensor by its name in the file.
        where: path of the checkpoint.
    """
    text = config.get("text_config")
    sizes = text if isinstance(text, Mapping) else config
    names = [name.replace(TEXT_PART, "", 1) for name in tensors]
    layers = [int(match[1]) for name in names if (match := _LAYER_NAME.match(name))]
    if layers:
        _check(sizes, _LAYERS, max(layers) + 1, f"layers in {where}")
    routers = [max(tensors[name].shape, default=0) for name in tensors if _ROUTER_NAME.search(name)]
    if routers:
        _check(sizes, _EXPERTS, max(routers), f"rows of a router in {where}")
    longest = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    if longest:
        _check(sizes, _DIMENSIONS, _MAX_PACKED * longest, f"elements of a dimension of the tensors in {where}")


def _check(config: Mapping[str, Any], names: tuple[str, ...], limit: int, counted: str) -> None:
    """Raise a CheckpointError if a size in config.json exceeds `limit`.

    Args:
        config: content of config.json.
        names: fields with such sizes.
        limit: maximum that the stored tensors allow.
        counted: meaning of `limit`, for the message.
    """
    for name in names:
        if isinstance(value := config.get(name), int) and value > limit:
            raise CheckpointError(
                f"config.json: {name} must be at most {limit}, the number of {counted}, got {value}; take "
                f"the config.json that belongs to these weights"
            )
