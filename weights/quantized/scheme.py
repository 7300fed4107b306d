"""Schemes: how a checkpoint stores the matrix of each module, as values that are the same for all tools.

A matrix [O, I] is stored as elements and a scale for each row or block of rows and each group of columns:
`w = (q - zero) * scale`, where there may be a further scale of the whole tensor; or `w = q * scale - minimum`, which
also stands for the same value in all of a group.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxserve.weights.rows import TEXT_PART

Elements = Literal["int4", "int8", "e4m3", "e2m1"]
# How elements lie in a file: as they are; two in a byte, the low nibble first, of consecutive columns, or of
# consecutive rows by ModelOpt; in words of 32 bits along the rows of [O, I], or of [I, O] by GPTQ and by AWQ.
Packing = Literal["plain", "nibbles", "row_nibbles", "words", "gptq", "awq"]
_OfWeights = Literal["elements", "scale", "zero", "minimum", "order", "global_scale"]
Role = _OfWeights | Literal["input_factor", "input_scale", "input_zero"]
OPTIONAL: tuple[Role, ...] = ("input_factor",)  # modules lack factors that are in the norm before them
NIBBLES = ("int4", "e2m1")  # kinds of elements of four bits
_CLASSES = dict.fromkeys(
    ("embed_tokens", "embed_tokens_per_layer", "embed_in", "wte", "wpe"), "Embedding"
)  # others are linear
_CLASSES["conv1d"] = "Conv1d"
_CLASSES |= dict.fromkeys(("gate", "router", "shared_expert_gate"), "Router")  # parts of experts, never quantised
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


@dataclass(frozen=True)
class Activation:
    """Quantisation of the activations that a matrix multiplies.

    Attributes:
        elements: kind of the quantised values.
        group: number of consecutive values of a token that share a scale; None for all of them.
        dynamic: True if the scale is that of the values' maximum; else the checkpoint has one for all tokens. Groups of
            e2m1 that are not dynamic have scales of both kinds, as NVFP4 has.
        symmetric: False if there is a zero point beside each scale.
        power_of_two: True if scales are powers of two, as those of MX formats are.
    """

    elements: Literal["int8", "e4m3", "e2m1"]
    group: int | None
    dynamic: bool
    symmetric: bool = True
    power_of_two: bool = False

    def __str__(self) -> str:
        if self.elements == "e2m1" and not self.dynamic:
            return f"e2m1 activations in groups of {self.group}"
        kind = "dynamic" if self.dynamic else "static"
        zeros = "" if self.symmetric else " with zero points"
        groups = f"in groups of {self.group}" if self.group else "per token"
        return f"{self.elements} activations{zeros}, {kind}, {groups}"


@dataclass(frozen=True)
class Scheme:
    """Storage of one matrix.

    Attributes:
        name: name of the format in messages.
        elements: kind of the elements.
        packing: their place in the file.
        tensors: suffix of each tensor of the module, by its role; behind a dot unless it begins with `_`. An
            `input_factor` of each column multiplies activations before they are quantised.
        group: number of consecutive columns that share a scale; None for all of them.
        block_rows: number of consecutive rows that share a scale, in the file.
        scale_dtype: dtype of scales on devices, which has all values of that in the file: float32; float16 or e4m3 as
            there; bfloat16 for powers of two, or those themselves for experts.
        zero_offset: number that a file's zero points lack, added to whole words before they are unpacked.
        divides: True if `global_scale` divides the other scale.
        activation: quantisation of the activations; None if they stay as they are.
        stacked: True if the tensors are those of several matrices, which are the rows of one matrix here.
    """

    name: str
    elements: Elements
    packing: Packing
    tensors: tuple[tuple[Role, str], ...]
    group: int | None = None
    block_rows: int = 1
    scale_dtype: str = "float32"
    zero_offset: int = 0
    divides: bool = False
    activation: Activation | None = None
    stacked: bool = False

    @property
    def suffixes(self) -> dict[Role, str]:
        """Suffix of each tensor by its role."""
        return dict(self.tensors)

    def has(self, role: Role) -> bool:
        """Return whether a module has a tensor of this role."""
        return role in self.suffixes

    def names(self, module: str) -> dict[Role, str]:
        """Return the name of each tensor of a module by its role."""
        return {role: module + (suffix if suffix.startswith("_") else f".{suffix}") for role, suffix in self.tensors}

    @property
    def is_packed(self) -> bool:
        """True if devices hold two elements in a byte."""
        return self.elements in NIBBLES

    def __str__(self) -> str:
        rows = f" of {self.block_rows} rows" if self.block_rows > 1 else ""
        groups = f"groups of {self.group}{rows}" if self.group else "rows"
        zeros = " with zero points" if self.has("zero") else " with minima" if self.has("minimum") else ""
        order = " in activation order" if self.has("order") else ""
        activation = self.activation or "activations as they are"
        return f"{self.name}: {self.elements} weights by {groups}{zeros}{order}, {activation}"


@dataclass(frozen=True)
class Rule:
    """Scheme of the modules whose name or class a pattern matches; None if they are not quantised."""

    pattern: str
    scheme: Scheme | None

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches from the beginning of the name; `$` is part of the pattern."""
        return re.match(self.pattern, name) is not None


@dataclass(frozen=True)
class Schemes:
    """Scheme of every module of a checkpoint: that of the first rule that matches.

    Attributes:
        method: the checkpoint's `quant_method`; schemes of two tools are equal where they differ in it alone.
        rules: rules in their order; patterns match names of modules, or `class:` and a class.
        kv_cache: True if the checkpoint has scales for a quantised KV cache.
        is_multimodal: True if patterns match the names of modules in a multimodal checkpoint, of which the text part is
            served: its names have one more part there, in one of two places.
    """

    method: str = field(compare=False)
    rules: tuple[Rule, ...]
    kv_cache: bool = False
    is_multimodal: bool = False

    def of_module(self, name: str) -> Scheme | None:
        """Return the scheme of a module; its name also counts with the parts that other engines fuse as one."""
        parent, _, last = name.rpartition(".")
        names = [*self._stored(name), f"class:{_CLASSES.get(last, 'Linear')}"]
        if last in _FUSED:
            names += self._stored(f"{parent}.{_FUSED[last]}")
        return self._first(names)

    def of_tensor(self, name: str) -> Scheme | None:
        """Return the scheme of the module whose matrix has this name.

        A name without `.weight` is that of a parameter of a module that is not linear, such as all experts' matrices;
        patterns match it, and no class.
        """
        module, _, last = name.rpartition(".")
        if last == "weight":
            return self.of_module(module)
        return self._first(self._stored(name))

    def _stored(self, name: str) -> list[str]:
        """Return the names that a module of the text model may have in the checkpoint."""
        if not self.is_multimodal:
            return [name]
        first, dot, rest = name.partition(".")
        return [f"{TEXT_PART}{name}", f"{first}.{TEXT_PART}{rest}" if dot else name]

    def _first(self, names: Sequence[str]) -> Scheme | None:
        """Return the scheme of the first rule that matches one of these names."""
        return next((rule.scheme for rule in self.rules if any(map(rule.matches, names))), None)
