"""Qwen2 and 2.5 (biases on q, k and v) and Qwen3 (norms on q and k); otherwise Llama's block."""

from jaxserve.models import llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import ModelFamily
from jaxserve.models.hf_config import COUNT, SIZE, HfConfig, read_field
from jaxserve.models.layer_kinds import FULL, SLIDING, read_windows

_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def qwen2_arch(config: HfConfig) -> ArchConfig:
    """Parse a Qwen2 or Qwen2.5 config.json."""
    return llama.arch(config, windows=_windows(config), qkv_bias=True, o_bias=False, mlp_bias=False)


def qwen3_arch(config: HfConfig) -> ArchConfig:
    """Parse a Qwen3 config.json."""
    read_field(config, "head_dim", SIZE)  # null is not allowed
    return llama.arch(config, windows=_windows(config), qk_norm="shared", mlp_bias=False)


def _windows(config: HfConfig) -> tuple[int | None, ...]:
    """Return each layer's window: by `layer_types` if given, else in layers from `max_window_layers` on."""
    num_full = read_field(config, "max_window_layers", COUNT)
    return read_windows(config, lambda layer: FULL if layer < num_full else SLIDING, has_switch=True)


FAMILIES = {
    "Qwen2ForCausalLM": ModelFamily(qwen2_arch, defaults=_DEFAULTS),
    "Qwen3ForCausalLM": ModelFamily(qwen3_arch, defaults={**_DEFAULTS, "head_dim": 128}),
}
