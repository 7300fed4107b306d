"""Schemes: how a checkpoint stores each module's matrix, as values that are the same for all tools.

A matrix [O, I] is stored as elements and a scale for each row, or row block, and each column group:
`w = (q - zero) * scale`, perhaps with a further scale for the whole tensor; or `w = q * scale - minimum`, which can
also represent a group with equal values.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxserve.weights.rows import TEXT_PART, VISION_PART, other_part

Elements = Literal["int4", "int8", "e4m3", "e2m1"]
# Element layout in a file: unpacked; two per byte, the low nibble first, from consecutive columns or (ModelOpt)
# consecutive rows; in 32-bit words along the rows of [O, I] or, by GPTQ and AWQ, of [I, O].
Packing = Literal["plain", "nibbles", "row_nibbles", "words", "gptq", "awq"]
Role = Literal[
    "elements", "scale", "zero", "minimum", "order", "global_scale", "input_factor", "input_scale", "input_zero"
]
Suffixes = tuple[tuple[Role, str], ...]  # a module's tensor suffixes
OPTIONAL: tuple[Role, ...] = ("input_factor",)  # absent if the preceding norm includes the factors
NIBBLES = ("int4", "e2m1")  # four-bit elements
_CLASSES = dict.fromkeys(
    ("embed_tokens", "embed_tokens_per_layer", "embed_in", "wte", "wpe"), "Embedding"
)  # others are linear
_CLASSES["conv1d"] = "Conv1d"
_CLASSES |= dict.fromkeys(("gate", "router", "shared_expert_gate"), "Router")  # never quantised
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


@dataclass(frozen=True)
class Activation:
    """Quantisation of a linear layer's inputs.

    Attributes:
        elements: element type.
        group: number of consecutive values in a token that share a scale; None for all of them.
        dynamic: True if scales follow from the values' maximum; otherwise the checkpoint has one scale for all tokens.
            Static e2m1 groups have both scales, as in NVFP4.
        symmetric: False if each scale has a zero point.
        power_of_two: True if scales are powers of two, as in MX formats.
    """

    elements: Literal["int8", "e4m3", "e2m1"]
    group: int | None
    dynamic: bool
    symmetric: bool = True
    power_of_two: bool = False

    def __str__(self) -> str:
        if self.elements == "e2m1" and not self.dynamic:
            return f"e2m1 activations in groups of {self.group}"
        zeros = "" if self.symmetric else " with zero points"
        groups = f"in groups of {self.group}" if self.group else "per token"
        return f"{self.elements} activations{zeros}, {'dynamic' if self.dynamic else 'static'}, {groups}"


@dataclass(frozen=True)
class Scheme:
    """Storage of one matrix.

    Attributes:
        name: format name in messages.
        elements: element type.
        packing: element layout in the file.
        tensors: the module's tensor suffixes by role; a dot precedes it unless it begins with `_`. The
            `input_factor` of each column scales activations before they are quantised.
        group: number of consecutive columns that share a scale; None for all of them.
        block_rows: number of consecutive rows that share a scale in the file.
        scale_dtype: dtype of scales on devices, which represents every scale in the file: float32; float16 or e4m3 as
            stored; for powers of two bfloat16, or e8m0 for experts.
        zero_offset: amount by which stored zero points are too low, added to whole words before unpacking.
        divides: True if `global_scale` divides the other scale.
        activation: quantisation of the activations; None if they are not quantised.
        stacked: True if each tensor stacks several matrices, which become the rows of one matrix here.
    """

    name: str
    elements: Elements
    packing: Packing
    tensors: Suffixes
    group: int | None = None
    block_rows: int = 1
    scale_dtype: str = "float32"
    zero_offset: int = 0
    divides: bool = False
    activation: Activation | None = None
    stacked: bool = False

    @property
    def suffixes(self) -> dict[Role, str]:
        """Tensor suffixes by role."""
        return dict(self.tensors)

    def has(self, role: Role) -> bool:
        """Return whether modules have a tensor with this role."""
        return role in self.suffixes

    def names(self, module: str) -> dict[Role, str]:
        """Return the names of a module's tensors by role."""
        return {role: module + (suffix if suffix.startswith("_") else f".{suffix}") for role, suffix in self.tensors}

    def rounding_inputs(self) -> "Scheme":
        """Return the scheme with inputs rounded to int8, unless the checkpoint specifies them or weights are e4m3."""
        if self.activation is not None or self.elements == "e4m3":
            return self
        return replace(self, activation=Activation("int8", self.group, dynamic=True))

    @property
    def is_packed(self) -> bool:
        """True if devices hold two elements per byte."""
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
    """Scheme for the modules whose name or class matches a pattern; None if they are not quantised."""

    pattern: str
    scheme: Scheme | None

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches from the start of the name; patterns contain their own `$`."""
        return re.match(self.pattern, name) is not None


@dataclass(frozen=True)
class Schemes:
    """Scheme for every module in a checkpoint: the first rule that matches decides.

    Attributes:
        method: the checkpoint's `quant_method`, which does not count when schemes are compared.
        rules: rules, the first one first; patterns match module names, or `class:` and a class.
        kv_cache: True if the checkpoint has scales for a quantised KV cache.
        is_multimodal: True if patterns match module names in a multimodal checkpoint. Its text part's names have one
            more component there, at one of two positions.
    """

    method: str = field(compare=False)
    rules: tuple[Rule, ...]
    kv_cache: bool = False
    is_multimodal: bool = False

    def for_module(self, name: str) -> Scheme | None:
        """Return a module's scheme; rules may also name the fused module that other engines make of it."""
        parent, _, last = name.rpartition(".")
        names = [*self._stored(name), f"class:{_CLASSES.get(last, 'Linear')}"]
        if last in _FUSED:
            names += self._stored(f"{parent}.{_FUSED[last]}")
        return self._first(names)

    def for_tensor(self, name: str) -> Scheme | None:
        """Return the scheme for the matrix with this tensor name.

        A name without `.weight` belongs to a module that is not linear, such as the stacked experts: patterns are
        matched against the name, never a class.
        """
        module, _, last = name.rpartition(".")
        if last == "weight":
            return self.for_module(module)
        return self._first(self._stored(name))

    def rounding_inputs(self) -> "Schemes":
        """Return the schemes with `Scheme.rounding_inputs` for every module."""
        rules = (replace(rule, scheme=rule.scheme and rule.scheme.rounding_inputs()) for rule in self.rules)
        return replace(self, rules=tuple(rules))

    def _stored(self, name: str) -> list[str]:
        """Return the names that a module may have in the checkpoint, which may be multimodal."""
        if other_part(name) is not None:
            parent, dot, rest = name.removeprefix("model.").partition(".")
            bare = [f"{parent}.{rest}", f"{parent}{VISION_PART}{rest}"] if dot else [parent]
            return [*bare, *(f"model.{each}" for each in bare)]
        if not self.is_multimodal:
            return [name]
        first, dot, rest = name.partition(".")
        return [f"{TEXT_PART}{name}", f"{first}.{TEXT_PART}{rest}" if dot else name]

    def _first(self, names: Sequence[str]) -> Scheme | None:
        """Return the scheme in the first rule that matches one of the names; None if none does."""
        return next((rule.scheme for rule in self.rules if any(map(rule.matches, names))), None)
