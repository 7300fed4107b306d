"""Registry of model families by Hugging Face architecture name."""

import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from math import prod
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.models import pooling_heads
from jaxserve.models.arch import ArchConfig
from jaxserve.models.family import FlopCounts, ModelFamily
from jaxserve.models.hf_config import STRINGS, TABLE, noting_fields, one_of, read_fields
from jaxserve.models.image_families import IMAGE_FAMILIES
from jaxserve.models.layer_kinds import check_unread
from jaxserve.models.params import ParamSpec
from jaxserve.models.vision.tower import tower_specs
from jaxserve.weights import CheckpointError, read_schemes

# Fields that a multimodal config.json may have only at its top level.
_TOP_LEVEL_FIELDS = ("dtype", "eos_token_id", "tie_word_embeddings", "torch_dtype")
_MODULES: Mapping[str, Sequence[str]] = {  # architectures by module: the keys of its `FAMILIES`
    "cohere": ("CohereForCausalLM", "Cohere2ForCausalLM"),
    "deepseek": (
        *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"),
        *("Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM"),
    ),
    "gemma": ("Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    "gemma4": ("Gemma4ForCausalLM",),
    "glm": ("GlmForCausalLM", "Glm4ForCausalLM"),
    "gpt": ("GPT2LMHeadModel", "GPTNeoForCausalLM"),
    "gpt_oss": ("GptOssForCausalLM",),
    "granite": (
        *("GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
        *("GraniteMoeHybridForCausalLM", "GraniteSWAForCausalLM"),
    ),
    "llama": ("LlamaForCausalLM",),
    "llama_variants": ("SmolLM3ForCausalLM", "SeedOssForCausalLM", "ArceeForCausalLM"),
    "mistral": ("MistralForCausalLM", "MinistralForCausalLM", "Ministral3ForCausalLM"),
    "moe": (
        *("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
        *("Qwen3VLMoeForConditionalGeneration", "OlmoeForCausalLM"),
    ),
    "neox": ("GPTNeoXForCausalLM", "PhiForCausalLM", "Starcoder2ForCausalLM"),
    "olmo": ("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    "phi3": ("Phi3ForCausalLM",),
    "qwen": ("Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    "qwen_hybrid": ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
}


class _Families(MutableMapping[str, ModelFamily]):
    """Model families by architecture. A module is imported when one of its architectures is first looked up.

    Args:
        modules: architectures by module name.
    """

    def __init__(self, modules: Mapping[str, Sequence[str]]) -> None:
        self._modules = {name: module for module, names in modules.items() for name in names}
        self._families: dict[str, ModelFamily | None] = dict.fromkeys(self._modules)  # None until looked up

    def __getitem__(self, name: str) -> ModelFamily:
        family = self._families[name]
        if family is None:
            found: ModelFamily = import_module(f"jaxserve.models.{self._modules[name]}").FAMILIES[name]
            self._families[name] = family = found
        return family

    def __setitem__(self, name: str, family: ModelFamily) -> None:
        self._families[name] = family

    def __delitem__(self, name: str) -> None:
        del self._families[name]

    def __contains__(self, name: object) -> bool:
        return name in self._families

    def __iter__(self) -> Iterator[str]:
        return iter(self._families)

    def __len__(self) -> int:
        return len(self._families)


FAMILIES = _Families(_MODULES)

# Multimodal architectures and the text architecture that is served, by the text part's model_type if there are several.
TEXT_PARTS: Mapping[str, str | Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "LlavaForConditionalGeneration": {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
    },
    "LlavaOnevisionForConditionalGeneration": {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"},
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoeForConditionalGeneration",
}
# Text part defaults that differ from the family's.
_QWEN2_VL = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}
_TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "Qwen2VLForConditionalGeneration": _QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2_VL,
    "Qwen3VLForConditionalGeneration": {"rope_theta": 5e5, "max_position_embeddings": 128000},
}
_NO_TEXT = {  # substrings in the names of models without a text part
    "vision": ("vit", "clip", "imageclassification", "objectdetection", "image", "visual", "vision"),
    "audio": ("whisper", "wav2vec", "audio", "speech", "hubert"),
}
_FLAT = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")  # published without a text_config


@contextmanager
def config_errors() -> Iterator[None]:
    """Raise ConfigError with the same message for a CheckpointError within this context."""
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a multimodal model's text config; any other config unchanged."""
    names = config.get("architectures")
    if not STRINGS.holds(names) or not names or names[0] not in TEXT_PARTS:
        return config
    text = read_fields(config if names[0] not in _FLAT else {"text_config": config, **config}, {"text_config": TABLE})
    text = _with_text_positions(text["text_config"])
    whole = {name: config[name] for name in _TOP_LEVEL_FIELDS if config.get(name) is not None}
    part = TEXT_PARTS[names[0]]
    if not isinstance(part, str):
        kind = {"model_type": text.get("model_type", next(iter(part)))}
        part = part[read_fields(kind, {"model_type": one_of(part)})["model_type"]]
    return {**_TEXT_DEFAULTS.get(names[0], {}), **whole, **text, "architectures": [part]}


def _with_text_positions(text: Mapping[str, Any]) -> dict[str, Any]:
    """Replace M-RoPE by plain RoPE: text tokens have the same position in all sections."""
    kinds = {"rope_scaling": TABLE.or_null(), "rope_parameters": TABLE.or_null()}
    given = {name: table for name, table in read_fields(text, kinds).items() if table is not None}
    plain = {
        name: {**table, "rope_type": "default"}
        for name, table in given.items()
        if table.get("rope_type", table.get("type")) == "mrope"
    }
    return {**text, **plain}


def takes_images(config: Mapping[str, Any]) -> bool:
    """Return whether `from_hf_config` can read the images that a model takes."""
    names: Any = config.get("architectures")
    is_known = STRINGS.holds(names) and bool(names) and names[0] in IMAGE_FAMILIES
    return is_known and config.get("vision_config") is not None


def from_hf_config(config: Mapping[str, Any], *, with_images: bool = False) -> ArchConfig:
    """Convert config.json to an ArchConfig; ConfigError if the architecture or a setting is not supported.

    A multimodal model is reduced to its text part, unless `with_images` and it takes images.
    """
    whole, config = config, text_config(config)
    names = config.get("architectures")
    if not STRINGS.holds(names) or not names or names[0] not in FAMILIES:
        known = f"architectures must name one of {sorted(FAMILIES)}, or of {sorted(TEXT_PARTS)} for their text parts"
        advice = "; convert the text part to a checkpoint of its own" if "text_config" in whole else ""
        raise ConfigError(f"{_described(whole)}{known}, got {names}{advice}")
    with config_errors():
        schemes = read_schemes(whole)
    with noting_fields() as read:
        arch = FAMILIES[names[0]].read_arch(config)
    check_unread(config, read, arch.windows, names[0])
    arch = dataclasses.replace(arch, schemes=schemes)
    if not (with_images and takes_images(whole)):
        return arch
    return IMAGE_FAMILIES[whole["architectures"][0]].read(whole, arch, config)


def _described(config: Mapping[str, Any]) -> str:
    """Return the start of an error message if this is a vision or audio model, otherwise an empty string."""
    names = config.get("architectures")
    name = names[0] if STRINGS.holds(names) and names else config.get("model_type")
    inputs = [kind for kind in ("vision", "audio") if f"{kind}_config" in config]
    if isinstance(name, str) and not inputs:
        inputs = [kind for kind, words in _NO_TEXT.items() if any(word in name.lower() for word in words)]
    if not inputs:
        return ""
    return f"{name} is a {' and '.join(inputs)} model, none of whose parts are served; take a language model: "


def family(arch: ArchConfig) -> ModelFamily:
    """Return the family that computes a model."""
    return FAMILIES[arch.architecture]


def param_specs(arch: ArchConfig) -> list[ParamSpec]:
    """Return one ParamSpec per tensor in a model."""
    tower = [] if arch.tower is None else tower_specs(arch.tower)
    return [*pooling_heads.pooling_specs(arch, family(arch).param_specs(arch)), *tower]


def num_params(arch: ArchConfig) -> int:
    """Return the number of parameters; tied embeddings count once."""
    return sum(prod(spec.shape) for spec in param_specs(arch))


@cache
def flop_counts(arch: ArchConfig) -> FlopCounts:
    """Return FLOP counts for the whole model, or for one device if `arch` has one device's sizes."""
    return FlopCounts.from_specs(arch, param_specs(arch))
