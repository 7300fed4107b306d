"""OLMo 2 and 3: norms behind attention and MLP alone, and over all heads of queries and keys; windows in OLMo 3."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.layers.norm import rms_norm
from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import Block, ModelFamily
from jaxserve.models.hf_config import FULL, SIZE, SLIDING, STRINGS, TABLE, layer_windows, read_fields, read_rope
from jaxserve.models.params import ParamSpec
from jaxserve.models.post_normed import block, post_norm_specs, project_normed_whole, whole_norm_specs

_DEFAULTS = {"rms_norm_eps": 1e-5, "head_dim": None}
_OLMO3_DEFAULTS = {**_DEFAULTS, "rope_theta": 5e5, "sliding_window": 4096}
_OLMO3_FIELDS = {"num_hidden_layers": SIZE, "sliding_window": SIZE.or_null(), "layer_types": STRINGS.or_null()}


def olmo2_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse an OLMo 2 config.json."""
    return llama.arch({**_DEFAULTS, **config}, mlp_bias=False)


def olmo3_arch(config: Mapping[str, Any]) -> ArchConfig:
    """Parse an OLMo 3 config.json: scaled rotations, if any, are those of layers without a window."""
    config = {**_OLMO3_DEFAULTS, **config}
    values, arch = read_fields(config, _OLMO3_FIELDS), olmo2_arch(config)
    num_layers, whole = arch.num_layers, arch.ropes[0]
    kinds = values["layer_types"] or [FULL if (layer + 1) % 4 == 0 else SLIDING for layer in range(num_layers)]
    assert whole is not None, "every layer rotates"
    given = read_fields({SLIDING: {}, **(config.get("rope_parameters") or {})}, {SLIDING: TABLE.or_null()})[SLIDING]
    local = read_rope({**config, "rope_scaling": None, "rope_parameters": {"rope_theta": whole.theta, **(given or {})}})
    ropes = tuple(local if kind == SLIDING else whole for kind in kinds)
    windows = layer_windows(kinds, num_layers, values["sliding_window"])
    return dataclasses.replace(arch, windows=windows, ropes=ropes)


def param_specs(arch: ArchConfig) -> list[ParamSpec]:
    """Return Llama's rows with norms at other places."""
    specs = [spec for spec in llama.param_specs(arch) if spec.path[-1] not in ("input_norm", "mlp_norm")]
    specs += post_norm_specs(arch, "post_attention_layernorm", "post_feedforward_layernorm")
    return specs + whole_norm_specs(arch)


_block: Block = partial(block, project=project_normed_whole)
_FOLDS = tuple(fold for fold in llama.FOLDS if fold.part is not None)
OLMO2 = ModelFamily(olmo2_arch, param_specs, _block, rms_norm, _FOLDS)
OLMO3 = ModelFamily(olmo3_arch, param_specs, _block, rms_norm, _FOLDS)
