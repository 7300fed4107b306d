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

from jaxserve.api.lora_request import LORA_BIAS, MODULES_TO_SAVE, TRAINABLE_TOKENS, USE_DORA
from jaxserve.errors import ConfigError
from jaxserve.layers.adapted_experts import ExpertFactors, FloatExpertFactors, NativeExpertFactors
from jaxserve.layers.adapted_tables import FloatMatrices, NativeMatrices, TokenRows, WholeMatrices
from jaxserve.layers.adapters import RANK_GRAIN, Factors, FloatFactors, NativeFactors
from jaxserve.layers.sharding import named_sharding, num_parts, split_axes, tensor_size, whole_shape
from jaxserve.models.adapted_specs import (
    HEAD,
    AdaptedSpec,
    Part,
    adapted_specs,
    embeddings,
)
from jaxserve.models.adapter_checks import MAX_TRAINED_TOKENS, AdapterCheck
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params, ParamSpec, device_slices, stack_layers
from jaxserve.pallas_kernels import packed_linear
from jaxserve.pallas_kernels.packed_linear import PANEL_ROWS, Packer
from jaxserve.weights.adapter_files import AdapterFile, AdapterModule

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
            (rows, columns), count = each.axes, slots * each.num_experts
            if self.is_native:
                first, second = self._packed(each, count)
                b = [shape(second, (rows, None, None, None))]
                return self._experts(each, shape(first, ("expert", columns, None, None)), b)
            a = shape((count * each.num_parts * self.rank, each.num_inputs), ("expert", columns))
            b = [shape((count * size, self.rank), (rows, None)) for size in each.part_sizes[: each.num_parts]]
            return self._experts(each, a, b)

        def factors(each: AdaptedSpec) -> Factors | ExpertFactors:
            if each.spec.experts is not None:
                return experts(each)
            (rows, columns), num_ranks = each.axes, len(each.parts) * self.rank
            if each.is_table:
                a = shape((slots * each.num_inputs, self.table_rank), (columns, None))
            elif self._is_packed(each):
                a = shape(self._packed(each, slots)[0], (None, columns, None, None))
            else:
                a = shape((slots * num_ranks, each.num_inputs), (None, columns))
            if self._is_packed(each):
                b = [shape(self._packed(each, slots)[1], (rows, None, None, None))]
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

        def tokens(spec: ParamSpec, local: ParamSpec) -> TokenRows:
            rows = shape((slots * MAX_TRAINED_TOKENS, local.shape[1]), (None, None))
            return self._tokens(rows, shape((slots, MAX_TRAINED_TOKENS), (None, spec.axes[0]), jnp.int32))

        return self._tree(arch, mesh, factors, whole, tokens)

    def new(self, arch: ArchConfig, mesh: Mesh | None = None) -> Params:
        """Return empty stacks on a device: zeros of its shard's shapes. For jax.jit, in a shard_map with a mesh."""

        def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            local = leaf.shape if mesh is None else leaf.sharding.shard_shape(leaf.shape)
            return jnp.zeros(local, leaf.dtype)

        stacks: Params = jax.tree.map(zeros, self.abstract(arch, mesh))
        return stacks

    def _packed(self, each: AdaptedSpec, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes in panels of `count` matrices' first and second factors on a device.

        The second factors of all parts are one matrix, whose panels have the same rows as the model's.
        """
        sizes = each.part_sizes[: each.num_parts]
        a = packed_linear.abstract(count * len(sizes) * self.rank, each.num_inputs, self.dtype, num_matrices=count)
        b = packed_linear.abstract(count * sum(sizes), self.rank, self.dtype, num_matrices=count, gated=each.spec.gated)
        return a.weights.shape, b.weights.shape

    def place(
        self, adapter: AdapterFile, arch: ArchConfig, mesh: Mesh | None, model: ArchConfig | None = None
    ) -> Params:
        """Return an adapter's arrays on the host, in the shapes that `abstract` returns for a layout with one slot.

        Args:
            adapter: the adapter.
            arch: sizes of the whole model, or of a pipeline stage.
            mesh: devices over which it is split; None for one device.
            model: sizes of the whole model if `arch` is a stage.

        Raises:
            ConfigError: a module is not in the model, or has other sizes; see `AdapterCheck`.
        """
        model = model or arch
        check = AdapterCheck(model, self.specs(model, model), self.max_rank, self.extras)
        found, matrices, trained = check.modules(adapter), check.matrices(adapter), check.tokens(adapter)

        def factors(each: AdaptedSpec) -> Factors | ExpertFactors:
            modules = [found.get(part.module) for part in each.parts]
            a = np.concatenate([self._first(each, module) for module in modules])
            b = [self._second(each, part, module) for part, module in zip(each.parts, modules, strict=True)]
            if each.spec.experts is not None:
                return self._experts(each, *self._experts_arrays(each, a, b, mesh))
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
                shards = [_panels(shard) for shard in np.split(padded, count)]
                return self._whole(np.concatenate(shards), given, local.shape[0])
            return self._whole(padded, given, None)

        def tokens(spec: ParamSpec, local: ParamSpec) -> TokenRows:
            rows = np.zeros((MAX_TRAINED_TOKENS, spec.shape[1]), jnp.dtype(self.dtype))
            count = 1 if mesh is None else num_parts(mesh, split_axes(spec.axes))
            ids = np.full((count, MAX_TRAINED_TOKENS), -1, np.int32)
            if (own := trained.get(spec.path)) is not None:
                rows[: len(own.ids)] = self._stored_floats(own.rows, 1.0, spec.hf_names[0])
                device, index = np.divmod(own.ids, local.shape[0])
                ids[device, np.arange(len(own.ids))] = index
            return self._tokens(rows, ids.reshape(1, -1))

        return self._tree(arch, mesh, factors, whole, tokens, stack=lambda *arrays: np.stack(arrays))

    def specs(self, arch: ArchConfig, local: ArchConfig) -> list[AdaptedSpec]:
        """Return the matrices with factors; see `adapted_specs`."""
        return adapted_specs(arch, local, self.extras)

    def _tree(
        self,
        arch: ArchConfig,
        mesh: Mesh | None,
        factors: Callable[[AdaptedSpec], Factors | ExpertFactors],
        whole: Callable[[ParamSpec, ParamSpec], WholeMatrices],
        tokens: Callable[[ParamSpec, ParamSpec], TokenRows],
        stack: Any = None,
    ) -> Params:
        """Return a tree with the results of `factors` for each matrix, at its path in parameters.

        Args:
            arch: sizes of the whole model.
            mesh: devices over which the model is split; None for one device.
            factors: function of a matrix with factors.
            whole: function of a matrix that adapters may replace, whole and local; its results are in "whole".
            tokens: function of a matrix whose rows they may replace, likewise; its results are in "tokens".
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
        tables = list(zip(embeddings(arch), embeddings(local), strict=True))
        if MODULES_TO_SAVE in self.extras:
            tree["whole"] = {str(spec.path[0]): whole(spec, own) for spec, own in tables}
        if TRAINABLE_TOKENS in self.extras:
            tree["tokens"] = {str(spec.path[0]): tokens(spec, own) for spec, own in tables}
        if not self.is_scanned:
            return tree
        return stack_layers(tree, arch.period, stack or _stack_shapes, num_first=arch.num_first_layers)

    def _has(self, extra: str, each: AdaptedSpec) -> bool:
        """Return whether a matrix's outputs may have the vectors of an extra."""
        return extra in self.extras and each.has_vectors and not (each.is_table and extra == LORA_BIAS)

    def _is_packed(self, each: AdaptedSpec) -> bool:
        """Return whether factors are packed for the native CPU kernels."""
        return self.is_native and not each.expands_latents

    @property
    def reads_weights(self) -> bool:
        """True if `set_adapter` needs the model's parameters."""
        return USE_DORA in self.extras

    @staticmethod
    def _whole(stack: Any, given: Any, num_packed: int | None) -> WholeMatrices:
        """Return whole matrices; `num_packed` is the row count if they are packed, None otherwise."""
        return FloatMatrices(stack, given) if num_packed is None else NativeMatrices(stack, given, num_packed)

    @staticmethod
    def _tokens(rows: Any, ids: Any) -> TokenRows:
        """Return trained tokens."""
        return TokenRows(rows, ids)

    def _experts(self, each: AdaptedSpec, a: Any, b: Sequence[Any]) -> ExpertFactors:
        """Return routed experts' factors."""
        sizes = each.part_sizes[: each.num_parts]
        factors = NativeExpertFactors if self.is_native else FloatExpertFactors
        return factors(a, tuple(b), sizes, each.num_experts)

    def _factors(self, each: AdaptedSpec, a: Any, b: Sequence[Any], bias: Any, scale: Any) -> Factors:
        arrays = a, tuple(b), bias, scale
        return NativeFactors(*arrays, each.part_sizes) if self._is_packed(each) else FloatFactors(*arrays)

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
            return np.ascontiguousarray(padded), self._seconds(each, b)
        if mesh is None or each.spec.split_dimension is None:
            return self._first_panels(each, a), self._seconds(each, b)
        if each.spec.split_dimension == 1:
            count = num_parts(mesh, split_axes(each.spec.axes))
            shards = [np.asarray(device_slices(each.spec, [a], index, mesh)[0][0]) for index in range(count)]
            return np.concatenate([self._first_panels(each, x) for x in shards], axis=1), self._seconds(each, b)
        axis = 0 if self._is_packed(each) else 1
        stored = [self._seconds(each, shards) for shards in self._shards(each, np.concatenate(b), mesh)]
        return self._first_panels(each, a), [np.concatenate(x, axis=axis) for x in zip(*stored, strict=True)]

    def _experts_arrays(
        self, each: AdaptedSpec, a: NDArray[Any], b: Sequence[NDArray[Any]], mesh: Mesh | None
    ) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        """Return experts' first factors [E * P * rank, in] and second ones, by expert and part, as stacks have them."""
        shards: list[list[Any]] = [list(b)]
        if mesh is not None and each.spec.split_dimension == 0:
            count = num_parts(mesh, split_axes(each.spec.axes))
            shards = [device_slices(each.spec, b, index, mesh)[0] for index in range(count)]
        if self.is_native:
            seconds = [
                _panels(np.concatenate(shard), len(shard) // each.num_parts, gated=each.spec.gated) for shard in shards
            ]
            return _panels(a, each.spec.num_matrices), [np.concatenate(seconds)]
        by_part = ([x for shard in shards for x in shard[part :: each.num_parts]] for part in range(each.num_parts))
        return a, list(map(np.concatenate, by_part))

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

    def _first_panels(self, each: AdaptedSpec, a: NDArray[Any]) -> NDArray[Any]:
        """Return a device's first factors [P * rank, in] as their stack has them."""
        return _panels(a) if self._is_packed(each) else a

    def _seconds(self, each: AdaptedSpec, b: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return a device's second factors [out, rank], by part, as their stacks have them."""
        if self._is_packed(each):
            return [_panels(np.concatenate(b), gated=each.spec.gated)]
        return [np.ascontiguousarray(x.T) for x in b]


def _panels(matrix: NDArray[Any], num_matrices: int = 1, *, gated: bool = False) -> NDArray[Any]:
    """Return matrices, one after another, in panels for the native kernels."""
    rows, columns = matrix.shape
    shapes = packed_linear.abstract(rows, columns, matrix.dtype, num_matrices=num_matrices, gated=gated)
    packer = Packer(shapes)
    packer.write(0, matrix)
    return packer.panels


def _stack_shapes(*leaves: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape of equal arrays stacked along a new leading axis."""
    leaf, sharding = leaves[0], leaves[0].sharding
    if sharding is not None:
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jax.ShapeDtypeStruct((len(leaves), *leaf.shape), leaf.dtype, sharding=sharding)
