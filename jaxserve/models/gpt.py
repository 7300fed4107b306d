"""GPT-2 and GPT-Neo: learned positions, layer norms, GELU, biases."""

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.errors import ConfigError
from jaxserve.layers.linear import LinearContext, linear
from jaxserve.layers.norm import layer_norm
from jaxserve.models.arch import ArchConfig, LayerOptions, token_id_set
from jaxserve.models.family import Fold, ModelFamily
from jaxserve.models.hf_config import POSITIVE, SIZE, SWITCH, Kind, one_of, read_dtype, read_fields
from jaxserve.models.params import POSITION_EMBED, Params, ParamSpec

_DEFAULTS = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
_FIELDS = {
    "vocab_size": SIZE,
    "activation_function": one_of(["gelu_new", "gelu_pytorch_tanh"]),  # two names of one function
    "layer_norm_epsilon": POSITIVE,
    "tie_word_embeddings": SWITCH,
}
_GPT2_DEFAULTS = {
    "n_positions": 1024,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}
_FALSE = Kind("false", lambda value: value is False)
_GPT2_SWITCHES = {
    "scale_attn_weights": SWITCH,
    "scale_attn_by_inverse_layer_idx": _FALSE,
    "reorder_and_upcast_attn": SWITCH,  # an order of computation; scores are float32 either way
    "add_cross_attention": _FALSE,
}
_GLOBAL, _LOCAL = "global", "local"
_NEO_DEFAULTS = {"max_position_embeddings": 2048, "window_size": 256, "attention_types": [[[_GLOBAL, _LOCAL], 12]]}


def _is_attention_types(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, list)
        and len(item) == 2
        and isinstance(item[0], list)
        and all(kind in (_GLOBAL, _LOCAL) for kind in item[0])
        and SIZE.holds(item[1])
        for item in value
    )


_NEO_ATTENTION = {
    "window_size": SIZE,
    "attention_types": Kind(f"a list of [kinds, times], kinds {_GLOBAL!r} or {_LOCAL!r}", _is_attention_types),
}


def gpt2_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a GPT-2 config.json."""
    config = {**_GPT2_DEFAULTS, **config}
    values = read_fields(config, _GPT2_SWITCHES)
    names = ("n_embd", "n_layer", "n_head", "n_inner", "n_positions")
    return _arch(config, names, qkv_bias=True, query_scale=None if values["scale_attn_weights"] else 1.0)


def gpt_neo_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a GPT-Neo config.json."""
    config = {**_NEO_DEFAULTS, **config}
    values = read_fields(config, _NEO_ATTENTION)
    kinds = list(chain.from_iterable(kinds * times for kinds, times in values["attention_types"]))
    windows = tuple(values["window_size"] if kind == _LOCAL else None for kind in kinds)
    names = ("hidden_size", "num_layers", "num_heads", "intermediate_size", "max_position_embeddings")
    num_layers = read_fields(config, {"num_layers": SIZE})["num_layers"]
    if len(windows) != num_layers:
        raise ConfigError(f"attention_types must have num_layers = {num_layers} kinds, got {len(windows)}")
    return _arch(config, names, query_scale=1.0, windows=windows)


def _arch(config: Mapping[str, Any], names: tuple[str, ...], **facts: Any) -> ArchConfig:
    """Parse the fields that the families share, five of them by `names`: width, layers, heads, MLP, positions."""
    width, layers, heads, inner, positions = names
    sizes = {width: SIZE, layers: SIZE, heads: SIZE, inner: SIZE.or_null(), positions: SIZE}
    values = read_fields({**_DEFAULTS, **config}, {**_FIELDS, **sizes})
    if values[width] % values[heads]:
        raise ConfigError(f"{width} must be a multiple of {heads}, got {values[width]} and {values[heads]}")
    fields: dict[str, Any] = {
        "architecture": config["architectures"][0],
        "vocab_size": values["vocab_size"],
        "hidden_size": values[width],
        "num_layers": values[layers],
        "num_heads": values[heads],
        "num_kv_heads": values[heads],
        "head_dim": values[width] // values[heads],
        "ffn_size": values[inner] or 4 * values[width],
        "max_position": values[positions],
        "norm_eps": float(values["layer_norm_epsilon"]),
        "ropes": (None,) * values[layers],
        "windows": (None,) * values[layers],
        "tied_embeddings": values["tie_word_embeddings"],
        "o_bias": True,
        "mlp_bias": True,
        "eos_ids": token_id_set(config.get("eos_token_id")),
        "dtype": read_dtype(config),
    }
    return ArchConfig(**{**fields, **facts})


def param_specs(arch: ArchConfig, *, qkv: tuple[str, str, str], out: str, transposed: bool) -> list[ParamSpec]:
    """Return one row per tensor of the model.

    Args:
        arch: sizes of the model.
        qkv: names of the projections to queries, keys and values in a layer of a checkpoint.
        out: name of the projection behind attention.
        transposed: True if checkpoints have the matrices of layers as [in, out].
    """
    D, F, V, P = arch.hidden_size, arch.ffn_size, arch.vocab_size, arch.max_position
    attended = arch.num_heads * arch.head_dim
    specs = [
        ParamSpec(("embed",), (V, D), ("vocab", "embed"), ("transformer.wte.weight",), (V,)),
        ParamSpec((POSITION_EMBED,), (P, D), (None, "embed"), ("transformer.wpe.weight",), (P,)),
        *_norm(("final_norm",), "transformer.ln_f", D),
    ]
    for layer in range(arch.num_layers):
        path, prefix = ("layers", layer), f"transformer.h.{layer}"
        project = partial(_projection, path, prefix, transposed=transposed)
        specs += _norm((*path, "input_norm"), f"{prefix}.ln_1", D)
        specs += project("qkv", ("heads", "embed"), qkv, attended, D, bias=arch.qkv_bias, heads=(arch.num_heads,) * 3)
        specs += project("o", ("embed", "heads"), (out,), D, attended)
        specs += _norm((*path, "mlp_norm"), f"{prefix}.ln_2", D)
        specs += project("up", ("ffn", "embed"), ("mlp.c_fc",), F, D)
        specs += project("down", ("embed", "ffn"), ("mlp.c_proj",), D, F)
    if not arch.tied_embeddings:
        specs.append(ParamSpec(("lm_head",), (V, D), ("vocab", "embed"), ("lm_head.weight",), (V,)))
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
    out_size: int,
    in_size: int,
    *,
    transposed: bool,
    bias: bool = True,
    heads: tuple[int, ...] = (),
) -> list[ParamSpec]:
    """Return the rows of a matrix and its bias; `out_size` is that of each of `hf_names`."""
    total, sizes = out_size * len(hf_names), (out_size,) * len(hf_names)
    weights, biases = (tuple(f"{prefix}.{n}.{kind}" for n in hf_names) for kind in ("weight", "bias"))
    matrix = ParamSpec(
        (*path, f"{name}_proj"), (total, in_size), axes, weights, sizes, heads=heads, transposed=transposed
    )
    vector = ParamSpec((*path, f"{name}_bias"), (total,), axes[:1], biases, sizes, "zeros", heads=heads)
    return [matrix, vector] if bias else [matrix]


def block(
    p: Params,
    x: Float[Array, "T D"],
    rope: None,
    carry: Any,
    layer: Any,
    *,
    arch: ArchConfig,
    options: LayerOptions,
    attend: Any,
) -> tuple[Float[Array, "T D"], Any]:
    """Apply one decoder layer: x + attention, then + MLP, each behind a layer norm. See `llama.block`."""
    T, Q, H = x.shape[0], arch.num_heads, arch.head_dim
    summed = LinearContext(axis=arch.tensor_axis)
    with jax.named_scope("attention"):
        qkv = linear(layer_norm(x, p["input_norm"], arch.norm_eps), p["qkv_proj"], bias=p.get("qkv_bias"))
        q, k, v = jnp.split(qkv.reshape(T, 3 * Q, H), 3, axis=1)
        out, carry = attend(q, k, v, rope, carry, layer, options)
        x = linear(out.reshape(T, -1), p["o_proj"], summed, bias=p["o_bias"], residual=x)
    with jax.named_scope("mlp"):
        inner = linear(layer_norm(x, p["mlp_norm"], arch.norm_eps), p["up_proj"], bias=p["up_bias"])
        inner = jax.nn.gelu(inner, approximate=True)
        x = linear(inner, p["down_proj"], summed, bias=p["down_bias"], residual=x)
    return x, carry


FOLDS = (Fold("input_norm", "qkv_proj"), Fold("qkv_proj", "o_proj", part=2), Fold("mlp_norm", "up_proj"))
GPT2 = ModelFamily(
    gpt2_arch,
    partial(param_specs, qkv=("attn.c_attn",) * 3, out="attn.c_proj", transposed=True),
    block,
    layer_norm,
    FOLDS,
)
_NEO_QKV = ("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj")
GPT_NEO = ModelFamily(
    gpt_neo_arch,
    partial(param_specs, qkv=_NEO_QKV, out="attn.attention.out_proj", transposed=False),
    block,
    layer_norm,
    FOLDS,
)
