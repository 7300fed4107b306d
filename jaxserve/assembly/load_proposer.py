"""Loads draft models, draft layers and heads, and builds their proposers."""

from __future__ import annotations

import dataclasses
import logging
import math
from functools import partial
from pathlib import Path
from typing import Literal

import jax.numpy as jnp

from jaxserve import weights
from jaxserve.api.config import DEFAULT_DRAFTS, EngineConfig
from jaxserve.api.embedded import embedded_model
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.assembly.draft import Draft
from jaxserve.assembly.generation_defaults import build_arch, resolve_quantization
from jaxserve.assembly.memory import pool_dtype, select_backend
from jaxserve.assembly.parameters import (
    build_embedding,
    build_layer_params,
    build_params,
    compute_dtype,
    not_packed,
)
from jaxserve.errors import ConfigError
from jaxserve.execution.proposer import Proposer
from jaxserve.layers.kv_forms import MixedHeads
from jaxserve.layers.weight_formats import weight_format
from jaxserve.models import draft_head, registry
from jaxserve.models.arch import ArchConfig, Stage
from jaxserve.models.params import Params, matrix_transform
from jaxserve.scheduling.schedule_config import FREE_TOKENS, SPECULATIVE_ROWS, ScheduleConfig
from jaxserve.spec_decode.draft_layer import DraftLayer, LayerHead
from jaxserve.spec_decode.draft_model import DraftModel
from jaxserve.spec_decode.head_files import load_draft_layer, load_medusa
from jaxserve.spec_decode.medusa import Medusa
from jaxserve.spec_decode.ngram import NGram
from jaxserve.spec_decode.stage_drafts import LastStage, PreviousStage
from jaxserve.text.common_tokens import NONE, common_tokens
from jaxserve.text.loading import load_tokenizer

logger = logging.getLogger(__name__)

MIN_COMMON_FRACTION = 0.01  # minimum fraction of a draft model's tokens that the model also has


class LoadedDraft(Draft):
    """Draft that was loaded for a `speculative_config`."""

    def proposer(
        self, config: EngineConfig, arch: ArchConfig, schedule: ScheduleConfig, kv_dtype: jnp.dtype, stage: Stage
    ) -> Proposer:
        """Return the proposer that `config` requests, or what a stage has in its place.

        Stages draft greedily: weights over the vocabulary would have to pass from the first stage to the last one.
        """
        speculation = config.speculation
        assert speculation is not None, "a draft was loaded for it"
        num_tokens, is_greedy = speculation.max_drafts, not stage.is_whole
        if not self.is_in(stage):
            features = () if self.head is None else self.head.feature_layers
            if stage.is_first:
                return LastStage(num_tokens, features, schedule.max_num_seqs)
            return PreviousStage(num_tokens, features)
        if speculation.method == "ngram":
            longest, shortest = speculation.prompt_lookup_max, speculation.prompt_lookup_min
            assert longest is not None is not shortest, "the configuration has resolved both"
            return NGram(num_tokens, longest, shortest)
        if speculation.method == "medusa":
            local, dtype = arch.local(config.tensor_parallel_size), compute_dtype(config, arch).name
            return Medusa(num_tokens, local, arch.vocab_size, schedule.max_num_seqs, dtype, speculation.tree)
        assert self.arch is not None, "there is a draft model or a layer"
        sizes = schedule.program_config  # the proposer is part of the key of stored programs
        if self.head is not None:
            return DraftLayer(
                num_tokens,
                self.head,
                arch.local(config.tensor_parallel_size),
                arch.vocab_size,
                sizes,
                compute_dtype(config, arch).name,
                kv_dtype.name,
                self.backend,
                kv_group=_widest_group(arch),
                is_greedy=is_greedy,
            )
        return DraftModel(
            num_tokens,
            self.arch,
            arch.vocab_size,
            sizes,
            kv_dtype.name,
            self.backend,
            kv_group=_widest_group(arch),
            chunk=max(FREE_TOKENS if schedule.few_programs else 64, SPECULATIVE_ROWS),
            tree=speculation.tree,
            is_mapped="outputs" in self.params,
            is_greedy=is_greedy,
        )


def load_draft(config: EngineConfig, arch: ArchConfig) -> LoadedDraft:
    """Load the proposer's weights for the model `arch`; ConfigError if they do not fit the model."""
    speculation = config.speculation
    assert speculation is not None, "other engines have no draft"
    if speculation.method == "ngram":
        return LoadedDraft()
    if speculation.method == "mtp" and arch.attention.mla is not None:
        return _load_following_layer(config, arch, Path(speculation.model or config.model_path))
    directory = _draft_directory(config, speculation)
    if speculation.method != "draft_model":
        return _load_heads(config, speculation, arch, directory)
    own = dataclasses.replace(
        config,
        model=str(directory),
        quantization=speculation.quantization,
        activation_quantization=None,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        expert_parallel_size=1,
        data_parallel_size=1,
        attention_backend="auto",
        speculative_config=None,
        hf_overrides=None,
    )
    draft_arch = build_arch(own)
    own = resolve_quantization(own, draft_arch)
    if draft_arch.state is not None:
        raise ConfigError(
            f"a draft model must have attention in all layers, as a recurrent state cannot undo rejected "
            f"drafts, got {draft_arch.architecture} in {directory}; take another draft model"
        )
    if isinstance(draft_arch.kv_layout.pool, MixedHeads) and speculation.tree is not None:
        raise ConfigError(
            f"a draft model that drafts a tree must have KV heads of one size in all layers, got "
            f"{draft_arch.architecture} in {directory}; drop speculative_token_tree"
        )
    common = _common_tokens(config, own, arch.vocab_size)
    draft_arch = _within_pages(draft_arch, arch)
    if draft_arch.attention.mla is not None and any(draft_arch.windows):
        raise ConfigError(
            f"a draft model with MLA, which has no windows, needs a model with full attention in some layers, got a "
            f"sliding window of {max(filter(None, draft_arch.windows))} tokens in all layers of {config.model}; take a "
            "draft model with keys and values of heads"
        )
    return LoadedDraft(build_params(own, draft_arch) | common, draft_arch, _draft_backend(config, arch, draft_arch))


def _draft_backend(config: EngineConfig, arch: ArchConfig, draft_arch: ArchConfig) -> str:
    """Return the best attention backend for a draft model or layer; its pool has the same dtype as `arch`'s pool."""
    plain = dataclasses.replace(config, attention_backend="auto")
    return select_backend(plain, draft_arch, pool_dtype(config, compute_dtype(config, arch)))


def _draft_directory(config: EngineConfig, speculation: SpeculationConfig) -> Path:
    """Return the draft checkpoint's directory; ConfigError if none is given and none is embedded."""
    if speculation.model is not None:
        return Path(speculation.model)
    if config.model is not None or speculation.method not in DEFAULT_DRAFTS:
        wanted = "draft model" if speculation.method == "draft_model" else f"{speculation.method} heads"
        raise ConfigError(
            f"the speculative_config of a model must name its {wanted}, got no model; set model in it to a directory"
        )
    return embedded_model(DEFAULT_DRAFTS[speculation.method])


def _within_pages(draft: ArchConfig, arch: ArchConfig) -> ArchConfig:
    """Return the sizes `draft` with windows no wider than the widest KV group of `arch`, whose pages the draft uses."""
    widest = arch.kv_layout.windows[_widest_group(arch)]
    windows = [min(filter(None, (window, widest)), default=None) for window in draft.windows]
    return dataclasses.replace(draft.with_attention(window=windows), one_kv_group=True)


def _load_heads(config: EngineConfig, speculation: SpeculationConfig, arch: ArchConfig, directory: Path) -> LoadedDraft:
    """Load Medusa heads, or an EAGLE-3 or MTP layer, from `directory`; ConfigError if they do not fit the model."""
    dtype = compute_dtype(config, arch)
    if speculation.method != "medusa":
        method: Literal["eagle3", "mtp"] = "eagle3" if speculation.method == "eagle3" else "mtp"
        native = not_packed(config, weight_format(None), dtype) is None
        params, head = load_draft_layer(directory, method, arch, dtype, partial(matrix_transform, native=native))
        head = dataclasses.replace(head, arch=_within_pages(head.arch, arch))
        params |= _own_embedding(config, arch, params)
        return LoadedDraft(params, head.arch, _draft_backend(config, arch, head.arch), head, reads_features=True)
    params = load_medusa(directory, arch, dtype)
    num_heads = len(params["blocks"])
    if speculation.max_drafts > num_heads:
        raise ConfigError(
            f"num_speculative_tokens must be at most the number of heads in {directory}, got "
            f"{speculation.max_drafts} and {num_heads}"
        )
    return LoadedDraft(params, reads_features=True)


def _load_following_layer(config: EngineConfig, arch: ArchConfig, directory: Path) -> LoadedDraft:
    """Load the MTP layer that follows the model's layers in the checkpoint `directory`.

    Raises:
        ConfigError: the layer is missing or does not fit the model.
    """
    with registry.config_errors():
        found = weights.draft_layers(directory)
        schemes = weights.read_schemes(weights.read_config(directory))
    if len(found) != 1:
        raise ConfigError(
            f'method "mtp" of speculative_config needs a checkpoint with one layer for multi-token prediction, whose '
            f"eh_proj and norms follow the model's layers, got {list(found) or 'none'} in {directory}; set model in it "
            f"to a directory with the layer, or take another method"
        )
    layer = dataclasses.replace(_within_pages(draft_head.following_arch(arch), arch), schemes=schemes)
    params = build_layer_params(config, layer, draft_head.following_specs(layer, found[0]), directory, found[0])
    local = layer.local(config.tensor_parallel_size)
    params |= _own_embedding(config, arch, params)
    backend, head = _draft_backend(config, arch, local), LayerHead("mtp", local)
    return LoadedDraft(params, local, backend, head, is_split=True, reads_features=True)


def _own_embedding(config: EngineConfig, arch: ArchConfig, params: Params) -> Params:
    """Return a copy of the model's embedding for a draft layer in a last stage that has none; else empty."""
    if config.pipeline_parallel_size == 1 or arch.tied_embeddings or "embed" in params:
        return {}
    return build_embedding(config, arch)


def _common_tokens(config: EngineConfig, draft: EngineConfig, vocab_size: int) -> Params:
    """Return the mapping between the tokens of model and draft model, as arrays; empty if they share a tokenizer.

    Vocabulary padding is ignored. ConfigError if too few tokens are common.
    """
    if config.skip_tokenizer_init:
        return {}
    paths = config.tokenizer_path, draft.model_path
    model, other = map(load_tokenizer, paths)
    if model.vocabulary() == other.vocabulary():
        return {}
    found = common_tokens(model, other)
    logger.info(
        "the draft model has another tokenizer: %d tokens of %d are in both", found.num_common, model.vocab_size
    )
    if found.num_common < MIN_COMMON_FRACTION * other.vocab_size:
        raise ConfigError(
            f"a draft model must have at least {MIN_COMMON_FRACTION:.0%} of its tokens in common with the model, got "
            f"{found.num_common} of {other.vocab_size} in {draft.model_path}; take another draft model"
        )
    padding = max(vocab_size - model.vocab_size, 0)
    columns = {"inputs": found.inputs + [0] * padding, "outputs": found.outputs + [NONE] * padding}
    return {name: jnp.array(ids[:vocab_size], jnp.int32) for name, ids in columns.items()}


def _widest_group(arch: ArchConfig) -> int:
    """Return the index of the KV group with the widest window; full attention is wider than any."""
    windows = [math.inf if window is None else window for window in arch.kv_layout.windows]
    return windows.index(max(windows))
