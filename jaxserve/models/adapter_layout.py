"""AdapterLayout: which matrices LoRA adapters may change, and how their factors are stacked on the devices.

A fused matrix has factors for each of its checkpoint modules, such as the projections to queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from numpy.typing import NDArray

from jaxserve.api.lora_request import LORA_BIAS, MODULES_TO_SAVE, USE_DORA
from jaxserve.errors import ConfigError
from jaxserve.layers.adapted_experts import ExpertFactors, FloatExpertFactors, NativeExpertFactors
from jaxserve.layers.adapters import (
    RANK_GRAIN,
    Factors,
    FloatFactors,
    FloatMatrices,
    NativeFactors,
    NativeMatrices,
    WholeMatrices,
)
from jaxserve.layers.sharding import named_sharding, num_parts, split_axes, tensor_size, whole_shape
from jaxserve.models.adapted_specs import (
    HEAD,
    AdaptedSpec,
    Part,
    adapted_specs,
    embeddings,
    separate_experts,
    unknown_module,
)
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params, ParamSpec, device_slices, stack_layers
from jaxserve.pallas_kernels.packed_linear import PANEL_ROWS
from jaxserve.weights.adapter_files import AdapterFile, AdapterModule, module_names

_LANES = 128  # elements in a vector of a TPU


@dataclass(frozen=True)
class AdapterLayout:
    """Stacked factors of all adapters of a model, as its programs take them.

    Attributes:
        num_slots: maximum adapters on the devices.
        max_rank: maximum rank of adapters.
        dtype: dtype of the factors.
        is_native: True if they are packed for the native CPU kernels.
        is_scanned: True if the model's layers are stacked for a scan.
        extras: features of adapters that have memory; see `LORA_EXTRAS`.
    """

    num_slots: int
    max_rank: int
    dtype: str
    is_native: bool
    is_scanned: bool
    extras: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """Rank of the stacks; smaller ones are padded by zeros."""
        return -(-self.max_rank // RANK_GRAIN) * RANK_GRAIN

    @property
    def table_rank(self) -> int:
        """Columns of embeddings' first factors: TPUs, on which layers are scanned, only read whole vectors in place."""
        return -(-self.rank // _LANES) * _LANES if self.is_scanned else self.rank

    def abstract(self, arch: ArchConfig, mesh: Mesh | None) -> Params:
        """Return shapes, dtypes and shardings of the stacks.

        Args:
            arch: sizes of the whole model.
            mesh: devices over which the model is split; None for one device.
        """
        slots = self.num_slots

        def shape(
            local: Sequence[int], axes: Sequence[str | None], dtype: DTypeLike = self.dtype
        ) -> jax.ShapeDtypeStruct:
            if mesh is None:
                return jax.ShapeDtypeStruct(tuple(local), jnp.dtype(dtype))
            joined = whole_shape(mesh, local, axes)
            return jax.ShapeDtypeStruct(joined, jnp.dtype(dtype), sharding=named_sharding(mesh, axes))

        def experts(each: AdaptedSpec) -> ExpertFactors:
            count, sizes = slots * each.num_experts, each.part_sizes[: each.num_parts]
            if not self.is_native:
                a = shape((count * each.num_parts * self.rank, each.num_inputs), (None, None))
                return self._experts(each, a, [shape((count * size, self.rank), (None, None)) for size in sizes])
            num_panels = [count * -(-size // PANEL_ROWS) for size in (each.num_parts * self.rank, *sizes)]
            num_inputs = [each.num_inputs, *[self.rank] * len(sizes)]
            a, *b = (
                shape((panels, inputs, 1, PANEL_ROWS), (None,) * 4)
                for panels, inputs in zip(num_panels, num_inputs, strict=True)
            )
            return self._experts(each, a, b)

        def factors(each: AdaptedSpec) -> Factors | ExpertFactors:
            if each.spec.experts is not None:
                return experts(each)
            (rows, columns), num_ranks = each.axes, len(each.parts) * self.rank
            if each.is_table:
                a = shape((slots * each.num_inputs, self.table_rank), (columns, None))
            elif self.is_native:
                a = shape(
                    (slots * num_ranks // PANEL_ROWS, each.num_inputs, 1, PANEL_ROWS), (None, columns, None, None)
                )
            else:
                a = shape((slots * num_ranks, each.num_inputs), (None, columns))
            if self.is_native:
                b = [
                    shape((slots * -(-size // PANEL_ROWS), self.rank, 1, PANEL_ROWS), (rows, None, None, None))
                    for size in each.part_sizes
                ]
            else:
                b = [shape((slots * self.rank, size), (None, rows)) for size in each.part_sizes]
            bias = None
            if self._has(LORA_BIAS, each):
                axis = columns if each.spec.split_dimension == 1 else rows
                bias = shape((slots, sum(each.part_sizes)), (None, axis), jnp.float32)
            scale = (
                shape((slots, sum(each.part_sizes)), (None, rows), jnp.float32) if self._has(USE_DORA, each) else None
            )
            return self._factors(each, a, b, bias, scale)

        def whole(spec: ParamSpec, local: ParamSpec) -> WholeMatrices:
            (V, D), axes = local.shape, spec.axes
            given = shape((slots,), (None,), jnp.bool_)
            if self.is_native and spec.path == HEAD:
                panels = shape((slots * -(-V // PANEL_ROWS), D, 1, PANEL_ROWS), (axes[0], None, None, None))
                return self._whole(panels, given, V)
            return self._whole(shape((slots * V, D), axes), given, None)

        return self._tree(arch, mesh, factors, whole)

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
        found, matrices = self.check(adapter, arch), self._check_whole(adapter, arch)

        def factors(each: AdaptedSpec) -> Factors | ExpertFactors:
            modules = [found.get(part.module) for part in each.parts]
            a = np.concatenate([self._first(each, module) for module in modules])
            b = [self._second(each, part, module) for part, module in zip(each.parts, modules, strict=True)]
            if each.spec.experts is not None:
                by_part = [b[part :: each.num_parts] for part in range(each.num_parts)]
                stored = [np.concatenate([self._panels(x) if self.is_native else x for x in own]) for own in by_part]
                return self._experts(each, self._stored(a, transposed=False), stored)
            bias = self._bias(each, modules, mesh) if self._has(LORA_BIAS, each) else None
            scale = self._magnitudes(each, modules, mesh) if self._has(USE_DORA, each) else None
            return self._factors(each, *self._split(each, a, b, mesh), bias, scale)

        def whole(spec: ParamSpec, local: ParamSpec) -> WholeMatrices:
            matrix = matrices.get(spec.path)
            given = np.array([matrix is not None])
            stored = np.zeros(spec.shape, jnp.dtype(self.dtype))
            if matrix is not None:
                stored = self._stored_floats(matrix, 1.0, spec.hf_names[0])
            count = 1 if mesh is None else num_parts(mesh, split_axes(spec.axes))
            padded = np.pad(stored, ((0, count * local.shape[0] - len(stored)), (0, 0)))
            if self.is_native and spec.path == HEAD:
                shards = [self._stored(shard, transposed=True) for shard in np.split(padded, count)]
                return self._whole(np.concatenate(shards), given, local.shape[0])
            return self._whole(padded, given, None)

        return self._tree(arch, mesh, factors, whole, stack=lambda *arrays: np.stack(arrays))

    def check(self, adapter: AdapterFile, arch: ArchConfig) -> dict[str, AdapterModule]:
        """Return an adapter's factors by the model's module names.

        Raises:
            ConfigError: a module is not in the model or cannot be adapted, or its sizes or rank do not fit.
        """
        specs = self.specs(arch, arch)
        known = {part.module: (each, part) for each in specs for part in each.parts}
        found: dict[str, AdapterModule] = {}
        for name, module in separate_experts(adapter.modules, arch):
            own = next((each for each in module_names(name) if each in known), None)
            if own is None:
                raise ConfigError(unknown_module(name, list(known), arch))
            if own in found:
                raise ConfigError(f"an adapter must have one pair of factors for {own}, got another one named {name}")
            each, part = known[own]
            wanted = each.num_rows(part), each.spec.shape[1]
            got = module.b.shape[-2], module.a.shape[-1]
            if each.is_table != module.is_table:
                kind = "lora_embedding_A and lora_embedding_B" if each.is_table else "lora_A and lora_B"
                raise ConfigError(f"an adapter must have {kind} for {own}, got other factors; save it with PEFT")
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
            if each.spec.experts is not None and not (module.bias is None and module.magnitude is None):
                raise ConfigError(f"adapters of routed experts must have factors only, got vectors for {name}")
            if module.bias is not None:
                self._require(LORA_BIAS, f"biases, as of {name},")
            if module.magnitude is not None:
                if module.is_table:
                    raise ConfigError(f"adapters of embeddings must not have magnitudes (DoRA), got some for {name}")
                self._require(USE_DORA, f"magnitudes (DoRA), as of {name},")
            found[own] = module
        return found

    def _check_whole(self, adapter: AdapterFile, arch: ArchConfig) -> dict[tuple[str | int, ...], NDArray[Any]]:
        """Return the matrices that replace the model's, by path.

        Raises:
            ConfigError: a matrix is none of embedding and head, or its shape is another.
        """
        specs = {spec.hf_names[0].removesuffix(".weight"): spec for spec in embeddings(arch)}
        found: dict[tuple[str | int, ...], NDArray[Any]] = {}
        shapes = {name: matrix.shape for name, matrix in adapter.whole.items()}
        for name, shape in (shapes | adapter.base).items():
            own = next((specs[each] for each in module_names(name) if each in specs), None)
            if own is None:
                raise ConfigError(
                    f"whole matrices of adapters must be in {list(specs)}, got {name}; train the adapter without it in "
                    "modules_to_save"
                )
            if shape != own.shape:
                raise ConfigError(
                    f"{name} of the adapter must have the model's shape, {list(own.shape)}, got {list(shape)}; it was "
                    "trained on a model with another vocabulary or size"
                )
            if name in adapter.whole:
                self._require(MODULES_TO_SAVE, f"whole matrices, as {name},")
                found[own.path] = adapter.whole[name]
        return found

    def _require(self, extra: str, feature: str) -> None:
        """Raise ConfigError unless the stacks have an extra."""
        if extra not in self.extras:
            raise ConfigError(
                f"an adapter with {feature} needs lora_extras with {extra!r}, got {list(self.extras)}; start the "
                f"engine with lora_extras={[*self.extras, extra]}"
            )

    def specs(self, arch: ArchConfig, local: ArchConfig) -> list[AdaptedSpec]:
        """Return the matrices with factors; see `adapted_specs`."""
        return adapted_specs(arch, local, self.extras)

    def _tree(
        self,
        arch: ArchConfig,
        mesh: Mesh | None,
        factors: Callable[[AdaptedSpec], Factors | ExpertFactors],
        whole: Callable[[ParamSpec, ParamSpec], WholeMatrices],
        stack: Any = None,
    ) -> Params:
        """Return a tree with the results of `factors` for each matrix, at its path in parameters.

        Args:
            arch: sizes of the whole model.
            mesh: devices over which the model is split; None for one device.
            factors: function of a matrix with factors.
            whole: function of a matrix that adapters may replace, whole and local; its results are in "whole".
            stack: function that stacks layers' arrays for a scan.
        """
        local = arch.local(tensor_size(mesh))
        layers: list[Params] = [{} for _ in range(arch.num_layers)]
        tree: Params = {"layers": layers}
        for each in self.specs(arch, local):
            path, result = each.spec.path, factors(each)
            if path[0] == "layers":
                layers[int(path[1])][str(path[2])] = result
            else:
                tree[str(path[0])] = result
        if MODULES_TO_SAVE in self.extras:
            both = zip(embeddings(arch), embeddings(local), strict=True)
            tree["whole"] = {str(spec.path[0]): whole(spec, own) for spec, own in both}
        if not self.is_scanned:
            return tree
        return stack_layers(tree, arch.period, stack or _stack_shapes, num_first=arch.num_first_layers)

    def _has(self, extra: str, each: AdaptedSpec) -> bool:
        """Return whether a matrix's outputs may have the vectors of an extra."""
        return extra in self.extras and not each.is_table and each.spec.experts is None

    @property
    def reads_weights(self) -> bool:
        """True if `set_adapter` needs the model's parameters."""
        return USE_DORA in self.extras

    @staticmethod
    def _whole(stack: Any, given: Any, num_packed: int | None) -> WholeMatrices:
        """Return whole matrices; `num_packed` is the row count if they are packed, None otherwise."""
        return FloatMatrices(stack, given) if num_packed is None else NativeMatrices(stack, given, num_packed)

    def _experts(self, each: AdaptedSpec, a: Any, b: Sequence[Any]) -> ExpertFactors:
        """Return routed experts' factors."""
        sizes = each.part_sizes[: each.num_parts]
        factors = NativeExpertFactors if self.is_native else FloatExpertFactors
        return factors(a, tuple(b), sizes, each.num_experts)

    def _factors(self, each: AdaptedSpec, a: Any, b: Sequence[Any], bias: Any, scale: Any) -> Factors:
        arrays = a, tuple(b), bias, scale
        return NativeFactors(*arrays, each.part_sizes) if self.is_native else FloatFactors(*arrays)

    def _first(self, each: AdaptedSpec, module: AdapterModule | None) -> NDArray[Any]:
        """Return a module's first factor [rank, in], padded; zeros without a module."""
        a = np.zeros((self.rank, each.spec.shape[1]), jnp.dtype(self.dtype))
        if module is not None:
            a[: module.rank] = self._stored_floats(module.a, 1.0, each.names)
        return a

    def _second(self, each: AdaptedSpec, part: Part, module: AdapterModule | None) -> NDArray[Any]:
        """Return a module's scaled second factor [out, rank], padded; zeros without a module."""
        b = np.zeros((each.num_rows(part), self.rank), jnp.dtype(self.dtype))
        if module is not None:
            b[:, : module.rank] = self._stored_floats(module.b, module.scale, each.names)
        return b

    def _bias(self, each: AdaptedSpec, modules: Sequence[AdapterModule | None], mesh: Mesh | None) -> NDArray[Any]:
        """Return the modules' scaled biases [1, out] in the layout of the stacks; zeros for modules without one."""
        sizes = [each.num_rows(part) for part in each.parts]
        biases = [
            np.zeros(size, np.float32)
            if module is None or module.bias is None
            else module.bias.astype(np.float32) * module.scale
            for size, module in zip(sizes, modules, strict=True)
        ]
        return np.concatenate(self._by_device(each, biases, mesh))[None]

    def _magnitudes(
        self, each: AdaptedSpec, modules: Sequence[AdapterModule | None], mesh: Mesh | None
    ) -> NDArray[Any]:
        """Return the modules' magnitudes [1, out] in the layout of the stacks; NaN for modules without them."""
        sizes = [each.num_rows(part) for part in each.parts]
        magnitudes = [
            np.full(size, np.nan, np.float32)
            if module is None or module.magnitude is None
            else module.magnitude.astype(np.float32)
            for size, module in zip(sizes, modules, strict=True)
        ]
        is_by_rows = each.spec.split_dimension == 0
        return np.concatenate(self._by_device(each, magnitudes, mesh) if is_by_rows else magnitudes)[None]

    def _stored_floats(self, factor: NDArray[Any], scale: float, names: str) -> NDArray[Any]:
        """Return a scaled factor in the stacks' dtype; ConfigError if it overflows.

        All rows are multiplied by all second factors, and zero times infinity would spoil rows with other adapters.
        """
        with np.errstate(over="ignore"):
            rounded = (scale * factor.astype(np.float32)).astype(jnp.dtype(self.dtype))
        if not np.isfinite(rounded.astype(np.float32)).all():
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
        if each.is_table:
            count = 1 if mesh is None else num_parts(mesh, split_axes(each.spec.axes))
            padded = np.pad(a.T, ((0, count * each.num_inputs - a.shape[1]), (0, self.table_rank - self.rank)))
            return np.ascontiguousarray(padded), [self._stored(x, transposed=True) for x in b]
        if mesh is None or each.spec.split_dimension is None:
            return self._stored(a, transposed=False), [self._stored(x, transposed=True) for x in b]
        if each.spec.split_dimension == 1:
            count = num_parts(mesh, split_axes(each.spec.axes))
            shards = [np.asarray(device_slices(each.spec, [a], index, mesh)[0][0]) for index in range(count)]
            stored = [self._stored(shard, transposed=False) for shard in shards]
            return np.concatenate(stored, axis=1), [self._stored(x, transposed=True) for x in b]
        axis = 0 if self.is_native else 1
        joined = [
            np.concatenate([self._stored(x, transposed=True) for x in shards], axis=axis)
            for shards in zip(*self._shards(each, np.concatenate(b), mesh), strict=True)
        ]
        return self._stored(a, transposed=False), joined

    def _by_device(self, each: AdaptedSpec, vectors: Sequence[NDArray[Any]], mesh: Mesh | None) -> list[NDArray[Any]]:
        """Return vectors with an element per output, by part, in device order; see `abstract`.

        Devices with some of the inputs sum their outputs: the first one has the whole vectors, others have zeros.
        """
        if mesh is None or each.spec.split_dimension is None:
            return list(vectors)
        if each.spec.split_dimension == 1:
            num_others = num_parts(mesh, split_axes(each.spec.axes)) - 1
            return [*vectors, *[np.zeros_like(x) for x in vectors] * num_others]
        return [x for shards in self._shards(each, np.concatenate(vectors), mesh) for x in shards]

    @staticmethod
    def _shards(each: AdaptedSpec, rows: NDArray[Any], mesh: Mesh) -> list[list[NDArray[Any]]]:
        """Return the rows of a matrix split by rows, as each device has them by part; zeros pad the last."""
        entries = np.split(rows, np.cumsum(each.spec.hf_rows)[:-1])
        shards = []
        for index in range(num_parts(mesh, split_axes(each.spec.axes))):
            own = np.concatenate(device_slices(each.spec, entries, index, mesh)[0])
            padding = [(0, sum(each.part_sizes) - len(own)), *[(0, 0)] * (rows.ndim - 1)]
            shards.append(np.split(np.pad(own, padding), np.cumsum(each.part_sizes)[:-1]))
        return shards

    def _stored(self, matrix: NDArray[Any], *, transposed: bool) -> NDArray[Any]:
        """Return a device's matrix [out, in] as its stack has it: packed, or else as it is or transposed."""
        if not self.is_native:
            return np.ascontiguousarray(matrix.T) if transposed else matrix
        return self._panels(matrix)

    @staticmethod
    def _panels(matrix: NDArray[Any]) -> NDArray[Any]:
        """Return a matrix in panels for the native kernels."""
        padded = np.pad(matrix, ((0, -len(matrix) % PANEL_ROWS), (0, 0)))
        panels = padded.reshape(-1, PANEL_ROWS, matrix.shape[1])
        return np.ascontiguousarray(np.swapaxes(panels, 1, 2)[:, :, None])


def _stack_shapes(*leaves: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape of equal arrays stacked along a new leading axis."""
    leaf, sharding = leaves[0], leaves[0].sharding
    if sharding is not None:
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jax.ShapeDtypeStruct((len(leaves), *leaf.shape), leaf.dtype, sharding=sharding)
