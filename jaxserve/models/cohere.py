"""Cohere's Command R, R+, R7B and A: attention and MLP in parallel, layer norms without biases, scaled logits."""

from typing import Any

from jaxserve.layers.norm import layer_norm
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import FOLDS, ModelFamily
from jaxserve.models.hf_config import POSITIVE, SIZE, SWITCH, HfConfig, read_field, read_fields
from jaxserve.models.layer_kinds import full_every, read_windows
from jaxserve.models.layer_tensors import TensorNames

_DEFAULTS = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "eos_token_id": 255001,
    "head_dim": None,
}
_COHERE_DEFAULTS = {**_DEFAULTS, "rope_theta": 5e5, "use_qk_norm": False}
_COHERE2_DEFAULTS = {**_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4}
_FIELDS = {"layer_norm_eps": POSITIVE, "logit_scale": POSITIVE, "model_max_length": SIZE.or_null()}


def cohere_arch(config: HfConfig) -> ArchConfig:
    """Parse a Command R or R+ config.json."""
    return _arch(config, qk_norm="by_head" if read_field(config, "use_qk_norm", SWITCH) else None)


def cohere2_arch(config: HfConfig) -> ArchConfig:
    """Parse a Command R7B or A config.json: layers with a window use RoPE, the others NoPE."""
    arch = _arch(config)
    windows = read_windows(config, full_every(read_field(config, "sliding_window_pattern", SIZE)))
    ropes = [rope if window is not None else None for rope, window in zip(arch.ropes, windows, strict=True)]
    return arch.with_attention(window=windows, rope=ropes)


def _arch(config: HfConfig, **overrides: Any) -> ArchConfig:
    """Parse the fields that both families have; `overrides` as in `llama.arch`."""
    values = read_fields(config, _FIELDS)
    config = {**config, "rms_norm_eps": values["layer_norm_eps"]}
    if values["model_max_length"] is not None:  # Command R and R+ were trained on fewer positions, and serve more
        config["max_position_embeddings"] = values["model_max_length"]
    scale = float(values["logit_scale"])
    return llama.arch(config, interleaved=True, logit_scale=scale, parallel=True, mlp_bias=False, **overrides)


_FOLDS = tuple(fold for fold in FOLDS if fold.part is not None)  # attention and the MLP read the same norm
_NAMES = TensorNames(mlp_norm=None, norm_parts=("weight",))
FAMILIES = {
    "CohereForCausalLM": ModelFamily(cohere_arch, _NAMES, _COHERE_DEFAULTS, norm=layer_norm, folds=_FOLDS),
    "Cohere2ForCausalLM": ModelFamily(cohere2_arch, _NAMES, _COHERE2_DEFAULTS, norm=layer_norm, folds=_FOLDS),
}
