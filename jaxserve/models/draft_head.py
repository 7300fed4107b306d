"""Decoder layer in draft heads.

Most heads are published as Llama layers, whatever the target's family. Models with MLA have MTP layers instead:
layers like the target's, stored after them in its checkpoint.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.layers.linear import linear
from jaxserve.layers.norm import Norm
from jaxserve.layers.rope import rotation
from jaxserve.layers.token_context import LayerContext, TokenContext
from jaxserve.models import llama, registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.block import mlp, project_qkv
from jaxserve.models.hf_config import TABLE, read_fields
from jaxserve.models.layer_tensors import LLAMA, decoder_specs
from jaxserve.models.params import Params, ParamSpec


def own_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a draft head's config.json, in which the speculators library nests sizes, with these merged in.

    Raises:
        ConfigError: `transformer_layer_config` is not an object.
    """
    nested = read_fields(config, {"transformer_layer_config": TABLE.or_null()})["transformer_layer_config"]
    return {**config, **(nested or {})}


def read_arch(config: Mapping[str, Any], tensors: Collection[str], vocab_size: int) -> ArchConfig:
    """Convert a draft head's config.json to a Llama model with one layer.

    Args:
        config: content of config.json.
        tensors: tensor names in the layer, which show the biases and norms that it has.
        vocab_size: the target's vocabulary size.

    Raises:
        ConfigError: a field is missing, malformed or not supported.
    """
    own = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": vocab_size}
    return llama.arch(
        {**own_sizes(config), **own, "tie_word_embeddings": True},
        qkv_bias="self_attn.q_proj.bias" in tensors,
        o_bias="self_attn.o_proj.bias" in tensors,
        mlp_bias="mlp.up_proj.bias" in tensors,
        qk_norm="shared" if "self_attn.q_norm.weight" in tensors else None,
    )


def param_specs(arch: ArchConfig, *, wide: bool) -> list[ParamSpec]:
    """Return one ParamSpec per tensor in a head's layer; every device holds all tensors.

    Args:
        arch: the layer's sizes.
        wide: True if queries, keys and values are projected from two concatenated vectors, each with its own norm.
    """
    specs = [spec for spec in decoder_specs(arch, LLAMA) if spec.path[0] == "layers"]
    specs = [dataclasses.replace(spec, axes=(None,) * len(spec.axes)) for spec in specs]
    if not wide:
        return specs
    return [
        dataclasses.replace(spec, shape=(spec.shape[0], 2 * arch.hidden_size)) if spec.path[-1] == "qkv_proj" else spec
        for spec in specs
        if spec.path[-1] != "input_norm"
    ]


def following_arch(target: ArchConfig) -> ArchConfig:
    """Return the target's architecture with only its last layer, with an indexer if it shares one, for an MTP layer."""
    return dataclasses.replace(target, layers=(target.layers[-1].attending(shares_choice=False),))


def following_specs(arch: ArchConfig, prefix: str) -> list[ParamSpec]:
    """Return one ParamSpec per tensor in an MTP layer, which is sharded like the target's layers.

    Args:
        arch: sizes as a one-layer model.
        prefix: prefix in the target's checkpoint.
    """
    D = arch.hidden_size

    def renamed(spec: ParamSpec) -> ParamSpec:
        """Return a layer's ParamSpec with the MTP layer's checkpoint names."""
        names = tuple(prefix + name.removeprefix("model.layers.0.") for name in spec.hf_names)
        return dataclasses.replace(spec, hf_names=names)

    def norm(name: str, hf_name: str) -> ParamSpec:
        """Return the ParamSpec for an RMS norm over D elements."""
        return ParamSpec((name,), (D,), (None,), (f"{prefix}{hf_name}.weight",), (D,), "ones")

    copies = (f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight")  # copies: the target's own are used
    return [
        *(renamed(spec) for spec in registry.param_specs(arch) if spec.path[0] == "layers"),
        norm("embedding_norm", "enorm"),
        norm("feature_norm", "hnorm"),
        norm("final_norm", "shared_head.norm"),
        ParamSpec(("proj",), (D, 2 * D), (None, None), (f"{prefix}eh_proj.weight",), (D,), unread=copies),
    ]


def block(
    p: Params,
    x: Float[Array, "T inner"],
    tokens: TokenContext,
    *,
    arch: ArchConfig,
    residual: Float[Array, "T D"] | None = None,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Apply a draft head's decoder layer to T tokens; return the hidden states and the updated tokens.

    Args:
        p: the layer's parameters.
        x: layer inputs; if `residual` is given, normed inputs for attention only.
        tokens: the tokens' context.
        arch: the layer's sizes.
        residual: residual stream before attention; None if it is `x`.
    """
    family = registry.family(arch)
    layer = LayerContext(
        arch.layer_options(0),
        family.norm,
        jnp.int32(0),
        rotation(tokens.position, arch.ropes[0], arch.attention.head_dim),
    )
    if residual is None:
        return family.block(p, x, tokens, layer, arch=arch)
    q, k, v = project_qkv(p, x, tokens, layer, arch, None)
    out, tokens = tokens.attend(q, k, v, layer)
    y = linear(out.reshape(out.shape[0], -1), p["o_proj"], tokens, bias=p.get("o_bias"), residual=residual)
    return mlp(p, y, tokens, layer, arch, Norm(p["mlp_norm"], arch.norm_eps, family.norm), y)
