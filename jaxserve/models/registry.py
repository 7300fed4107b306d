"""Registry of model families by Hugging Face architecture name."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.models import llama, mistral, qwen
from jaxserve.models.arch import ArchConfig
from jaxserve.models.hf_config import STRINGS, TABLE, read_fields
from jaxserve.models.params import ParamSpec

_ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], ArchConfig]] = {
    "LlamaForCausalLM": llama.arch,
    "MistralForCausalLM": mistral.arch,
    "Qwen2ForCausalLM": qwen.qwen2_arch,
    "Qwen3ForCausalLM": qwen.qwen3_arch,
}


def from_hf_config(config: Mapping[str, Any]) -> ArchConfig:
    """Return the ArchConfig of a parsed config.json; ConfigError if the architecture or a setting is not supported."""
    names = config.get("architectures")
    if not STRINGS.holds(names) or not names or names[0] not in _ARCHITECTURES:
        raise ConfigError(f"architectures must name one of {sorted(_ARCHITECTURES)}, got {names}")
    quantization = read_fields(config, {"quantization_config": TABLE.or_null()})["quantization_config"]
    if quantization:
        method = quantization.get("quant_method", "?")
        raise ConfigError(
            f"quantized checkpoints are not supported, got quant_method {method!r}; use an unquantized one"
        )
    return _ARCHITECTURES[names[0]](config)


def param_specs(arch: ArchConfig) -> list[ParamSpec]:
    """Return one spec per tensor of the model; all families use Llama's."""
    return llama.param_specs(arch)
