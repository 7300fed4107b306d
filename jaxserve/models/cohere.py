"""Cohere's Command R, R+, R7B and A: attention and MLP in parallel, layer norms without biases, scaled logits."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.layers.norm import layer_norm
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.block import block
from jaxserve.models.family import FOLDS, ModelFamily
from jaxserve.models.hf_config import POSITIVE, SIZE, SWITCH, read_fields
from jaxserve.models.layer_kinds import full_every, read_windows
from jaxserve.models.layer_tensors import Names, decoder_specs

_DEFAULTS = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "eos_token_id": 255001,
    "head_dim": None,
}
_FIELDS = {"num_hidden_layers": SIZE, "layer_norm_eps": POSITIVE, "logit_scale": POSITIVE}
_FIELDS |= {"model_max_length": SIZE.or_null()}
_COHERE2_DEFAULTS = {"sliding_window": 4096, "sliding_window_pattern": 4}


def cohere_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a Command R or R+ config.json."""
    config = {"rope_theta": 5e5, "use_qk_norm": False, **config}
    return _arch(config, qk_norm="by_head" if read_fields(config, {"use_qk_norm": SWITCH})["use_qk_norm"] else None)


def cohere2_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse a Command R7B or A config.json: layers with a window use RoPE, the others NoPE."""
    config = {**_COHERE2_DEFAULTS, **config}
    period = read_fields(config, {"sliding_window_pattern": SIZE})["sliding_window_pattern"]
    arch = _arch(config)
    windows = read_windows(config, arch.num_layers, full_every(period))
    ropes = [rope if window is not None else None for rope, window in zip(arch.ropes, windows, strict=True)]
    return arch.with_attention(window=windows, rope=ropes)


def _arch(config: Mapping[str, Any], **overrides: Any) -> ArchConfig:
    config = {**_DEFAULTS, **config}
    values = read_fields(config, _FIELDS)
    if values["model_max_length"] is not None:  # Command R and R+ were trained on fewer positions, and serve more
        config["max_position_embeddings"] = values["model_max_length"]
    scale, eps = float(values["logit_scale"]), values["layer_norm_eps"]
    arch = llama.arch({**config, "rms_norm_eps": eps}, logit_scale=scale, parallel=True, mlp_bias=False, **overrides)
    return arch.with_attention(rope=[rope and dataclasses.replace(rope, interleaved=True) for rope in arch.ropes])


_FOLDS = tuple(fold for fold in FOLDS if fold.part is not None)  # attention and the MLP read the same norm
_specs = partial(decoder_specs, names=Names(mlp_norm=None, norm_parts=("weight",)))
COHERE = ModelFamily(cohere_arch, _specs, block, layer_norm, _FOLDS)
COHERE2 = ModelFamily(cohere2_arch, _specs, block, layer_norm, _FOLDS)
