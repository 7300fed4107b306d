"""Layers with layer norms, biases and an MLP without a gate, one after the other or in parallel: rows and block."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from jaxserve.layers.linear import linear
from jaxserve.layers.mlp import ACTIVATIONS
from jaxserve.layers.norm import layer_norm
from jaxserve.layers.token_context import LayerContext, TokenContext
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import Fold
from jaxserve.models.params import POSITION_EMBED, Params, ParamSpec


class Names(NamedTuple):
    """Names of tensors in checkpoints, those of a layer without its prefix; None for what a family lacks.

    Attributes:
        embed: embedding.
        positions: table of learned positions.
        final_norm: norm behind the layers.
        head: output projection.
        layers: prefix of the layers.
        input_norm: norm before attention.
        qkv: projections to queries, keys and values; one name if each head has its three next to each other.
        out: projection behind attention.
        mlp_norm: norm before the MLP.
        up: first projection of the MLP.
        down: second projection of the MLP.
    """

    embed: str
    positions: str | None
    final_norm: str
    head: str
    layers: str
    input_norm: str
    qkv: tuple[str, ...]
    out: str
    mlp_norm: str | None
    up: str
    down: str


def param_specs(
    arch: ArchConfig, names: Names, *, transposed: bool = False, head_bias: bool = False
) -> list[ParamSpec]:
    """Return one row per tensor of the model.

    Args:
        arch: sizes of the model.
        names: names in checkpoints.
        transposed: True if checkpoints have the matrices of layers as [in, out].
        head_bias: True if the output projection has a bias.
    """
    D, F, V, P = arch.hidden_size, arch.ffn_size, arch.vocab_size, arch.max_position
    heads: tuple[int, ...] = (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)
    rows = [n * arch.head_dim for n in heads]
    if len(names.qkv) == 1:
        rows, heads = [sum(rows)], heads[:1]
    head = (f"{names.head}.weight", f"{names.head}.bias")
    specs = [
        ParamSpec(("embed",), (V, D), ("vocab", "embed"), (f"{names.embed}.weight",), (V,)),
        *_norm(("final_norm",), names.final_norm, D),
    ]
    if names.positions is not None:
        specs.append(ParamSpec((POSITION_EMBED,), (P, D), (None, "embed"), (f"{names.positions}.weight",), (P,)))
    for layer in range(arch.num_layers):
        path, prefix = ("layers", layer), f"{names.layers}.{layer}"
        project = partial(_projection, path, prefix, transposed=transposed)
        specs += _norm((*path, "input_norm"), f"{prefix}.{names.input_norm}", D)
        specs += project("qkv", ("heads", "embed"), names.qkv, rows, D, bias=arch.qkv_bias, heads=heads)
        specs += project("o", ("embed", "heads"), (names.out,), [D], arch.num_heads * arch.head_dim, bias=arch.o_bias)
        if names.mlp_norm is not None:
            specs += _norm((*path, "mlp_norm"), f"{prefix}.{names.mlp_norm}", D)
        specs += project("up", ("ffn", "embed"), (names.up,), [F], D, bias=arch.mlp_bias)
        specs += project("down", ("embed", "ffn"), (names.down,), [D], F, bias=arch.mlp_bias)
    if not arch.tied_embeddings:
        specs.append(ParamSpec(("lm_head",), (V, D), ("vocab", "embed"), head[:1], (V,)))
    if head_bias and arch.pooler is None:
        specs.append(ParamSpec(("lm_head_bias",), (V,), ("vocab",), head[1:], (V,), "zeros"))
    return specs


def _norm(path: tuple[str | int, ...], hf_name: str, size: int) -> list[ParamSpec]:
    inits = {"weight": "ones", "bias": "zeros"}
    return [ParamSpec((*path, n), (size,), (None,), (f"{hf_name}.{n}",), (size,), init) for n, init in inits.items()]


def _projection(
    path: tuple[str | int, ...],
    prefix: str,
    name: str,
    axes: tuple[str, str],
    hf_names: tuple[str, ...],
    rows: list[int],
    in_size: int,
    *,
    transposed: bool,
    bias: bool,
    heads: tuple[int, ...] = (),
) -> list[ParamSpec]:
    """Return the rows of a matrix and its bias; `rows` are those of each of `hf_names`."""
    total, sizes = sum(rows), tuple(rows)
    weights, biases = (tuple(f"{prefix}.{n}.{kind}" for n in hf_names) for kind in ("weight", "bias"))
    matrix = ParamSpec(
        (*path, f"{name}_proj"), (total, in_size), axes, weights, sizes, heads=heads, transposed=transposed
    )
    vector = ParamSpec((*path, f"{name}_bias"), (total,), axes[:1], biases, sizes, "zeros", heads=heads)
    return [matrix, vector] if bias else [matrix]


def block(
    p: Params,
    x: Float[Array, "T D"],
    tokens: TokenContext,
    layer: LayerContext,
    *,
    arch: ArchConfig,
    project: Callable[..., Any] = llama.project_qkv,
) -> tuple[Float[Array, "T D"], TokenContext]:
    """Apply one decoder layer: x + attention, then + MLP, each behind a layer norm. See `llama.block`.

    With `arch.parallel` the MLP reads x as attention does, behind the same norm where it has none of its own.
    """
    with jax.named_scope("attention"):
        normed = layer_norm(x, p["input_norm"], arch.norm_eps)
        q, k, v = project(p, normed, tokens, arch, None)
        out, tokens = tokens.attend(q, k, v, layer)
        attended = llama.project_out(p, out, tokens, arch, x)
    with jax.named_scope("mlp"):
        if "mlp_norm" in p:
            normed = layer_norm(x if arch.parallel else attended, p["mlp_norm"], arch.norm_eps)
        activation, bias = ACTIVATIONS[arch.activation], p.get("down_bias")
        inner = linear(normed, p["up_proj"], tokens, bias=p.get("up_bias"), activation=activation)
        return linear(inner, p["down_proj"], tokens, bias=bias, residual=attended, axis=arch.tensor_axis), tokens


FOLDS = (Fold("input_norm", "qkv_proj"), Fold("qkv_proj", "o_proj", part=2), Fold("mlp_norm", "up_proj"))
