"""Matrices that LoRA adapters may change, and the checkpoint modules that these consist of."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jaxserve.api.lora_request import EMBEDDINGS
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import ParamSpec

EMBED, HEAD = ("embed",), ("lm_head",)
_FIXED = ("router", "kv_b_proj")  # matrices in layers that are not only multiplied with tokens


class Part(NamedTuple):
    """Matrix rows that come from one checkpoint module.

    Attributes:
        module: name of the module.
        start: first entry of the module in `ParamSpec.hf_names`.
        stop: entry after the last one.
    """

    module: str
    start: int
    stop: int


@dataclass(frozen=True)
class AdaptedSpec:
    """A matrix with adapters.

    Attributes:
        spec: the whole matrix.
        local: its shard on a device.
    """

    spec: ParamSpec
    local: ParamSpec

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The matrix's modules, in order."""
        parts: list[Part] = []
        for index, name in enumerate(self.spec.hf_names):
            module = name.removesuffix(".weight")
            if parts and parts[-1].module == module:
                parts[-1] = parts[-1]._replace(stop=index + 1)
            else:
                parts.append(Part(module, index, index + 1))
        return tuple(parts)

    def num_rows(self, part: Part) -> int:
        """Return a module's number of outputs."""
        return sum(self.spec.hf_rows[part.start : part.stop])

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Number of outputs by module on a device."""
        return tuple(sum(self.local.hf_rows[part.start : part.stop]) for part in self.parts)

    @property
    def is_table(self) -> bool:
        """True for an embedding, as a matrix [D, V] that token ids choose columns of."""
        return self.spec.path == EMBED

    @property
    def num_inputs(self) -> int:
        """Inputs on a device."""
        return self.local.shape[1]

    @property
    def axes(self) -> tuple[str | None, str | None]:
        """Logical axes for rows and columns."""
        rows, columns = self.spec.axes
        return rows, columns


def adapted_specs(arch: ArchConfig, local: ArchConfig, extras: Collection[str]) -> list[AdaptedSpec]:
    """Return the matrices that adapters may change by factors.

    Args:
        arch: the whole model's sizes.
        local: a device's sizes.
        extras: enabled names in `LORA_EXTRAS`.
    """
    both = zip(registry.param_specs(arch), registry.param_specs(local), strict=True)
    found = [AdaptedSpec(spec, own) for spec, own in both if _can_adapt(spec)]
    if EMBEDDINGS not in extras:
        return found
    for spec, own in zip(embeddings(arch), embeddings(local), strict=True):
        found.append(AdaptedSpec(*(map(_as_columns, (spec, own)) if spec.path == EMBED else (spec, own))))
    return found


def embeddings(arch: ArchConfig) -> list[ParamSpec]:
    """Return the specs for embedding and output projection; tied ones are separate, as adapters may change only one."""
    specs = {spec.path: spec for spec in registry.param_specs(arch)}
    embed = specs[EMBED]
    tied = dataclasses.replace(embed, path=HEAD, hf_names=(f"{registry.family(arch).names.head}.weight",))
    return [embed] if arch.pooler is not None else [embed, specs.get(HEAD, tied)]


def _as_columns(embed: ParamSpec) -> ParamSpec:
    """Return an embedding's spec [V, D] as a matrix [D, V], which has token ids as inputs."""
    (V, D), (rows, columns) = embed.shape, embed.axes
    return dataclasses.replace(embed, shape=(D, V), axes=(columns, rows), hf_rows=(D,))


def _can_adapt(spec: ParamSpec) -> bool:
    """Return whether adapters may change a tensor: a matrix in a layer whose inputs are the step's tokens."""
    is_in_layer = spec.path[0] == "layers" and len(spec.path) == 3
    return is_in_layer and spec.is_matrix and not spec.is_array and spec.experts is None and spec.path[2] not in _FIXED
