"""Pooling models: decoders without an LM head, and decoders with a classification head instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxserve.api.pooling_params import Activation, Pooler, PoolingKind
from jaxserve.errors import ConfigError
from jaxserve.models.params import ParamSpec
from jaxserve.weights.rows import HEADS

if TYPE_CHECKING:
    from jaxserve.models.arch import ArchConfig

HEAD = "score"  # the head's name in parameter trees and in checkpoints
_CLASSIFIER = "ForSequenceClassification"
_GENERATORS = ("ForCausalLM", "LMHeadModel")
_BIDIRECTIONAL = {"is_causal": False, "use_bidirectional_attention": True}


def has_head(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a classifier."""
    return _name(config).endswith(_CLASSIFIER)


def is_bare(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a decoder without a head."""
    return _name(config).endswith("Model") and not _name(config).endswith(_GENERATORS)


def _name(config: Mapping[str, Any]) -> str:
    """Return the first architecture in a config.json, or an empty string."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def generator_config(config: Mapping[str, Any], families: Collection[str]) -> dict[str, Any]:
    """Return the config.json for the generating model with the same decoder.

    Args:
        config: a config.json.
        families: architectures that generate.

    Raises:
        ConfigError: no family has this decoder, or its tokens attend to later ones.
    """
    for name, value in _BIDIRECTIONAL.items():
        if config.get(name) is value:
            raise ConfigError(f"{name} must not be {value}: attention is causal, and this model was made for another")
    name = _name(config)
    if name in families:
        return dict(config)
    stem = name.removesuffix(_CLASSIFIER).removesuffix("Model")
    stems = {stem, stem.removesuffix("Text")}
    found = [family for family in families if any(family == stem + end for stem in stems for end in _GENERATORS)]
    if not found:
        known = sorted(families)
        raise ConfigError(
            f"architectures must name the decoder of one of {known}, bare or with a head, got {name or None}"
        )
    return {**config, "architectures": found}


def read_head(config: Mapping[str, Any]) -> Pooler:
    """Return a classifier's pooler: last-token pooling and label activation, as in transformers and vLLM."""
    labels, num_labels = config.get("id2label"), config.get("num_labels")
    num_labels = len(labels) if isinstance(labels, dict) else 2 if num_labels is None else num_labels
    if not isinstance(num_labels, int) or num_labels < 1:
        raise ConfigError(f"num_labels must be a positive integer, got {num_labels!r}")
    default = Activation.SIGMOID if num_labels == 1 else Activation.SOFTMAX
    activations = {
        None: _cross_encoder_activation(config) or default,
        "regression": Activation.IDENTITY,
        "single_label_classification": default,
        "multi_label_classification": Activation.SIGMOID,
    }
    kind = config.get("problem_type") or None
    if kind not in activations:
        raise ConfigError(f"problem_type must be one of {list(activations)}, got {kind!r}")
    names = [labels.get(str(i), labels.get(i)) for i in range(num_labels)] if isinstance(labels, dict) else []
    own = () if None in names else tuple(map(str, names))
    return Pooler(PoolingKind.LAST, num_labels, activations[kind], labels=own)


def _cross_encoder_activation(config: Mapping[str, Any]) -> Activation | None:
    """Return the activation that sentence-transformers wrote to config.json; None without one."""
    own = config.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, dict) else config.get("sbert_ce_default_activation_function")
    if name is None:
        return None
    try:
        return Activation(str(name).rpartition(".")[2].lower())
    except ValueError:
        known = [*map(str, Activation)]
        raise ConfigError(f"the activation of a head must be one of {known} of torch.nn, got {name!r}") from None


def pooling_arch(arch: ArchConfig, pooler: Pooler) -> ArchConfig:
    """Return the config with this pooler and without an LM head."""
    return replace(arch, pooler=pooler, tied_embeddings=True)


def pooling_specs(arch: ArchConfig, specs: list[ParamSpec]) -> list[ParamSpec]:
    """Return a pooling model's ParamSpecs, given its decoder's: no LM head, and a classifier if it has labels."""
    if arch.pooler is None:
        return specs
    unread = tuple(f"{module}.{name}" for module in HEADS for name in ("weight", "bias"))
    specs = [replace(spec, unread=unread) if spec.path == ("embed",) else spec for spec in specs]
    if not arch.pooler.num_labels or not arch.stage.is_last:
        return specs
    size, hidden = arch.pooler.num_labels, arch.hidden_size
    return [*specs, ParamSpec((HEAD,), (size, hidden), (None, "embed"), (f"{HEAD}.weight",), (size,), exact=True)]
