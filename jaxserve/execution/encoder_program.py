"""The encoder program: the vision tower encodes images and writes their embeddings to the encoder cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from jaxserve.models.params import Params, ScannedLayers
from jaxserve.models.vision import tower
from jaxserve.models.vision.arch import VisionArch
from jaxserve.models.vision.encoder import TowerState
from jaxserve.models.vision.inputs import EncoderInputs, TowerImage

if TYPE_CHECKING:
    from jaxserve.scheduling.step_plan import EncoderRun

Encode = Callable[[Any, Array, EncoderInputs, Array], Array]

_NO_ROW = np.iinfo(np.int32).max  # out of range, dropped


def make_encode(arch: VisionArch) -> Encode:
    """Return the program (params, cache, inputs, rows) -> cache that encodes images into the encoder cache's rows.

    To be jitted with the cache donated. Rows out of range are padding.
    """

    def encode(
        params: Any, cache: Float[Array, "N features"], inputs: EncoderInputs, rows: Int[Array, " E"]
    ) -> Float[Array, "N features"]:
        with jax.named_scope("encode"):
            embeddings = tower.encode(params, arch, inputs)
        return cache.at[rows].set(embeddings.astype(cache.dtype), mode="drop")

    return encode


class TowerPrograms(NamedTuple):
    """Programs that encode images in parts.

    Attributes:
        begin: (params, inputs) -> state before the first layer.
        layer: (layer's params, state, numbers) -> state after it, to be jitted with the state donated. Numbers are the
            layer's index in its stack, and those of `tower.layer_numbers`.
        finish: (params, cache, state, inputs, rows) -> cache, to be jitted with the cache donated. Inputs have no
            patches.
    """

    begin: Callable[[Any, EncoderInputs], TowerState]
    layer: Callable[[Any, TowerState, Array], TowerState]
    finish: Callable[[Any, Array, TowerState, EncoderInputs, Array], Array]


def make_parts(arch: VisionArch, *, is_stacked: bool = False) -> TowerPrograms:
    """Return the programs that encode images in parts, with one call to `layer` per layer in the tower."""

    def layer(p: Any, state: TowerState, numbers: Int[Array, " 3"]) -> TowerState:
        own = jax.tree.map(lambda stack: stack[numbers[0]], p) if is_stacked else p
        with jax.named_scope("encode"):
            return tower.run_layer(own, arch, state, numbers[1:])

    def finish(
        params: Any,
        cache: Float[Array, "N features"],
        state: TowerState,
        inputs: EncoderInputs,
        rows: Int[Array, " E"],
    ) -> Float[Array, "N features"]:
        with jax.named_scope("encode"):
            embeddings = tower.finish(params, arch, state, inputs)
        return cache.at[rows].set(embeddings.astype(cache.dtype), mode="drop")

    return TowerPrograms(lambda params, inputs: tower.begin(params, arch, inputs), layer, finish)


class TowerLayer(NamedTuple):
    """One encoder layer's parameters.

    Attributes:
        params: its parameters, or stacks of several layers'.
        row: its index in the stacks; 0 without.
        is_stacked: True if it is in stacks.
        kind: its program's number: layers with equal shapes have one.
    """

    params: Params
    row: int
    is_stacked: bool
    kind: int


def tower_layers(params: Params) -> list[TowerLayer]:
    """Return a tower's layers in order."""
    layers = params["layers"]
    found: list[tuple[Params, int, bool]] = []
    if isinstance(layers, ScannedLayers):
        count = len(jax.tree.leaves(layers.periodic)[0])
        found += [(each, index, True) for index in range(count) for each in layers.periodic]
        found += [(each, 0, False) for each in layers.rest]
    else:
        found += [(each, 0, False) for each in layers]
    kinds: dict[Any, int] = {}
    result = []
    for each, index, is_stacked in found:
        leaves, structure = jax.tree.flatten(each)
        key = structure, is_stacked, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        result.append(TowerLayer(each, index, is_stacked, kinds.setdefault(key, len(kinds))))
    return result


def outer(params: Params) -> Params:
    """Return a tower's parameters without its layers."""
    return {name: each for name, each in params.items() if name != "layers"}


def encoder_buckets(arch: VisionArch, max_embeddings: int) -> tuple[int, ...]:
    """Return the numbers of patches for which programs are compiled, for images with up to `max_embeddings`.

    An image in tiles may have more patches than embeddings, as padding gets none.
    """
    if arch.tiles is not None:
        return arch.buckets
    too_small = [size for size in arch.buckets if arch.max_embeddings(size) < max_embeddings]
    return arch.buckets[: len(too_small) + 1]


class PackedRun(NamedTuple):
    """Host arrays of an encoder run, padded to `num_patches`."""

    num_patches: int
    inputs: EncoderInputs
    rows: NDArray[np.int32]


def pack_run(arch: VisionArch, run: EncoderRun) -> PackedRun:
    """Return the host arrays of an encoder run for the whole image."""
    size = arch.bucket(len(run.image.patches))
    rows = np.full(arch.max_embeddings(size), _NO_ROW, np.int32)
    rows[: len(run.rows)] = run.rows
    image = TowerImage(run.image.grid, run.image.patches, run.image.size)
    return PackedRun(size, tower.pack(arch, [image], size), rows)


def abstract_inputs(arch: VisionArch, num_patches: int) -> tuple[EncoderInputs, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of a program's inputs, and of the rows that it writes."""
    inputs = tower.pack(arch, [], num_patches)
    shapes: EncoderInputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
    return shapes, jax.ShapeDtypeStruct((arch.max_embeddings(num_patches),), jnp.int32)
