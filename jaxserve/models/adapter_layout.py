"""AdapterLayout: which matrices LoRA adapters may change, and how their factors are stacked on the devices.

A fused matrix has factors for each of its checkpoint modules, such as the projections to queries, keys and values.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int
from numpy.typing import NDArray

from jaxserve.errors import ConfigError
from jaxserve.layers.adapters import RANK_GRAIN, AdaptedMatrix, Factors, FloatFactors, NativeFactors, write_slot
from jaxserve.layers.sharding import named_sharding, num_parts, split_axes, tensor_size, whole_shape
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params, ParamSpec, ScannedLayers, device_slices, stack_layers
from jaxserve.pallas_kernels.packed_linear import PANEL_ROWS
from jaxserve.weights.adapter_files import AdapterFile, AdapterModule, module_names

_FIXED = ("router", "kv_b_proj")  # matrices in layers that are not only multiplied with tokens


class Part(NamedTuple):
    """Rows of a matrix that come from one checkpoint module.

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
        """Modules of the matrix, in order."""
        parts: list[Part] = []
        for index, name in enumerate(self.spec.hf_names):
            module = name.removesuffix(".weight")
            if parts and parts[-1].module == module:
                parts[-1] = parts[-1]._replace(stop=index + 1)
            else:
                parts.append(Part(module, index, index + 1))
        return tuple(parts)

    def num_rows(self, part: Part) -> int:
        """Return the outputs of a module."""
        return sum(self.spec.hf_rows[part.start : part.stop])

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Outputs of each module on a device."""
        return tuple(sum(self.local.hf_rows[part.start : part.stop]) for part in self.parts)

    @property
    def num_inputs(self) -> int:
        """Inputs on a device."""
        return self.local.shape[1]

    @property
    def axes(self) -> tuple[str | None, str | None]:
        """Logical axes of rows and columns."""
        rows, columns = self.spec.axes
        return rows, columns


@dataclass(frozen=True)
class AdapterLayout:
    """Stacked factors of all adapters of a model, as its programs take them.

    Attributes:
        num_slots: maximum adapters on the devices.
        max_rank: maximum rank of adapters.
        dtype: dtype of the factors.
        is_native: True if they are packed for the native CPU kernels.
        is_scanned: True if the model's layers are stacked for a scan.
    """

    num_slots: int
    max_rank: int
    dtype: str
    is_native: bool
    is_scanned: bool

    @property
    def rank(self) -> int:
        """Rank of the stacks; smaller ones are padded by zeros."""
        return -(-self.max_rank // RANK_GRAIN) * RANK_GRAIN

    def abstract(self, arch: ArchConfig, mesh: Mesh | None) -> Params:
        """Return shapes, dtypes and shardings of the stacks.

        Args:
            arch: sizes of the whole model.
            mesh: devices over which the model is split; None for one device.
        """
        slots = self.num_slots

        def shape(local: Sequence[int], axes: Sequence[str | None]) -> jax.ShapeDtypeStruct:
            if mesh is None:
                return jax.ShapeDtypeStruct(tuple(local), jnp.dtype(self.dtype))
            whole = whole_shape(mesh, local, axes)
            return jax.ShapeDtypeStruct(whole, jnp.dtype(self.dtype), sharding=named_sharding(mesh, axes))

        def factors(each: AdaptedSpec) -> Factors:
            (rows, columns), num_ranks = each.axes, len(each.parts) * self.rank
            if self.is_native:
                a = shape(
                    (slots * num_ranks // PANEL_ROWS, each.num_inputs, 1, PANEL_ROWS), (None, columns, None, None)
                )
                b = [
                    shape((slots * -(-size // PANEL_ROWS), self.rank, 1, PANEL_ROWS), (rows, None, None, None))
                    for size in each.part_sizes
                ]
            else:
                a = shape((slots * num_ranks, each.num_inputs), (None, columns))
                b = [shape((slots * self.rank, size), (None, rows)) for size in each.part_sizes]
            return self._factors(each, a, b)

        return self._tree(arch, mesh, factors)

    def new(self, arch: ArchConfig, mesh: Mesh | None = None) -> Params:
        """Return empty stacks on a device: zeros of its shard's shapes. For jax.jit, in a shard_map with a mesh."""

        def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            local = leaf.shape if mesh is None else leaf.sharding.shard_shape(leaf.shape)
            return jnp.zeros(local, leaf.dtype)

        stacks: Params = jax.tree.map(zeros, self.abstract(arch, mesh))
        return stacks

    def place(self, adapter: AdapterFile, arch: ArchConfig, mesh: Mesh | None) -> Params:
        """Return an adapter's arrays on the host, in the shapes that `abstract` returns for a layout with one slot.

        Raises:
            ConfigError: a module is not in the model, or has other sizes; see `check`.
        """
        found = self.check(adapter, arch)

        def factors(each: AdaptedSpec) -> Factors:
            modules = [found.get(part.module) for part in each.parts]
            a = np.concatenate([self._first(each, module) for module in modules])
            b = [self._second(each, part, module) for part, module in zip(each.parts, modules, strict=True)]
            return self._factors(each, *self._split(each, a, b, mesh))

        return self._tree(arch, mesh, factors, stack=lambda *arrays: np.stack(arrays))

    def check(self, adapter: AdapterFile, arch: ArchConfig) -> dict[str, AdapterModule]:
        """Return an adapter's factors by the model's module names.

        Raises:
            ConfigError: a module is not in the model or cannot be adapted, or its sizes or rank do not fit.
        """
        specs = self.specs(arch, arch)
        known = {part.module: (each, part) for each in specs for part in each.parts}
        found: dict[str, AdapterModule] = {}
        for name, module in adapter.modules.items():
            own = next((each for each in module_names(name) if each in known), None)
            if own is None:
                raise ConfigError(_unknown_module(name, list(known), arch))
            if own in found:
                raise ConfigError(f"an adapter must have one pair of factors for {own}, got another one named {name}")
            each, part = known[own]
            wanted = each.num_rows(part), each.spec.shape[1]
            got = module.b.shape[0], module.a.shape[1]
            if wanted != got:
                raise ConfigError(
                    f"the adapter must fit {own} with {wanted[1]} inputs and {wanted[0]} outputs, got factors for "
                    f"{got[1]} and {got[0]}; it was trained on another model"
                )
            if module.rank > self.max_rank:
                raise ConfigError(
                    f"the rank of an adapter must be at most max_lora_rank, {self.max_rank}, got {module.rank} in "
                    f"{name}; raise max_lora_rank"
                )
            found[own] = module
        return found

    @staticmethod
    def specs(arch: ArchConfig, local: ArchConfig) -> list[AdaptedSpec]:
        """Return the matrices that adapters may change.

        Args:
            arch: sizes of the whole model.
            local: sizes of a device's shard.
        """
        both = zip(registry.param_specs(arch), registry.param_specs(local), strict=True)
        return [AdaptedSpec(spec, own) for spec, own in both if _can_adapt(spec)]

    def _tree(self, arch: ArchConfig, mesh: Mesh | None, factors: Any, stack: Any = None) -> Params:
        """Return a tree with the results of `factors` for each matrix, at the layers' paths in parameters."""
        layers: list[Params] = [{} for _ in range(arch.num_layers)]
        for each in self.specs(arch, arch.local(tensor_size(mesh))):
            _, layer, name = each.spec.path
            layers[int(layer)][str(name)] = factors(each)
        tree: Params = {"layers": layers}
        if not self.is_scanned:
            return tree
        return stack_layers(tree, arch.period, stack or _stack_shapes, num_first=arch.num_first_layers)

    def _factors(self, each: AdaptedSpec, a: Any, b: Sequence[Any]) -> Factors:
        return NativeFactors(a, tuple(b), each.part_sizes) if self.is_native else FloatFactors(a, tuple(b))

    def _first(self, each: AdaptedSpec, module: AdapterModule | None) -> NDArray[Any]:
        """Return a module's first factor [rank, in], padded; zeros without a module."""
        a = np.zeros((self.rank, each.spec.shape[1]), jnp.dtype(self.dtype))
        if module is not None:
            a[: module.rank] = self._stored_floats(module.a, 1.0, each)
        return a

    def _second(self, each: AdaptedSpec, part: Part, module: AdapterModule | None) -> NDArray[Any]:
        """Return a module's scaled second factor [out, rank], padded; zeros without a module."""
        b = np.zeros((each.num_rows(part), self.rank), jnp.dtype(self.dtype))
        if module is not None:
            b[:, : module.rank] = self._stored_floats(module.b, module.scale, each)
        return b

    def _stored_floats(self, factor: NDArray[Any], scale: float, each: AdaptedSpec) -> NDArray[Any]:
        """Return a scaled factor in the stacks' dtype; ConfigError if it overflows.

        All rows are multiplied by all second factors, and zero times infinity would spoil rows with other adapters.
        """
        with np.errstate(over="ignore"):
            rounded = (scale * factor.astype(np.float32)).astype(jnp.dtype(self.dtype))
        if not np.isfinite(rounded.astype(np.float32)).all():
            names = ", ".join(part.module for part in each.parts)
            raise ConfigError(f"an adapter's scaled factors must be finite in {self.dtype}, got larger ones in {names}")
        return rounded

    def _split(
        self, each: AdaptedSpec, a: NDArray[Any], b: Sequence[NDArray[Any]], mesh: Mesh | None
    ) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        """Return whole factors in the layout of the stacks: each device's shard, joined along the dimension it splits.

        Args:
            each: the matrix.
            a: first factors [P * rank, in].
            b: second factors [out, rank] by part.
            mesh: devices; None for one.
        """
        if mesh is None or each.spec.split_dimension is None:
            return self._stored(a, transposed=False), [self._stored(x, transposed=True) for x in b]
        count = num_parts(mesh, split_axes(each.spec.axes))
        if each.spec.split_dimension == 1:
            shards = [np.asarray(device_slices(each.spec, [a], index, mesh)[0][0]) for index in range(count)]
            stored = [self._stored(shard, transposed=False) for shard in shards]
            return np.concatenate(stored, axis=1), [self._stored(x, transposed=True) for x in b]
        bounds = np.cumsum(each.part_sizes)[:-1]
        entries = np.split(np.concatenate(b), np.cumsum(each.spec.hf_rows)[:-1])
        by_device = [
            np.split(np.concatenate(device_slices(each.spec, entries, index, mesh)[0]), bounds)
            for index in range(count)
        ]
        axis = 0 if self.is_native else 1
        joined = [
            np.concatenate([self._stored(x, transposed=True) for x in shards], axis=axis)
            for shards in zip(*by_device, strict=True)
        ]
        return self._stored(a, transposed=False), joined

    def _stored(self, matrix: NDArray[Any], *, transposed: bool) -> NDArray[Any]:
        """Return a device's matrix [out, in] as its stack has it: packed, or else as it is or transposed."""
        if not self.is_native:
            return np.ascontiguousarray(matrix.T) if transposed else matrix
        padded = np.pad(matrix, ((0, -len(matrix) % PANEL_ROWS), (0, 0)))
        panels = padded.reshape(-1, PANEL_ROWS, matrix.shape[1])
        return np.ascontiguousarray(np.swapaxes(panels, 1, 2)[:, :, None])


def with_adapters(params: Params, adapters: Params | None) -> Params:
    """Return parameters whose matrices add the terms of adapters; unchanged without adapters.

    Args:
        params: the model's parameters.
        adapters: stacks, as from `AdapterLayout.new`.
    """
    if adapters is None:
        return params

    def wrap(p: Params, own: Mapping[str, Factors]) -> Params:
        return {**p, **{name: AdaptedMatrix(p[name], factors) for name, factors in own.items()}}

    return {**params, "layers": _map_layers(wrap, params["layers"], adapters["layers"])}


def set_adapter(stacks: Params, slot: Int[Array, ""], new: Params) -> Params:
    """Return donated stacks with an adapter's arrays, as from `AdapterLayout.place`, at an index."""
    layers, own = stacks["layers"], new["layers"]
    if not isinstance(layers, ScannedLayers):
        return {**stacks, "layers": write_slot(layers, slot, own)}
    periodic = write_slot(layers.periodic, slot, own.periodic, axis=1)
    rest, first = write_slot((layers.rest, layers.first), slot, (own.rest, own.first))
    return {**stacks, "layers": ScannedLayers(periodic, rest, first)}


def _map_layers(wrap: Any, layers: Any, adapters: Any) -> Any:
    """Return layers, listed or stacked, with `wrap` applied to each layer's parameters and adapters."""
    if not isinstance(layers, ScannedLayers):
        return [wrap(p, own) for p, own in zip(layers, adapters, strict=True)]
    parts = ([wrap(p, own) for p, own in zip(*both, strict=True)] for both in zip(layers, adapters, strict=True))
    periodic, rest, first = parts
    return ScannedLayers(tuple(periodic), rest, first)


def _can_adapt(spec: ParamSpec) -> bool:
    """Return whether adapters may change a tensor: a matrix in a layer whose inputs are the step's tokens."""
    is_in_layer = spec.path[0] == "layers" and len(spec.path) == 3
    return is_in_layer and spec.is_matrix and not spec.is_array and spec.experts is None and spec.path[2] not in _FIXED


def _unknown_module(name: str, known: Sequence[str], arch: ArchConfig) -> str:
    """Return the error message for an adapter's module that cannot be adapted."""
    tensors = {hf_name.removesuffix(".weight") for spec in registry.param_specs(arch) for hf_name in spec.hf_names}
    if any(own in tensors for own in module_names(name)):
        return f"adapters of {name} are not supported; train one without it"
    near = difflib.get_close_matches(name, known, 1, 0.0)
    hint = f"; the most similar one is {near[0]}" if near else ""
    return f"each module of an adapter must be in the model, {arch.architecture}, got {name}{hint}"


def _stack_shapes(*leaves: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape of equal arrays stacked along a new leading axis."""
    leaf, sharding = leaves[0], leaves[0].sharding
    if sharding is not None:
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jax.ShapeDtypeStruct((len(leaves), *leaf.shape), leaf.dtype, sharding=sharding)
