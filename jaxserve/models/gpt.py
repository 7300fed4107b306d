"""GPT-2 and GPT-Neo: learned positions, layer norms, GELU, biases."""

import dataclasses
from itertools import chain
from typing import Any

from jaxserve.api.schema import FieldType
from jaxserve.errors import ConfigError
from jaxserve.layers.mlp import ACTIVATIONS
from jaxserve.layers.norm import layer_norm
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import UNGATED_FOLDS, ModelFamily
from jaxserve.models.hf_config import POSITIVE, SIZE, SWITCH, HfConfig, one_of, read_field, read_fields
from jaxserve.models.layer_tensors import TensorNames

_DEFAULTS = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
_FIELDS = {
    "vocab_size": SIZE,
    "activation_function": one_of(ACTIVATIONS),
    "layer_norm_epsilon": POSITIVE,
    "tie_word_embeddings": SWITCH,
}
_GPT2_DEFAULTS = {
    **_DEFAULTS,
    "n_positions": 1024,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}
_FALSE = FieldType("false", lambda value: value is False)
_GPT2_SWITCHES = {
    "scale_attn_weights": SWITCH,
    "scale_attn_by_inverse_layer_idx": _FALSE,
    "reorder_and_upcast_attn": SWITCH,  # only changes the order; scores are float32 either way
    "add_cross_attention": _FALSE,
}
_GLOBAL, _LOCAL = "global", "local"
_NEO_DEFAULTS = {
    **_DEFAULTS,
    "max_position_embeddings": 2048,
    "window_size": 256,
    "attention_types": [[[_GLOBAL, _LOCAL], 12]],
    "attention_layers": None,
}


def _is_kinds(value: object) -> bool:
    """Return whether a value is a list of "global" and "local", GPT-Neo's attention types."""
    return isinstance(value, list) and all(kind in (_GLOBAL, _LOCAL) for kind in value)


def _is_attention_types(value: object) -> bool:
    """Return whether a value is a list of pairs [attention types, number of repetitions], as GPT-Neo's config has."""
    return isinstance(value, list) and all(
        isinstance(item, list) and len(item) == 2 and _is_kinds(item[0]) and SIZE.holds(item[1]) for item in value
    )


_NEO_ATTENTION = {
    "window_size": SIZE,
    "attention_types": FieldType(f"a list of [kinds, times], kinds {_GLOBAL!r} or {_LOCAL!r}", _is_attention_types),
    # transformers saves one kind per layer, and prefers it to attention_types
    "attention_layers": FieldType(f"a list of {_GLOBAL!r} or {_LOCAL!r}", _is_kinds).or_null(),
}


def gpt2_arch(config: HfConfig) -> ArchConfig:
    """Parse a GPT-2 config.json."""
    values = read_fields(config, _GPT2_SWITCHES)
    names = ("n_embd", "n_layer", "n_head", "n_inner", "n_positions")
    return _arch(config, names, qkv_bias=True, scale=None if values["scale_attn_weights"] else 1.0)


def gpt_neo_arch(config: HfConfig) -> ArchConfig:
    """Parse a GPT-Neo config.json."""
    values = read_fields(config, _NEO_ATTENTION)
    kinds = values["attention_layers"]
    if kinds is None:
        kinds = list(chain.from_iterable(kinds * times for kinds, times in values["attention_types"]))
    windows = tuple(values["window_size"] if kind == _LOCAL else None for kind in kinds)
    names = ("hidden_size", "num_layers", "num_heads", "intermediate_size", "max_position_embeddings")
    num_layers = read_field(config, "num_layers", SIZE)
    if len(windows) != num_layers:
        raise ConfigError(
            f"attention_layers, or attention_types without them, must have num_layers = {num_layers} kinds, "
            f"got {len(windows)}"
        )
    return _arch(config, names, scale=1.0, windows=windows)


def _arch(config: HfConfig, names: tuple[str, ...], **overrides: Any) -> ArchConfig:
    """Parse the fields that GPT-2 and GPT-Neo have, and convert them to Llama's.

    Args:
        config: content of config.json.
        names: the family's field names for width, layers, heads, MLP size and positions.
        overrides: as in `llama.arch`.
    """
    width, layers, heads, inner, positions = names
    sizes = {width: SIZE, layers: SIZE, heads: SIZE, inner: SIZE.or_null(), positions: SIZE}
    values = read_fields(config, {**_FIELDS, **sizes})
    if values[width] % values[heads]:
        raise ConfigError(f"{width} must be a multiple of {heads}, got {values[width]} and {values[heads]}")
    same = ("architectures", "vocab_size", "tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype")
    llama_fields = {
        **{name: config[name] for name in same if name in config},
        "hidden_size": values[width],
        "num_hidden_layers": values[layers],
        "num_attention_heads": values[heads],
        "intermediate_size": values[inner] or 4 * values[width],
        "max_position_embeddings": values[positions],
        "rms_norm_eps": values["layer_norm_epsilon"],
    }
    activation = values["activation_function"]
    return llama.arch(llama_fields, rope=None, o_bias=True, mlp_bias=True, activation=activation, **overrides)


_GPT2_NAMES = TensorNames(
    embed="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    layers="transformer.h",
    input_norm="ln_1",
    qkv=("attn.c_attn",) * 3,
    out="attn.c_proj",
    mlp_norm="ln_2",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    norm_parts=("weight", "bias"),
    transposed=True,
)
_NEO = "attn.attention"
_NEO_NAMES = dataclasses.replace(
    _GPT2_NAMES,
    qkv=(f"{_NEO}.q_proj", f"{_NEO}.k_proj", f"{_NEO}.v_proj"),
    out=f"{_NEO}.out_proj",
    transposed=False,
)
FAMILIES = {
    "GPT2LMHeadModel": ModelFamily(gpt2_arch, _GPT2_NAMES, _GPT2_DEFAULTS, norm=layer_norm, folds=UNGATED_FOLDS),
    "GPTNeoForCausalLM": ModelFamily(gpt_neo_arch, _NEO_NAMES, _NEO_DEFAULTS, norm=layer_norm, folds=UNGATED_FOLDS),
}
