"""Per-layer embeddings (Gemma 4): each layer reads a token vector in addition to the residual stream."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import embed, linear
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.token_context import TokenContext
from jaxserve.models.arch import ArchConfig
from jaxserve.models.layer_tensors import Rows
from jaxserve.models.params import LAYER_EMBED, LAYER_PROJECTION, Params, ParamSpec


def table_specs(arch: ArchConfig) -> list[ParamSpec]:
    """Return ParamSpecs for the embedding table, and for the projection that is added to its vectors."""
    if (inputs := arch.per_layer_embeddings) is None:
        return []
    rows, size = Rows((), "model."), arch.num_layers * inputs.size
    vocab_sizes = [inputs.vocab_size]
    return [
        rows.matrix(LAYER_EMBED, ("vocab", "embed"), ["embed_tokens_per_layer"], vocab_sizes, size),
        rows.matrix(LAYER_PROJECTION, (None, "embed"), ["per_layer_model_projection"], [size], arch.hidden_size),
        *rows.norm("layer_input_norm", "per_layer_projection_norm", inputs.size),
    ]


def layer_specs(rows: Rows, arch: ArchConfig) -> list[ParamSpec]:
    """Return ParamSpecs for a layer's gate, projection and norm of its per-layer inputs."""
    if (inputs := arch.per_layer_embeddings) is None:
        return []
    D, size = arch.hidden_size, inputs.size
    return [
        rows.matrix("layer_input_gate", (None, "embed"), ["per_layer_input_gate"], [size], D),
        rows.matrix("layer_input_proj", ("embed", None), ["per_layer_projection"], [D], size),
        *rows.norm("layer_input_post_norm", "post_per_layer_input_norm", D),
    ]


def read(
    params: Any, arch: ArchConfig, token_ids: Int[Array, " T"], x: Float[Array, "T D"]
) -> Float[Array, "L T size"] | None:
    """Return each layer's token vectors, computed from the table and the token embeddings x."""
    if (inputs := arch.per_layer_embeddings) is None:
        return None
    shape = (x.shape[0], arch.num_layers, inputs.size)
    rows = embed(token_ids, params[LAYER_EMBED], dtype=x.dtype, axis=arch.vocab_axis)
    rows *= jnp.asarray(math.sqrt(inputs.size), x.dtype)
    projected = linear(x, params[LAYER_PROJECTION]) * jnp.asarray(arch.hidden_size**-0.5, x.dtype)
    projected = rms_norm(projected.reshape(shape), params["layer_input_norm"], arch.norm_eps)
    both = (projected + rows.reshape(shape)) * jnp.asarray(2.0**-0.5, x.dtype)
    return jnp.moveaxis(both, 1, 0)


def add(
    p: Params, x: Float[Array, "T D"], tokens: TokenContext, inputs: Float[Array, "T size"], eps: float
) -> Float[Array, "T D"]:
    """Gate a layer's inputs [T, size] by x, project and norm them, and return x plus the result.

    Args:
        p: the layer's parameters.
        x: residual stream.
        tokens: the step's tokens.
        inputs: per-layer inputs from `read`.
        eps: the norm's epsilon.
    """
    gate = jax.nn.gelu(linear(x, p["layer_input_gate"], tokens), approximate=True)
    return x + rms_norm(linear(gate * inputs, p["layer_input_proj"], tokens), p["layer_input_post_norm"], eps)
