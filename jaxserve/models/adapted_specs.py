"""Matrices that LoRA adapters may change, and the checkpoint modules that these consist of."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxserve.api.lora_request import EMBEDDINGS, EXPERTS, LATENTS
from jaxserve.errors import ConfigError
from jaxserve.layers.kv_forms import Latents
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.layer_tensors import MoeNames
from jaxserve.models.params import EXPERT_MATRICES, ParamSpec
from jaxserve.weights.adapter_files import AdapterModule, module_names

EMBED, HEAD = ("embed",), ("lm_head",)
# Indices among gate, up and down projection in a stacked parameter; w1 to w3 are Mixtral's names.
_EXPERT_PARTS = {"gate_up_proj": (0, 1), "gate_proj": (0,), "w1": (0,), "up_proj": (1,), "w3": (1,)}
_EXPERT_PARTS |= {"down_proj": (2,), "w2": (2,)}
_EXPANSION = "kv_b_proj"  # MLA's matrix from latents to keys and values


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

    @property
    def names(self) -> str:
        """Names of the modules, for messages."""
        return ", ".join(part.module for part in self.parts)

    def num_rows(self, part: Part) -> int:
        """Return a module's number of outputs."""
        return sum(self.spec.hf_rows[part.start : part.stop])

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Number of outputs by module on a device."""
        return tuple(sum(self.local.hf_rows[part.start : part.stop]) for part in self.parts)

    @property
    def num_experts(self) -> int:
        """Number of experts' matrices that are concatenated on a device; 1 for a single matrix."""
        return self.local.num_matrices

    @property
    def num_parts(self) -> int:
        """Number of modules per matrix."""
        return len(self.parts) // self.spec.num_matrices

    @property
    def is_table(self) -> bool:
        """True for an embedding, as a matrix [D, V] that token ids choose columns of."""
        return self.spec.path == EMBED

    @property
    def has_vectors(self) -> bool:
        """True if adapters may have norms of rows beside the factors, or biases, which embeddings have not."""
        return self.spec.experts is None and not self.expands_latents

    @property
    def expands_latents(self) -> bool:
        """True for MLA's matrix from latents to keys and values, which attention absorbs in queries and outputs."""
        return self.spec.path[-1] == _EXPANSION

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
    both = list(zip(registry.param_specs(arch), registry.param_specs(local), strict=True))
    found = [AdaptedSpec(spec, own) for spec, own in both if _can_adapt(spec)]
    if EXPERTS in extras:
        found += [AdaptedSpec(*pair) for pair in zip(expert_specs(arch), expert_specs(local), strict=True)]
    if LATENTS in extras:
        found += [AdaptedSpec(spec, own) for spec, own in both if _is_expansion(spec, arch)]
    if EMBEDDINGS not in extras:
        return found
    for spec, own in zip(embeddings(arch), embeddings(local), strict=True):
        found.append(AdaptedSpec(*(map(_as_columns, (spec, own)) if spec.path == EMBED else (spec, own))))
    return found


def embeddings(arch: ArchConfig) -> list[ParamSpec]:
    """Return the specs for embedding and output projection; tied ones are separate, as adapters may change only one.

    Adapters do not change those in pipeline stages.
    """
    if not arch.stage.is_whole:
        return []
    specs = {spec.path: spec for spec in registry.param_specs(arch)}
    embed = specs[EMBED]
    tied = dataclasses.replace(embed, path=HEAD, hf_names=(f"{registry.family(arch).names.head}.weight",))
    return [embed] if arch.pooler is not None else [embed, specs.get(HEAD, tied)]


def expert_specs(arch: ArchConfig) -> list[ParamSpec]:
    """Return the specs for routed experts' matrices, each expert's modules under separate names."""
    parts = _expert_parts(arch)
    return [
        _separate(spec, parts)
        for spec in registry.param_specs(arch)
        if spec.experts is not None and spec.is_matrix and spec.path[-1] in EXPERT_MATRICES
    ]


def _separate(spec: ParamSpec, parts: Sequence[str]) -> ParamSpec:
    """Return a spec for experts' matrices with names by expert and part, as checkpoints have or had them."""
    if parts and not spec.stacked:
        return spec
    layer, _, name = spec.hf_names[0].removesuffix(".weight").rpartition(".")
    experts = layer if layer.endswith(".experts") else f"{layer}.experts"  # Granite's files lack this level
    own = (parts[:2] if spec.path[-1] == EXPERT_MATRICES[0] else parts[2:]) or [name]
    names = [f"{experts}.{index}.{part}.weight" for index in range(spec.num_matrices) for part in own]
    return dataclasses.replace(spec, hf_names=tuple(names), stacked=False, transposed=False)


def _expert_parts(arch: ArchConfig) -> Sequence[str]:
    """Return the names of an expert's gate, up and down projection; empty if gate and up projection are one matrix."""
    names = registry.family(arch).names.moe
    return (names.parts or MoeNames().parts) if isinstance(names, MoeNames) else ()


def separate_experts(modules: Mapping[str, AdapterModule], arch: ArchConfig) -> Iterator[tuple[str, AdapterModule]]:
    """Yield an adapter's modules, stacked experts' by expert and part.

    Raises:
        ConfigError: factors are stacked for another number of experts.
    """
    specs = expert_specs(arch)
    known = {spec.hf_names[0].rpartition(".experts.")[0]: spec.num_matrices for spec in specs}
    parts = _expert_parts(arch)
    for name, module in modules.items():
        layer, _, parameter = name.rpartition(".experts.")
        if module.a.ndim != 3 or parameter not in _EXPERT_PARTS:
            yield name, module
            continue
        if (own := next((each for each in module_names(layer) if each in known), None)) is None:
            yield name, module
            continue
        num_experts = known[own]
        targets = [parts[index] for index in _EXPERT_PARTS[parameter]] if parts else [parameter]
        if not {len(module.a), len(module.b)} <= {1, num_experts}:
            raise ConfigError(
                f"stacked factors of {name} must be for {num_experts} experts, or 1 if they share one, got "
                f"{len(module.a)} and {len(module.b)}"
            )
        for expert in range(num_experts):
            a, b = (factor[expert if len(factor) > 1 else 0] for factor in (module.a, module.b))
            for target, rows in zip(targets, np.split(b, len(targets)), strict=True):
                yield f"{own}.experts.{expert}.{target}", module._replace(a=a, b=rows)


def unknown_module(name: str, known: Sequence[str], arch: ArchConfig) -> str:
    """Return the error message for an adapter's module that cannot be adapted."""
    tensors = {hf_name.removesuffix(".weight") for spec in registry.param_specs(arch) for hf_name in spec.hf_names}
    for extra in (EMBEDDINGS, EXPERTS, LATENTS):
        known_with = {part.module for each in adapted_specs(arch, arch, (extra,)) for part in each.parts}
        if any(own in known_with for own in module_names(name)):
            return f"adapters of {name} need lora_extras with {extra!r}; start the engine with it"
    if any(own in tensors for own in module_names(name)):
        return f"adapters of {name} are not supported; train one without it"
    near = difflib.get_close_matches(name, known, 1, 0.0)
    hint = f"; the most similar one is {near[0]}" if near else ""
    return f"each module of an adapter must be in the model, {arch.architecture}, got {name}{hint}"


def _as_columns(embed: ParamSpec) -> ParamSpec:
    """Return an embedding's spec [V, D] as a matrix [D, V], which has token ids as inputs."""
    (V, D), (rows, columns) = embed.shape, embed.axes
    return dataclasses.replace(embed, shape=(D, V), axes=(columns, rows), hf_rows=(D,))


def _can_adapt(spec: ParamSpec) -> bool:
    """Return whether adapters may change a tensor: a matrix in a layer whose inputs are the step's tokens."""
    is_in_layer = spec.path[0] == "layers" and len(spec.path) == 3
    return is_in_layer and spec.is_matrix and not spec.is_array and spec.experts is None


def _is_expansion(spec: ParamSpec, arch: ArchConfig) -> bool:
    """Return whether a tensor expands latents; not if an indexer chooses them, as its queries come in blocks."""
    if spec.path[-1] != _EXPANSION:
        return False
    return type(arch.layers[int(spec.path[1])].attention.kv) is Latents
