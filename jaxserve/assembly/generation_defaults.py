"""A checkpoint's configuration: model sizes and recommended sampling."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxserve import weights
from jaxserve.api.config import WEIGHT_FORMATS, EngineConfig
from jaxserve.api.option_values import read_max_images
from jaxserve.api.pooling_params import CLASSIFY, EMBED, Pooler, PoolingKind, pooling_kind
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.overrides import overridden, overridden_fields, warn_of_idle
from jaxserve.errors import ConfigError, RequestError, did_you_mean
from jaxserve.models import pooling_heads, registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.hf_config import token_id_set

_LIMIT = "max_new_tokens"
_SAME_NAMES = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    "skip_special_tokens",
)
# Hugging Face's name -> ours, as read by vLLM
_GENERATION_CONFIG = {name: name for name in _SAME_NAMES} | {_LIMIT: "max_tokens"}


def build_arch(config: EngineConfig) -> ArchConfig:
    """Read the model's sizes and end-of-sequence ids from config.json and generation_config.json.

    The sizes are the whole model's, for sequences up to `max_model_len`, with the split over devices from `config`.

    Raises:
        ConfigError: the checkpoint or an option is not supported.
    """
    read = partial(_read_arch, config)
    arch = read(read_model_config(config, read))
    arch = arch.within(config.max_model_len or arch.max_position)
    arch = arch.with_page_budget(config.page_budget, config.max_model_len or arch.max_position)
    arch = arch.divided(config.tensor_parallel_size, config.expert_parallel_size, config.num_data_shards)
    # generation_config.json adds the ids that end a chat turn.
    return dataclasses.replace(arch, eos_ids=arch.eos_ids | token_id_set(_read_generation(config).get("eos_token_id")))


def read_model_config(config: EngineConfig, read: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any]:
    """Return the model's config.json with `hf_overrides`; warn of those on which the result of `read` does not depend.

    Raises:
        ConfigError: the file or an override is malformed.
    """
    with registry.config_errors():
        raw = weights.read_config(config.model_path)
    fields = overridden_fields(config.config_overrides, config.model_path)
    if fields and read is not None:
        warn_of_idle(fields, raw, read)
    return overridden(raw, fields)


def _read_arch(config: EngineConfig, raw: Mapping[str, Any]) -> ArchConfig:
    """Return the sizes of the model with the config.json content `raw`, for generating or pooling as configured."""
    if (pooler := _build_pooler(config, raw)) is None:
        return registry.from_hf_config(raw, with_images=read_max_images(config.limit_mm_per_prompt) > 0)
    generator = pooling_heads.generator_config(raw, registry.FAMILIES)
    return pooling_heads.pooling_arch(registry.from_hf_config(generator), pooler)


def _read_generation(config: EngineConfig) -> dict[str, Any]:
    """Return the effective generation_config.json; {} if the model has none."""
    is_models = config.generation_config in ("auto", "vllm")
    directory = config.model_path if is_models else Path(config.generation_config)
    if not is_models and not (directory / "generation_config.json").is_file():
        raise ConfigError(
            f"generation_config must be 'auto', 'vllm' or a directory with a generation_config.json, got "
            f"{config.generation_config!r}"
        )
    with registry.config_errors():
        return weights.read_generation_config(directory)


def resolve_quantization(config: EngineConfig, arch: ArchConfig) -> EngineConfig:
    """Return the options without `quantization` if it only names the checkpoint's own quant_method.

    Raises:
        ConfigError: it names another checkpoint format.
    """
    name = config.quantization
    own = None if arch.schemes is None else arch.schemes.method
    if name is not None and name == own:
        return dataclasses.replace(config, quantization=None)
    if name in WEIGHT_FORMATS:
        return config
    if own is None:
        formats = [each for each in WEIGHT_FORMATS if each is not None]
        raise ConfigError(
            f"quantization={name!r} needs a checkpoint that has this format, got one that is not quantised; drop it, "
            f"or quantise the weights while they are loaded, with one of {formats}"
        )
    raise ConfigError(f"quantization must be the checkpoint's own quant_method, {own!r}, got {name!r}; drop it")


_MODES = {"lasttoken": "LAST", "mean": "MEAN", "cls_token": "CLS", "cls": "CLS"}  # sentence-transformers' -> vLLM's


def _build_pooler(config: EngineConfig, raw: Mapping[str, Any]) -> Pooler | None:
    """Return the model's pooler; None if it generates.

    Raises:
        ConfigError: the checkpoint or an option is not supported.
    """
    with registry.config_errors():
        modules = weights.read_embedding_modules(config.model_path)
    is_made_to_pool = pooling_heads.has_head(raw) or pooling_heads.is_bare(raw) or modules is not None
    is_wanted = config.runner == "pooling" or config.convert in (EMBED, CLASSIFY)
    options = config.pooler_options
    if config.runner == "generate" or not (is_wanted or is_made_to_pool):
        if options:
            raise ConfigError(
                f"pooler_config needs a model that pools, got one that generates and {options}; "
                "start the engine with runner='pooling', or drop it"
            )
        return None
    if config.speculation is not None:
        raise ConfigError("speculative_config needs a model that generates, got one that pools; drop it")
    if config.convert == CLASSIFY or (config.convert != EMBED and pooling_heads.has_head(raw)):
        pooler = pooling_heads.read_head(raw)
    else:
        pooler = _embedding_pooler(raw, modules)
    return pooler.configured(options)


def _embedding_pooler(raw: Mapping[str, Any], modules: weights.EmbeddingModules | None) -> Pooler:
    """Return the pooler of an embedding model from its config.json and its sentence-transformers modules, if any."""
    sizes = raw.get("matryoshka_dimensions") or ()
    if modules is None:
        return Pooler(dimensions=tuple(sizes))
    if modules.others or (modules.pooling and modules.pooling not in _MODES):
        raise ConfigError(
            f"modules.json must have a transformer, a pooling of one of {sorted(_MODES)} and a normalisation, got "
            f"{modules.pooling!r} and {list(modules.others)}; remove the file, and set pooler_config"
        )
    kind = pooling_kind(_MODES[modules.pooling]) if modules.pooling else PoolingKind.LAST
    return Pooler(kind, normalize=modules.normalize, dimensions=tuple(sizes))


def build_sampling_params(config: EngineConfig) -> SamplingParams:
    """Return default sampling parameters: the user's overrides, then the checkpoint's recommendation."""
    recommended = {} if config.generation_config == "vllm" else _read_generation(config)
    given = {name: value for name, value in config.generation_overrides.items() if value is not None}
    if given.pop("do_sample", True) is not True:
        raise ConfigError("override_generation_config must not have do_sample: false; set temperature to 0")
    if unknown := sorted(given.keys() - _GENERATION_CONFIG.keys()):
        raise ConfigError(
            f"override_generation_config takes {sorted(_GENERATION_CONFIG)}, got {unknown}"
            f"{did_you_mean(unknown, _GENERATION_CONFIG)}; hf_overrides replaces eos_token_id"
        )
    where = f"generation_config.json in {config.model_path}"
    try:
        params = _sampling_params(recommended)
        where = "override_generation_config"
        return _sampling_params(recommended | given) if given else params
    except RequestError as error:
        raise ConfigError(f"{where}: {error}") from error


def _sampling_params(generation: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters in a generation configuration, under Hugging Face's names."""
    wanted = {ours: generation.get(theirs) for theirs, ours in _GENERATION_CONFIG.items()}
    return SamplingParams(**{name: value for name, value in wanted.items() if value is not None})


@dataclass(frozen=True, slots=True)
class OutputLimits:
    """Output limits on a server, from the generation configuration.

    Attributes:
        default: maximum tokens for a chat without its own limit; None for only the model's limit.
        largest: maximum tokens for any output; None for only the model's limit.
    """

    default: int | None = None
    largest: int | None = None

    def limit(self, max_tokens: int | None) -> int | None:
        """Return the limit for a request with `max_tokens`; None without any."""
        wanted = self.default if max_tokens is None else max_tokens
        return min((each for each in (wanted, self.largest) if each is not None), default=None)


def output_limits(config: EngineConfig) -> OutputLimits:
    """Return the limits that vLLM's server takes from the generation configuration."""
    recommended = {} if config.generation_config == "vllm" else _read_generation(config)
    largest = config.generation_overrides.get(_LIMIT)
    if config.generation_config not in ("auto", "vllm"):
        largest = largest or recommended.get(_LIMIT)
    return OutputLimits(largest or recommended.get(_LIMIT), largest)
