"""The encoder program: the vision tower encodes images and writes their embeddings to the encoder cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from jaxserve.models.vision import tower
from jaxserve.models.vision.arch import VisionArch
from jaxserve.models.vision.inputs import EncoderInputs, TowerImage

if TYPE_CHECKING:
    from jaxserve.scheduling.step_plan import EncoderRun

Encode = Callable[[Any, Array, EncoderInputs, Array], Array]

_NO_ROW = np.iinfo(np.int32).max  # out of range, dropped


def make_encode(arch: VisionArch) -> Encode:
    """Return the program (params, cache, inputs, rows) -> cache that encodes images into rows of the encoder cache.

    To be jitted with the cache donated. Rows out of range are padding.
    """

    def encode(
        params: Any, cache: Float[Array, "N features"], inputs: EncoderInputs, rows: Int[Array, " E"]
    ) -> Float[Array, "N features"]:
        with jax.named_scope("encode"):
            embeddings = tower.encode(params, arch, inputs)
        return cache.at[rows].set(embeddings.astype(cache.dtype), mode="drop")

    return encode


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
    """Return the host arrays of an encoder run."""
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
