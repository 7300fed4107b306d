"""The configuration of a checkpoint: sizes of its model, and the sampling that it recommends."""

import dataclasses

from jaxserve import weights
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, RequestError
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig, token_id_set
from jaxserve.sampling_params import SamplingParams

_GENERATION_CONFIG = {  # Hugging Face's name -> ours, as vLLM reads them
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def build_arch(config: EngineConfig) -> ArchConfig:
    """Read config.json and generation_config.json, for sequences as long as `max_model_len`."""
    try:
        raw = weights.read_config(config.model_path)
        generation = weights.read_generation_config(config.model_path)
    except weights.CheckpointError as error:
        raise ConfigError(str(error)) from error
    arch = registry.from_hf_config(raw)
    arch = arch.within(config.max_model_len or arch.max_position)
    # generation_config.json adds the ids that end a chat turn.
    return dataclasses.replace(arch, eos_ids=arch.eos_ids | token_id_set(generation.get("eos_token_id")))


def build_sampling_params(config: EngineConfig) -> SamplingParams:
    """The checkpoint's recommendation; where it has none, SamplingParams' own defaults."""
    generation = weights.read_generation_config(config.model_path)
    wanted = {ours: generation.get(theirs) for theirs, ours in _GENERATION_CONFIG.items()}
    try:
        return SamplingParams(**{name: value for name, value in wanted.items() if value is not None})
    except RequestError as error:
        raise ConfigError(f"generation_config.json in {config.model_path}: {error}") from error
