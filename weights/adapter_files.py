"""LoRA adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, as tensors by module.

Every tensor in the file belongs to a module, or the adapter is refused: an adapter never silently does nothing.
Tensor names decide which modules are adapted; `target_modules` may name modules that the model lacks.
"""

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.weights.errors import CheckpointError, listed
from jaxserve.weights.json_file import read_object
from jaxserve.weights.safetensors_file import map_file
from jaxserve.weights.torch_tensors import from_torch

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_PREFIX = "base_model.model."
_MODULE, _NAME = r"(?P<module>.+)", r"(?:\.default)?"
# Tensor names, by the field of `_Tensors`; a name without a match of the others may be a whole matrix.
_TENSORS = {
    "a": re.compile(rf"{_MODULE}\.lora_A{_NAME}\.weight"),
    "b": re.compile(rf"{_MODULE}\.lora_B{_NAME}\.weight"),
    "table_a": re.compile(rf"{_MODULE}\.lora_embedding_A{_NAME}"),
    "table_b": re.compile(rf"{_MODULE}\.lora_embedding_B{_NAME}"),
    "bias": re.compile(rf"{_MODULE}\.lora_B{_NAME}\.bias"),
    "magnitude": re.compile(rf"{_MODULE}\.lora_magnitude_vector{_NAME}(?:\.weight)?"),
    "base": re.compile(rf"{_MODULE}(?:\.token_adapter)?\.base_layer\.weight"),
    "tokens": re.compile(rf"{_MODULE}\.token_adapter\.trainable_tokens_delta{_NAME}"),
    "whole": re.compile(
        rf"(?P<module>(?:(?!\.lora_|\.token_adapter|_layer\b).)+?)(?:\.modules_to_save{_NAME})?\.weight"
    ),
}
_WRAPPERS = re.compile(r"\b(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")  # torch's, of no effect
_STACKED = re.compile(r"(.+\.experts)(\.base_layer)?")  # modules in which PEFT adapts stacked experts' parameters
_VECTORS = ("bias", "magnitude")
_MAX_RANK = 4096
_DEFAULT = 8  # PEFT's r and lora_alpha if the configuration has none
# Configuration values under which a module's output is W x + scale * B A x, by key; absent keys are neutral.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "layer_replication": (None, []),
}
# Names of further features, and those that are supported or have no effect after training.
_FEATURE = re.compile("use_.+|.+_config")
_KNOWN_FEATURES = (
    *("use_rslora", "use_dora"),
    *("loftq_config", "eva_config", "lora_ga_config", "megatron_config", "runtime_config"),
)
# Initialisations by which PEFT also changes the base model's weights: the factors fit only the changed ones.
_CHANGING_BASE = re.compile("(?i)pissa.*|olora|corda.*|loftq|lora_ga")


class AdapterModule(NamedTuple):
    """One module's factors: its output gains `scale * (x @ a.T @ b.T + bias)`.

    An embedding's inputs are token ids: `a` has a column for each. A module with stacked experts has factors by expert
    along a further, first axis, which has size 1 for a factor that they share.

    Attributes:
        a: first factor [rank, in].
        b: second factor [out, rank].
        scale: factor on the sum.
        bias: further term of the second matmul [out]; None without it.
        magnitude: norms of the adapted matrix's rows [out] (DoRA); None to leave them.
        is_table: True for an embedding.
    """

    a: NDArray[Any]
    b: NDArray[Any]
    scale: float
    bias: NDArray[Any] | None = None
    magnitude: NDArray[Any] | None = None
    is_table: bool = False

    @property
    def rank(self) -> int:
        """Number of rows in the first factor."""
        return int(self.a.shape[-2])

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """All arrays that the module has."""
        return [x for x in (self.a, self.b, self.bias, self.magnitude) if x is not None]


class TrainedTokens(NamedTuple):
    """Rows that replace a module's for some tokens; those of an embedding also apply to a tied output projection.

    Attributes:
        ids: token ids, each once.
        rows: their rows [N, in].
    """

    ids: tuple[int, ...]
    rows: NDArray[Any]


@dataclass(frozen=True)
class AdapterFile:
    """A LoRA adapter.

    Attributes:
        modules: factors by module name, such as "model.layers.0.self_attn.q_proj".
        whole: matrices that replace modules, by name.
        tokens: rows that replace some of a module's, by name.
        base: shapes of the base model's matrices that the file repeats, by module name; PEFT saves embeddings.
        digest: hash over everything that determines its outputs.
        invocation: token ids from whose last occurrence in a prompt on it applies (aLoRA); empty if it always does.
    """

    modules: dict[str, AdapterModule]
    whole: dict[str, NDArray[Any]]
    tokens: dict[str, TrainedTokens]
    base: dict[str, tuple[int, ...]]
    digest: str
    invocation: tuple[int, ...]

    @property
    def is_zero(self) -> bool:
        """True if the adapter has no effect: all second factors and biases are zero."""
        terms = [x for each in self.modules.values() for x in (each.b, each.bias) if x is not None]
        scaled = any(each.magnitude is not None for each in self.modules.values())
        return not (self.whole or self.tokens or scaled or any(map(np.any, terms)))


def read_adapter(directory: str | os.PathLike[str]) -> AdapterFile:
    """Read an adapter's files.

    Raises:
        CheckpointError: a file is missing or damaged, or has a tensor or a setting that is not supported.
    """
    path = FilePath(directory)
    if not path.is_dir():
        raise CheckpointError(f"a LoRA adapter must be a directory with {CONFIG} and {TENSORS}, got {path}")
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"a LoRA adapter must have {CONFIG}, got a directory without it: {path}")
    file = path / TENSORS
    if not file.is_file():
        pickles = [name for name in _PICKLES if (path / name).exists()]
        found = f"{listed(pickles)}, a pickle, which may run code" if pickles else "a directory without it"
        raise CheckpointError(
            f"a LoRA adapter must have {TENSORS}, got {found}: {path}; save it again with PEFT's save_pretrained"
        )
    return make_adapter(read_object(path / CONFIG), map_file(file), str(path))


def make_adapter(config: Mapping[str, Any], tensors: Mapping[str, Any], where: str) -> AdapterFile:
    """Return the adapter with this configuration and these tensors, by PEFT's names; see `read_adapter`.

    Args:
        config: content of adapter_config.json; the scale is 1 if it is empty.
        tensors: numpy, jax or torch arrays.
        where: their source, for messages.
    """
    _check_config(config, where)
    tensors_by_module: dict[str, dict[str, NDArray[Any]]] = {}
    unknown: list[str] = []
    for name in tensors:
        bare = _WRAPPERS.sub("", name).removeprefix(_PREFIX)
        matches = ((kind, pattern.fullmatch(bare)) for kind, pattern in _TENSORS.items())
        kind, found = next(((kind, match) for kind, match in matches if match), ("", None))
        if found is None:
            unknown.append(name)
            continue
        array = np.asarray(from_torch(tensors[name]))
        is_stacked = array.ndim == 3 and kind in "ab" and ".experts" in found["module"]
        _check_floats(name, array, where, 1 if kind in _VECTORS else 3 if is_stacked else 2)
        own = tensors_by_module.setdefault(found["module"], {})
        if kind in own:
            raise CheckpointError(f"{where}: each tensor must be given once, got {name} under another name, too")
        own[kind] = array
    if unknown:
        raise CheckpointError(
            f"{where}: each tensor must be a module's lora_A, lora_B, lora_embedding_A, lora_embedding_B, "
            f"lora_magnitude_vector or trainable_tokens_delta, or its whole weight, got {listed(unknown)}; other "
            "tensors are not supported"
        )
    if not tensors_by_module:
        raise CheckpointError(f"{where} must have tensors, got none")
    scales = _Scales(config, where)
    base = {name: own.pop("base").shape for name, own in tensors_by_module.items() if "base" in own}
    whole = {name: own.pop("whole") for name, own in tensors_by_module.items() if "whole" in own}
    rows = {name: own.pop("tokens") for name, own in tensors_by_module.items() if "tokens" in own}
    for name in [name for name in tensors_by_module if _STACKED.fullmatch(name)]:
        own, parameter = tensors_by_module.pop(name), _parameter(name, config)
        tensors_by_module[parameter] = _by_expert(own, scales.rank(parameter))
    modules = {name: _module(name, own, scales, where) for name, own in tensors_by_module.items() if own}
    _check_features(config, modules, whole, where)
    tokens, invocation = _trained_tokens(config, rows, where), _invocation(config, where)
    if invocation and (whole or tokens):
        raise CheckpointError(
            f"{where}: an adapter with alora_invocation_tokens must not have {listed([*whole, *tokens])} whole or in "
            "part: PEFT applies them to the tokens before the invocation, too; train it without modules_to_save and "
            "trainable_token_indices"
        )
    return AdapterFile(modules, whole, tokens, base, _digest(modules, whole, tokens, invocation), invocation)


def _check_config(config: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError for a setting under which an adapter would compute something else."""
    if (peft_type := config.get("peft_type", "LORA")) != "LORA":
        raise CheckpointError(f"{where}: peft_type must be 'LORA', got {peft_type!r}")
    for key, neutral in _NEUTRAL.items():
        if key in config and config[key] not in neutral:
            raise CheckpointError(
                f"{where}: {key} must be {' or '.join(map(repr, neutral))}, got {config[key]!r}: such adapters are not "
                "supported"
            )
    for key, value in config.items():
        if value and _FEATURE.fullmatch(key) and key not in _KNOWN_FEATURES:
            raise CheckpointError(f"{where}: {key} must be unset, got {value!r}: such adapters are not supported")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and _CHANGING_BASE.fullmatch(init):
        raise CheckpointError(
            f"{where}: init_lora_weights must not change the base model, got {init!r}; save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion, or set true if the model served is the changed one"
        )


def _check_features(
    config: Mapping[str, Any], modules: Mapping[str, AdapterModule], whole: Mapping[str, Any], where: str
) -> None:
    """Raise CheckpointError if the configuration has features without their tensors, or the other way round."""
    for key, tensor in (("use_dora", "magnitude"), ("lora_bias", "bias")):
        wanted = bool(config.get(key))
        for name, each in modules.items():
            if (getattr(each, tensor) is not None) != wanted and not (each.is_table and tensor == "bias"):
                stored = {"magnitude": "lora_magnitude_vector", "bias": "a bias in lora_B"}[tensor]
                raise CheckpointError(
                    f"{where}: modules must have {stored} exactly if {CONFIG} has {key}, got {key} {wanted} and "
                    f"{name} {'without' if wanted else 'with'} it"
                )
    if config.get("use_dora") and config.get("lora_bias"):
        raise CheckpointError(f"{where}: use_dora and lora_bias must not both be set, as in PEFT; train with one")
    saved = config.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        raise CheckpointError(f"{where}: modules_to_save must be a list of names, got {saved!r}")
    for name in saved:
        if not any(module == name or module.endswith(f".{name}") for module in whole):
            raise CheckpointError(f"{where}: modules_to_save must have their weights in {TENSORS}, got none of {name}")


def _check_floats(name: str, array: NDArray[Any], where: str, ndim: int) -> None:
    """Raise CheckpointError unless a tensor is a matrix or vector, as `ndim` requires, with finite floats."""
    is_float = array.dtype.kind == "f" or array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    if array.ndim != ndim or not is_float or not array.size:
        shape = "matrix" if ndim == 2 else "vector"
        raise CheckpointError(
            f"{where}: {name} must be a float {shape}, got shape {list(array.shape)} of {array.dtype.name}"
        )
    if not np.isfinite(array.astype(np.float32)).all():
        raise CheckpointError(f"{where}: {name} must be finite, got infinities or NaNs")


class _Scales:
    """Scales by module: alpha / rank, or alpha / sqrt(rank) with rsLoRA; patterns override both by module.

    Args:
        config: content of adapter_config.json.
        where: its source, for messages.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._where, self._is_rs = where, bool(config.get("use_rslora"))
        self._rank, self._alpha = (
            self._positive(key, config.get(key, _DEFAULT)) if config else None for key in ("r", "lora_alpha")
        )
        self._ranks, self._alphas = (
            {key: self._positive(f"{name}[{key!r}]", value) for key, value in self._patterns(config, name).items()}
            for name in ("rank_pattern", "alpha_pattern")
        )

    def rank(self, module: str) -> int | None:
        """Return a module's rank by the configuration; None if that has none."""
        rank = self._matching(self._ranks, module, self._rank)
        return None if rank is None else int(rank)

    def scale(self, module: str, rank: int) -> float:
        """Return a module's scale; CheckpointError if the configuration gives it another rank."""
        wanted = self._matching(self._ranks, module, self._rank)
        if wanted is not None and wanted != rank:
            raise CheckpointError(
                f"{self._where}: lora_A of {module} must have the rank of {CONFIG}, {wanted:g}, got {rank}"
            )
        alpha = self._matching(self._alphas, module, self._alpha)
        if alpha is None:
            return 1.0
        return float(alpha / (math.sqrt(rank) if self._is_rs else rank))

    def _patterns(self, config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        patterns = config.get(name) or {}
        if not isinstance(patterns, Mapping):
            raise CheckpointError(f"{self._where}: {name} must be an object, got {patterns!r}")
        return patterns

    def _matching(self, patterns: Mapping[str, float], module: str, default: float | None) -> float | None:
        """Return the first value whose pattern matches the end of a module's name, as PEFT does."""
        for pattern, value in patterns.items():
            try:
                if re.match(rf"(.*\.)?({pattern})$", module):
                    return value
            except re.error as error:
                raise CheckpointError(f"{self._where}: {pattern!r} must be a pattern, got a fault: {error}") from None
        return default

    def _positive(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise CheckpointError(f"{self._where}: {name} must be a positive number, got {value!r}")
        return float(value)


def _module(name: str, own: Mapping[str, NDArray[Any]], scales: _Scales, where: str) -> AdapterModule:
    """Return a module's factors; CheckpointError if one is missing or their shapes do not fit each other."""
    is_table = "table_a" in own or "table_b" in own
    prefix, first, second = ("lora_embedding_", "table_a", "table_b") if is_table else ("lora_", "a", "b")
    for key, letter in ((first, "A"), (second, "B")):
        if key not in own:
            both = f"{prefix}A and {prefix}B"
            raise CheckpointError(f"{where}: {name} must have both {both}, got no {prefix}{letter}")
    if others := set(own) - {first, second, *_VECTORS}:
        raise CheckpointError(f"{where}: {name} must have one pair of factors, got {listed(sorted(others))}, too")
    a, b = own[first], own[second]
    rank = a.shape[-2]
    if (
        a.ndim != b.ndim
        or rank != b.shape[-1]
        or rank > _MAX_RANK
        or (a.ndim == 3 and {"bias", "magnitude"} & set(own))
    ):
        raise CheckpointError(
            f"{where}: the factors of {name} must be [rank, in] and [out, rank] with a rank of at most {_MAX_RANK}, "
            f"got {list(a.shape)} and {list(b.shape)}"
        )
    for key in _VECTORS:
        if key in own and own[key].shape != b.shape[:1]:
            raise CheckpointError(
                f"{where}: the {key} of {name} must have {b.shape[0]} elements, got {own[key].shape[0]}"
            )
    return AdapterModule(a, b, scales.scale(name, rank), own.get("bias"), own.get("magnitude"), is_table)


def _parameter(name: str, config: Mapping[str, Any]) -> str:
    """Return the name of the parameter that PEFT adapts in a module with stacked experts.

    A wrapper for the first parameter is inside the one for the second, as its base layer.
    """
    inner, experts = name.endswith(".base_layer"), name.removesuffix(".base_layer")
    targets = [f".{target}" for target in config.get("target_parameters") or ()]
    both = [f"{experts}.gate_up_proj", f"{experts}.down_proj"]
    known = [each for each in both if f".{each}".endswith(tuple(targets))] or both
    return known[0] if inner else known[-1]


def _by_expert(own: Mapping[str, NDArray[Any]], rank: int | None) -> dict[str, NDArray[Any]]:
    """Return stacked experts' factors by expert: PEFT has them as [E * rank, in] and [out, rank * E]."""
    found = dict(own)
    if "a" in own and own["a"].ndim == 2 and rank is not None and len(own["a"]) % rank == 0:
        found["a"] = own["a"].reshape(-1, rank, own["a"].shape[1])
    if "b" in own:
        b = own["b"]
        if b.ndim == 2 and rank is not None and b.shape[1] % rank == 0:
            b = b.reshape(len(b), rank, -1)
        found["b"] = np.moveaxis(b, 2, 0) if b.ndim == 3 else b
    return found


def _trained_tokens(
    config: Mapping[str, Any], rows: Mapping[str, NDArray[Any]], where: str
) -> dict[str, TrainedTokens]:
    """Return trained tokens by module; CheckpointError unless each list of ids has its rows, and the other way round.

    A list without a module's name is for the input embedding. PEFT saves equal lists for tied modules once.
    """
    key = "trainable_token_indices"
    given = config.get(key) or {}
    lists: dict[str, Any] = given if isinstance(given, dict) else dict.fromkeys(rows, given)
    for ids in [given] if isinstance(given, list) else lists.values():
        if not isinstance(ids, list) or {*map(type, ids)} != {int} or min(ids) < 0 or len({*ids}) != len(ids):
            raise CheckpointError(f"{where}: {key} must have lists of different token ids, got {given!r}")
    found: dict[str, TrainedTokens] = {}
    for name, own in rows.items():
        ids = next((ids for module, ids in lists.items() if name == module or name.endswith(f".{module}")), [])
        if len(ids) != len(own):
            raise CheckpointError(f"{where}: {key} must have {len(own)} ids for {name}, got {len(ids)}")
        found[name] = TrainedTokens(tuple(ids), own)
    saved = [each.ids for each in found.values()]
    if missing := [module for module, ids in lists.items() if tuple(ids) not in saved]:
        raise CheckpointError(f"{where}: {key} must have their rows in {TENSORS}, got none for {listed(missing)}")
    if given and not found:
        raise CheckpointError(f"{where}: {key} must have their rows in {TENSORS}, got none for {given}")
    return found


def _invocation(config: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Return an aLoRA's invocation tokens; CheckpointError unless they are token ids."""
    given = config.get("alora_invocation_tokens") or []
    if not isinstance(given, list) or {*map(type, given)} - {int} or (given and min(given) < 0):
        raise CheckpointError(f"{where}: alora_invocation_tokens must be a list of token ids, got {given!r}")
    return tuple(given)


def _digest(
    modules: Mapping[str, AdapterModule],
    whole: Mapping[str, NDArray[Any]],
    tokens: Mapping[str, TrainedTokens],
    invocation: tuple[int, ...],
) -> str:
    """Return a hash over all names, scales, arrays, trained tokens and invocation tokens."""
    state = hashlib.blake2b(json.dumps(invocation).encode(), digest_size=16, person=b"lora")
    parts: list[tuple[str, float | None, list[NDArray[Any]]]]
    parts = [(name, each.scale, each.arrays) for name, each in modules.items()]
    parts += [(name, None, [array]) for name, array in whole.items()]
    parts += [(name, None, [np.array(each.ids), each.rows]) for name, each in tokens.items()]
    for name, scale, arrays in sorted(parts, key=lambda part: (part[0], part[1] is None)):
        state.update(json.dumps([name, scale, [(x.dtype.name, x.shape) for x in arrays]]).encode())
        for array in arrays:
            state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def module_names(name: str) -> Iterable[str]:
    """Yield the names under which a checkpoint may have an adapter's module.

    Multimodal models' text parts have prefixes, and transformers names MoE blocks otherwise than some checkpoints.
    """
    yield from _without_prefixes(name)
    if (other := name.replace(".mlp", ".block_sparse_moe")) != name:
        yield from _without_prefixes(other)


def _without_prefixes(name: str) -> Iterator[str]:
    """Yield a module's names without and with a prefix."""
    yield name
    for prefix in ("model.language_model.", "language_model.model.", "language_model.", "model.text_model."):
        if name.startswith(prefix):
            yield "model." + name.removeprefix(prefix)
            yield name.removeprefix(prefix)
    yield f"model.{name}"
