"""OLMo 2 and 3: post-norms only, query and key norms over all heads; sliding windows in OLMo 3."""

from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import FOLDS, ModelFamily
from jaxserve.models.hf_config import HfConfig, read_rope
from jaxserve.models.layer_kinds import SLIDING, by_kind, full_every, read_kinds, read_windows
from jaxserve.models.layer_tensors import TensorNames

_DEFAULTS = {"rms_norm_eps": 1e-5, "head_dim": None}
_OLMO3_THETA = 5e5
_OLMO3_DEFAULTS = {**_DEFAULTS, "rope_theta": _OLMO3_THETA, "sliding_window": 4096}


def olmo2_arch(config: HfConfig) -> ArchConfig:
    """Parse an OLMo 2 config.json."""
    return llama.arch(config, qk_norm="whole", mlp_bias=False)


def olmo3_arch(config: HfConfig) -> ArchConfig:
    """Parse an OLMo 3 config.json; RoPE scaling only applies to layers without a window."""
    full, local = by_kind(config, _OLMO3_THETA)
    arch, local_rope = olmo2_arch(full), read_rope(local)
    kinds = read_kinds(config, full_every(4))
    ropes = [local_rope if kind == SLIDING else arch.ropes[0] for kind in kinds]
    return arch.with_attention(window=read_windows(config, full_every(4)), rope=ropes)


_NAMES = TensorNames(
    input_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)
_FOLDS = tuple(fold for fold in FOLDS if fold.part is not None)
FAMILIES = {
    "Olmo2ForCausalLM": ModelFamily(olmo2_arch, _NAMES, _DEFAULTS, folds=_FOLDS),
    "Olmo3ForCausalLM": ModelFamily(olmo3_arch, _NAMES, _OLMO3_DEFAULTS, folds=_FOLDS),
}
