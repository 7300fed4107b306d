"""OLMo 2 and 3: post-norms only, query and key norms over all heads; sliding windows in OLMo 3."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.layers.norm import rms_norm
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.block import block
from jaxserve.models.family import FOLDS, ModelFamily
from jaxserve.models.hf_config import read_rope
from jaxserve.models.layer_kinds import SLIDING, by_kind, full_every, read_kinds, read_windows
from jaxserve.models.layer_tensors import Names, decoder_specs

_DEFAULTS = {"rms_norm_eps": 1e-5, "head_dim": None}
_OLMO3_THETA = 5e5
_OLMO3_DEFAULTS = {**_DEFAULTS, "rope_theta": _OLMO3_THETA, "sliding_window": 4096}


def olmo2_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse an OLMo 2 config.json."""
    return llama.arch({**_DEFAULTS, **config}, qk_norm="whole", mlp_bias=False)


def olmo3_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse an OLMo 3 config.json; RoPE scaling only applies to layers without a window."""
    config = {**_OLMO3_DEFAULTS, **config}
    full, local = by_kind(config, _OLMO3_THETA)
    arch, local_rope = olmo2_arch(full), read_rope(local)
    num_layers, whole = arch.num_layers, arch.ropes[0]
    kinds = read_kinds(config, num_layers, full_every(4))
    ropes = tuple(local_rope if kind == SLIDING else whole for kind in kinds)
    windows = read_windows(config, num_layers, full_every(4))
    return arch.with_attention(window=windows, rope=ropes)


_NAMES = Names(
    input_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)
_specs = partial(decoder_specs, names=_NAMES)
_FOLDS = tuple(fold for fold in FOLDS if fold.part is not None)
OLMO2 = ModelFamily(olmo2_arch, _specs, block, rms_norm, _FOLDS)
OLMO3 = ModelFamily(olmo3_arch, _specs, block, rms_norm, _FOLDS)
