"""LoRA adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, as factors by module.

Every tensor in the file belongs to a module, or the adapter is refused: an adapter never silently does nothing.
Tensor names decide which modules are adapted; `target_modules` may name modules that the model lacks.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
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
_TENSOR = re.compile(r"(?P<module>.+)\.(?P<kind>lora_[AB])(?:\.default)?\.(?P<leaf>weight)")
_KINDS = {"lora_A": "a", "lora_B": "b"}
_MAX_RANK = 4096
# Configuration values under which a module's output is W x + scale * B A x, by key; absent keys are neutral.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "arrow_config": (None,),
    "corda_config": (None,),
    "velora_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}
# Initialisations by which PEFT also changes the base model's weights: the factors fit only the changed ones.
_CHANGING_BASE = re.compile("(?i)pissa.*|olora|corda.*|loftq|lora_ga")


class AdapterModule(NamedTuple):
    """One module's factors: its output gains `scale * (x @ a.T) @ b.T`.

    Attributes:
        a: first factor [rank, in].
        b: second factor [out, rank].
        scale: factor on the product.
    """

    a: NDArray[Any]
    b: NDArray[Any]
    scale: float

    @property
    def rank(self) -> int:
        """Number of rows in the first factor."""
        return int(self.a.shape[0])


@dataclass(frozen=True)
class AdapterFile:
    """A LoRA adapter.

    Attributes:
        modules: factors by module name, such as "model.layers.0.self_attn.q_proj".
        digest: hash over everything that determines its outputs.
        invocation: token ids from whose last occurrence in a prompt on it applies (aLoRA); empty if it always does.
    """

    modules: dict[str, AdapterModule]
    digest: str
    invocation: tuple[int, ...]

    @property
    def is_zero(self) -> bool:
        """True if all second factors are zero, so that the adapter has no effect."""
        return not any(np.any(module.b) for module in self.modules.values())


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
    factors: dict[str, dict[str, NDArray[Any]]] = {}
    unknown: list[str] = []
    for name in tensors:
        found = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if found is None:
            unknown.append(name)
            continue
        array = np.asarray(from_torch(tensors[name]))
        _check_floats(name, array, where)
        kind, pair = _KINDS[found["kind"]], factors.setdefault(found["module"], {})
        if kind in pair:
            raise CheckpointError(f"{where}: each factor must be given once, got {name} under another name, too")
        pair[kind] = array
    if unknown:
        raise CheckpointError(
            f"{where}: each tensor must be a module's lora_A or lora_B weight, got {listed(unknown)}; other "
            "tensors are not supported"
        )
    if not factors:
        raise CheckpointError(f"{where} must have tensors, got none")
    scales = _Scales(config, where)
    modules = {name: _module(name, pair, scales, where) for name, pair in factors.items()}
    invocation = _invocation(config, where)
    return AdapterFile(modules, _digest(modules, invocation), invocation)


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
    init = config.get("init_lora_weights")
    if isinstance(init, str) and _CHANGING_BASE.fullmatch(init):
        raise CheckpointError(
            f"{where}: init_lora_weights must not change the base model, got {init!r}; save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion, or set true if the model served is the changed one"
        )


def _check_floats(name: str, array: NDArray[Any], where: str) -> None:
    """Raise CheckpointError unless a tensor is a matrix with finite floats."""
    is_float = array.dtype.kind == "f" or array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    if array.ndim != 2 or not is_float or not array.size:
        raise CheckpointError(
            f"{where}: {name} must be a float matrix, got shape {list(array.shape)} of {array.dtype.name}"
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
        self._rank = self._positive("r", config.get("r"))
        self._alpha = self._positive("lora_alpha", config.get("lora_alpha", config.get("r")))
        self._ranks, self._alphas = (
            {key: self._positive(f"{name}[{key!r}]", value) for key, value in self._patterns(config, name).items()}
            for name in ("rank_pattern", "alpha_pattern")
        )

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

    def _matching(self, patterns: Mapping[str, float | None], module: str, default: float | None) -> float | None:
        """Return the first value whose pattern matches the end of a module's name, as PEFT does."""
        for pattern, value in patterns.items():
            try:
                if re.match(rf"(.*\.)?({pattern})$", module):
                    return value
            except re.error as error:
                raise CheckpointError(f"{self._where}: {pattern!r} must be a pattern, got a fault: {error}") from None
        return default

    def _positive(self, name: str, value: Any) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise CheckpointError(f"{self._where}: {name} must be a positive number, got {value!r}")
        return float(value)


def _module(name: str, pair: Mapping[str, NDArray[Any]], scales: _Scales, where: str) -> AdapterModule:
    """Return a module's factors; CheckpointError if one is missing or their shapes do not fit each other."""
    if missing := [kind for kind, key in _KINDS.items() if key not in pair]:
        raise CheckpointError(f"{where}: {name} must have both lora_A and lora_B, got no {missing[0]}")
    a, b = pair["a"], pair["b"]
    if a.shape[0] != b.shape[1] or a.shape[0] > _MAX_RANK:
        raise CheckpointError(
            f"{where}: the factors of {name} must be [rank, in] and [out, rank] with a rank of at most {_MAX_RANK}, "
            f"got {list(a.shape)} and {list(b.shape)}"
        )
    return AdapterModule(a, b, scales.scale(name, a.shape[0]))


def _invocation(config: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Return an aLoRA's invocation tokens; CheckpointError unless they are token ids."""
    given = config.get("alora_invocation_tokens") or []
    if not isinstance(given, list) or {*map(type, given)} - {int} or (given and min(given) < 0):
        raise CheckpointError(f"{where}: alora_invocation_tokens must be a list of token ids, got {given!r}")
    return tuple(given)


def _digest(modules: Mapping[str, AdapterModule], invocation: tuple[int, ...]) -> str:
    """Return a hash over all names, scales, factors and invocation tokens."""
    state = hashlib.blake2b(json.dumps(invocation).encode(), digest_size=16, person=b"lora")
    for name in sorted(modules):
        a, b, scale = modules[name]
        state.update(json.dumps([name, scale, a.dtype.name, a.shape, b.dtype.name, b.shape]).encode())
        for array in (a, b):
            state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def module_names(name: str) -> Iterable[str]:
    """Yield the names under which a model may have an adapter's module: multimodal models' text parts have prefixes."""
    yield name
    for prefix in ("model.language_model.", "language_model.model.", "language_model.", "model.text_model."):
        if name.startswith(prefix):
            yield "model." + name.removeprefix(prefix)
            yield name.removeprefix(prefix)
    yield f"model.{name}"
