"""Quantised checkpoints, written while they are computed: one layer at a time is in memory.

A layer is read in float32, run on the calibration sequences for its matrices' statistics, smoothed and rounded, and run
once more, so that the next layer is calibrated on the inputs that it will get.
"""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray
from tqdm import tqdm

from jaxserve import weights
from jaxserve.errors import ConfigError
from jaxserve.models import decoder, registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import POSITION_EMBED, VISION, Params, ParamSpec
from jaxserve.tools.quantizer.calibration import calibration_sequences
from jaxserve.tools.quantizer.grid import Grid
from jaxserve.tools.quantizer.layer import Stats, empty_stats, layer_outputs, layer_stats
from jaxserve.tools.quantizer.layout import encode_tensors, quantization_config, scale_dtype, stored_tensors
from jaxserve.tools.quantizer.rounding import gptq, output_error, round_to_nearest, search_scales
from jaxserve.tools.quantizer.scheme import BLOCK_SIZE, GROUP_SIZES, QuantizeOptions, Scheme
from jaxserve.tools.quantizer.smoothing import Channels, InputStats, balance_factors, fold_factors, search_factors
from jaxserve.weights.rows import hf_row_counts, hf_shapes, leaf_at

logger = logging.getLogger(__name__)

_BATCH_TOKENS = 4096  # tokens per batch through a layer


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """Summary of a written checkpoint.

    Attributes:
        num_bytes: size of its tensors.
        errors: each matrix's squared output error on the calibration sequences, relative to the squared outputs;
            without sequences, its squared weight error, relative to the squared weights.
        group_size: number of weights per scale; None if a whole row or block shares one.
    """

    num_bytes: int
    errors: Mapping[str, float]
    group_size: int | None


def quantize_checkpoint(
    source: str | os.PathLike[str], target: str | os.PathLike[str], options: QuantizeOptions, *, use_tqdm: bool = False
) -> QuantizedCheckpoint:
    """Write a checkpoint with quantised layers in the compressed-tensors layout.

    Embedding, head, norms, biases and a vision tower keep their dtype. `target` appears once it is complete.

    Args:
        source: directory with an unquantised checkpoint.
        target: directory that is absent or empty.
        options: options for the run.
        use_tqdm: show progress if stderr is a terminal.

    Raises:
        ConfigError: the model, its sizes or the calibration file do not suit the scheme.
        CheckpointError: `source` cannot be read, or `target` is taken.
        OSError: `target` cannot be written.
    """
    source = Path(source)
    hf_config = weights.read_config(source)
    arch = registry.from_hf_config(hf_config)
    _check_supported(arch, source)
    grid = make_grid(options, arch)
    specs = registry.param_specs(registry.from_hf_config(hf_config, with_images=True))
    checkpoint = weights.open_checkpoint(source, specs)
    sequences = None
    if options.kind.is_calibrated:
        sequences = calibration_sequences(
            source,
            options.calibration,
            num_sequences=options.num_sequences,
            sequence_len=min(options.sequence_len, arch.max_position),
            vocab_size=arch.vocab_size,
        )
    elif options.calibration is not None:
        logger.warning("%s rounds to the nearest and does not read the calibration file", options.scheme)
    run = _Run(checkpoint, arch, specs, options, grid, sequences)
    with tqdm(total=run.num_steps, desc="Quantizing", disable=None if use_tqdm else True, leave=False) as bar:
        run.stepped = bar.update
        floats = [spec.hf_names[0] for spec in specs if spec.path[0] == VISION]
        config = {**hf_config, "quantization_config": quantization_config(options.kind, grid, floats)}
        tensors = run.tensors()
        weights.derive(source, target, tensors, config, max_shard_bytes=options.max_shard_bytes)
    group_size = grid.columns if options.kind.in_groups else None
    return QuantizedCheckpoint(sum(tensor.nbytes for tensor in tensors.values()), run.errors, group_size)


def _check_supported(arch: ArchConfig, source: Path) -> None:
    """Raise ConfigError for a model whose layers cannot be quantised one by one; `source` is its checkpoint."""
    if arch.schemes is not None:
        raise ConfigError(
            f"the source must be an unquantised checkpoint, but {source} is quantised by {arch.schemes.method}"
        )
    attentions = {(layer.kv, layer.k_eq_v, layer.kv_source) for layer in arch.attention_layers}
    is_broken = {
        "no experts, whose matrices are not quantised yet": arch.experts is not None,
        "attention of one kind of heads, as layers are quantised one by one": (
            len(attentions) > 1 or arch.per_layer_embeddings is not None
        ),
        "attention in all layers, as states of layers are not calibrated yet": arch.state is not None,
    }
    for rule in (rule for rule, broken in is_broken.items() if broken):
        raise ConfigError(
            f"the model must have {rule}, got {arch.architecture}; "
            'quantise it while it is loaded with quantization="int8"'
        )


def make_grid(options: QuantizeOptions, arch: ArchConfig) -> Grid:
    """Return the grid that `options.scheme` has for a model's matrices.

    Raises:
        ConfigError: the model's layout or matrix sizes do not suit the scheme.
    """
    specs = [spec for spec in registry.param_specs(arch) if _is_quantized(spec)]
    if any(spec.transposed for spec in specs):
        raise ConfigError(
            f"matrices must be stored as [out, in] for compressed-tensors, got [in, out] in {arch.architecture}; "
            "it has no layout for them"
        )
    scheme, sizes = options.kind, sorted({spec.shape[1] for spec in specs})
    if scheme.smoothing and not registry.family(arch).folds:
        raise ConfigError(f"{options.scheme} needs a model whose norms can take factors, got {arch.architecture}")
    rows, columns = 1, None
    if scheme.in_blocks:
        rows = columns = BLOCK_SIZE
        if any(size % BLOCK_SIZE for size in sizes):
            raise ConfigError(f"{options.scheme} needs input sizes that are multiples of {BLOCK_SIZE}, got {sizes}")
    if scheme.in_groups:
        columns = options.group_size or next((g for g in GROUP_SIZES if all(s % g == 0 for s in sizes)), None)
        if columns is None or any(size % columns for size in sizes):
            raise ConfigError(
                f"group_size must divide the input sizes of all matrices, {sizes}, got {columns or GROUP_SIZES}; "
                "pass another --group-size"
            )
    return Grid(scheme.bits, scheme.is_float, rows, columns, scale_dtype(arch.dtype))


def _is_quantized(spec: ParamSpec) -> bool:
    """Return whether a parameter is a matrix in a layer; others keep their dtype."""
    return spec.is_matrix and spec.path[0] == "layers"


@dataclass(frozen=True)
class _PendingTensor:
    """Tensor that is computed when it is written, that is when numpy asks for its array.

    Attributes:
        shape: shape of the array.
        dtype: dtype of the array.
        read: function that computes the array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], NDArray[Any]]

    @property
    def nbytes(self) -> int:
        """Size of the array."""
        return prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self.read()


class _Run:
    """Computation of a quantised checkpoint, layer after layer, driven by whoever reads its tensors in their order.

    Args:
        checkpoint: unquantised checkpoint.
        arch: its model, or the text part.
        specs: specs for all tensors in it.
        options: scheme and calibration options.
        grid: values that quantised weights can have.
        sequences: token ids [sequences, tokens] for calibration; None for schemes without.

    Attributes:
        errors: error of each finished matrix; see `QuantizedCheckpoint`.
        stepped: function that is called with the number of finished steps.
    """

    def __init__(
        self,
        checkpoint: weights.OpenCheckpoint,
        arch: ArchConfig,
        specs: Sequence[ParamSpec],
        options: QuantizeOptions,
        grid: Grid,
        sequences: NDArray[np.int32] | None,
    ) -> None:
        self._checkpoint, self._arch, self._options, self._grid = checkpoint, arch, options, grid
        self._layers = [[x for x in specs if x.path[:2] == ("layers", layer)] for layer in range(arch.num_layers)]
        self._others = [spec for spec in specs if spec.path[0] != "layers"]
        self._sequences = None if sequences is None else _batches(sequences)
        self._inputs: list[NDArray[Any]] = []  # hidden states before the current layer, batch by batch
        self._done: dict[str, NDArray[Any]] = {}  # the current layer's tensors that are not written yet
        self.errors: dict[str, float] = {}
        self.stepped: Callable[[int], object] = lambda _: None

    @property
    def num_steps(self) -> int:
        """Number of steps: two per batch and layer, and one per matrix."""
        num_batches = 0 if self._sequences is None else len(self._sequences)
        return sum(2 * num_batches + sum(map(_is_quantized, specs)) for specs in self._layers)

    def tensors(self) -> dict[str, Any]:
        """Return all tensors of the new checkpoint. Reading them, in their order, computes layer by layer."""
        found: dict[str, Any] = {
            name: self._checkpoint.tensors[name] for spec in self._others for name in spec.hf_names
        }
        for layer, specs in enumerate(self._layers):
            for name, struct in self._shapes(specs):
                found[name] = _PendingTensor(struct.shape, struct.dtype, self._reader(layer, name))
        return found

    def _shapes(self, specs: Sequence[ParamSpec]) -> Iterator[tuple[str, jax.ShapeDtypeStruct]]:
        """Yield name, shape and dtype of every tensor that a layer's parameters have in the new checkpoint."""
        for spec in specs:
            for name, shape in hf_shapes(spec).items():
                if _is_quantized(spec):
                    yield from stored_tensors(name, shape, self._options.kind, self._grid).items()  # type: ignore[arg-type]
                else:
                    yield name, jax.ShapeDtypeStruct(shape, self._checkpoint.tensors[name].dtype)

    def _reader(self, layer: int, name: str) -> Callable[[], NDArray[Any]]:
        """Return the function that returns a tensor's array, and that quantises its layer first if it is not yet."""

        def read() -> NDArray[Any]:
            if name not in self._done:
                assert not self._done, "tensors are read in their order"
                self._quantize_layer(layer)
            return self._done.pop(name)

        return read

    def _quantize_layer(self, layer: int) -> None:
        """Calibrate, smooth and round a layer; keep its tensors in `_done`, and its outputs as the next inputs."""
        specs = [dataclasses.replace(spec, path=spec.path[2:]) for spec in self._layers[layer]]
        matrices = {str(spec.path[0]): spec for spec in specs if spec.is_matrix}
        p = self._checkpoint.load(specs, jnp.float32)
        stats: Stats = {}
        if self._sequences is not None:
            if layer == 0:
                self._inputs = self._embedded(self._sequences)
            stats = empty_stats(p, list(matrices))
            for x in self._inputs:
                stats = layer_stats(p, self._arch, layer, jnp.asarray(x), stats)
                self.stepped(1)
        if self._options.kind.smoothing is not None:
            p, stats = self._smoothed(p, specs, matrices, stats)
        for spec in specs:
            if not spec.is_matrix:
                self._keep(spec, leaf_at(p, spec.path))
        for name, spec in matrices.items():
            p[name] = self._round(spec, p[name], stats.pop(name, None))
            self.stepped(1)
        for index, x in enumerate(self._inputs):
            self._inputs[index] = np.asarray(layer_outputs(p, self._arch, layer, jnp.asarray(x)))
            self.stepped(1)

    def _embedded(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[Any]]:
        """Return the embeddings of each batch of token ids, which are the first layer's inputs."""
        wanted = (("embed",), (POSITION_EMBED,), ("final_norm",))
        params = self._checkpoint.load([spec for spec in self._others if spec.path[:1] in wanted], jnp.float32)
        embed = jax.jit(decoder.embed_tokens, static_argnums=1)

        def hidden(ids: NDArray[np.int32]) -> NDArray[Any]:
            """Return the embeddings [sequences, tokens, D] of token ids."""
            positions = np.tile(np.arange(ids.shape[1]), len(ids))
            return np.asarray(embed(params, self._arch, ids.reshape(-1), positions)).reshape(*ids.shape, -1)

        return [hidden(ids) for ids in sequences]

    def _smoothed(
        self, p: Params, specs: Sequence[ParamSpec], matrices: Mapping[str, ParamSpec], stats: Stats
    ) -> tuple[Params, Stats]:
        """Return a layer's parameters, and its statistics, after the scheme's smoothing has moved factors per channel.

        Args:
            p: parameters of the layer.
            specs: specs of all its parameters.
            matrices: specs of its matrices, by name.
            stats: statistics of the matrices' inputs.
        """
        method, family, stats = self._options.kind.smoothing, registry.family(self._arch), dict(stats)
        for fold in family.folds:
            if method == "smoothquant" and fold.part is not None:
                continue  # the paper does not change these inputs
            channels, weight = Channels.from_fold(fold, matrices), p[fold.target]
            if method == "awq":
                factors = search_factors(weight, stats[fold.target], channels, self._grid)
            else:
                strength = self._options.smoothing_strength
                factors = balance_factors(weight, stats[fold.target], channels, strength)
            source = next(spec for spec in specs if spec.path[0] == fold.source)
            dtype = self._checkpoint.tensors[source.hf_names[0]].dtype
            p, inputs = fold_factors(p, fold, matrices, factors, dtype, family.norm_offset)
            stats[fold.target] = stats[fold.target].divided(inputs)
        return p, stats

    def _round(self, spec: ParamSpec, weight: Array, stats: InputStats | None) -> Array:
        """Round a matrix, keep its tensors for the file and its error, and return the rounded weights."""
        counts = hf_row_counts(spec)
        in_parts = self._grid.rows > 1  # each checkpoint tensor has its own blocks
        names = [[name] for name in counts] if in_parts else [list(counts)]
        sizes = tuple(sum(counts[name] for name in group) for group in names)
        rounded = _rounded(weight, stats, sizes, self._options.kind, self._grid)
        for group, codes, scale in zip(names, rounded.codes, rounded.scales, strict=True):
            self._add_tensors({name: counts[name] for name in group}, np.asarray(codes), np.asarray(scale))
        self.errors[", ".join(counts)] = float(rounded.error)
        return rounded.values

    def _add_tensors(self, counts: Mapping[str, int], codes: NDArray[Any], scale: NDArray[Any]) -> None:
        """Keep the tensors of checkpoint matrices, which have `counts` rows each of `codes` and `scale`."""
        start = 0
        for name, num_rows in counts.items():
            rows = slice(start, start + num_rows)
            scales = scale if len(counts) == 1 else scale[rows]
            self._done |= encode_tensors(name, codes[rows], scales, self._options.kind, self._grid)
            start += num_rows

    def _keep(self, spec: ParamSpec, array: Array) -> None:
        """Keep an unquantised parameter's tensors for the file, in the dtypes that the source has."""
        start = 0
        for name, num_rows in hf_row_counts(spec).items():
            dtype = self._checkpoint.tensors[name].dtype
            self._done[name] = np.asarray(array[start : start + num_rows]).astype(dtype)
            start += num_rows


class _Rounded(NamedTuple):
    """A rounded matrix.

    Attributes:
        codes: codes of each part, which is rounded separately.
        scales: scales of each part.
        values: rounded weights of the whole matrix.
        error: relative error; see `QuantizedCheckpoint.errors`.
    """

    codes: list[Array]
    scales: list[Array]
    values: Array
    error: Array


@partial(jax.jit, static_argnums=(2, 3, 4))
def _rounded(weight: Array, stats: InputStats | None, sizes: tuple[int, ...], scheme: Scheme, grid: Grid) -> _Rounded:
    """Round a matrix by the scheme, in parts with `sizes` rows; one program for each shape.

    Args:
        weight: matrix [out, in].
        stats: statistics of its inputs; None rounds to the nearest values.
        sizes: rows of each part, which has scales of its own.
        scheme: rounding method.
        grid: grid of the codes.
    """
    parts = jnp.split(weight, np.cumsum(sizes)[:-1])
    codes, scales = map(list, zip(*(_choose(scheme, grid, part, stats) for part in parts), strict=True))
    values = jnp.concatenate([grid.decode(*part) for part in zip(codes, scales, strict=True)])
    return _Rounded(codes, scales, values, _relative_error(weight, values, stats))


def _choose(scheme: Scheme, grid: Grid, weight: Array, stats: InputStats | None) -> tuple[Array, Array]:
    """Return a matrix's codes and scales by the scheme's rounding method, nearest values if there are no `stats`."""
    if scheme.rounding == "nearest" or stats is None:
        return round_to_nearest(weight, grid)
    scale = search_scales(weight, stats.gram, grid)
    if scheme.rounding == "gptq":
        return gptq(weight, stats.gram, scale, grid), scale
    return grid.encode(weight, scale), scale


def _relative_error(weight: Array, values: Array, stats: InputStats | None) -> Array:
    """Return the squared error of rounded `values` relative to the squared outputs, or weights without `stats`."""
    if stats is None:
        error, total = jnp.sum(jnp.square(weight - values)), jnp.sum(jnp.square(weight))
    else:
        error, total = output_error(weight - values, stats.gram), output_error(weight, stats.gram)
    return error / jnp.where(total == 0, 1, total)


def _batches(sequences: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    """Divide sequences [sequences, tokens] into batches of equal size, so that layers with one spec share a program."""
    count, length = sequences.shape
    size = next(n for n in range(max(1, min(count, _BATCH_TOKENS // length)), 0, -1) if count % n == 0)
    return np.split(sequences, count // size)
