"""LLaVA OneVision's projector: an image's tiles joined, unpadded and perhaps reduced, with an end for each row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import NDArray

from jaxserve.api.schema import FieldType
from jaxserve.errors import ConfigError
from jaxserve.images.layouts import TiledLayout
from jaxserve.models.hf_config import SIZE, HfConfig, read_field, read_fields
from jaxserve.models.layer_tensors import Rows
from jaxserve.models.params import Params, ParamSpec
from jaxserve.models.vision import llava
from jaxserve.models.vision.arch import VisionArch
from jaxserve.models.vision.encoder import Projector
from jaxserve.models.vision.inputs import EncoderInputs, Packed, Taps, TowerImage, axis_taps

_STEPS = (384, 768, 1152, 1536, 1920, 2304)
_PINPOINTS = FieldType(
    "a list of rows and columns of pixels",
    lambda value: (
        isinstance(value, list) and bool(value) and all(len(each) == 2 and all(map(SIZE.holds, each)) for each in value)
    ),
)
_FIELDS = {
    "vision_feature_select_strategy": FieldType("full", lambda value: value == "full"),
    "image_grid_pinpoints": _PINPOINTS,
    "vision_aspect_ratio": FieldType(
        "anyres_max_N", lambda value: isinstance(value, str) and value.removeprefix("anyres_max_").isdecimal()
    ),
}
_DEFAULTS = {
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "image_grid_pinpoints": [[rows, columns] for rows in _STEPS for columns in _STEPS],
    "vision_aspect_ratio": "anyres_max_9",
}
_LEAST_RATIO = 1.1  # images are reduced only if they have this many times as many rows and columns as allowed


def _parse(config: HfConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return VisionArch fields for a LLaVA OneVision config.json."""
    config = {**_DEFAULTS, **{name: value for name, value in config.items() if value is not None}}
    values, shared = read_fields(config, _FIELDS), llava.LLAVA.parse(config, fields)
    side = read_field(
        {"image_size": fields["grid"][0] * fields["patch_shape"][1], **config["vision_config"]}, "image_size", SIZE
    )
    pinpoints = tuple((rows, columns) for rows, columns in values["image_grid_pinpoints"])
    if wrong := [each for each in pinpoints if each[0] % side or each[1] % side]:
        raise ConfigError(f"image_grid_pinpoints must be multiples of image_size, {side}, got {wrong}")
    layout = TiledLayout(
        fields["patch_shape"][1], side, pinpoints, int(values["vision_aspect_ratio"].removeprefix("anyres_max_"))
    )
    return {**shared, "tiles": layout, "max_tiles": 1 + max(rows * columns for rows, columns in pinpoints) // side**2}


def _specs(arch: VisionArch) -> list[ParamSpec]:
    """Return the projector's ParamSpecs."""
    rows = Rows(("vision", "projector"), "model.")
    return [*llava.mlp_specs(arch), rows.vector("row_end", None, ["image_newline"], [arch.out_size], "normal")]


def _operands(arch: VisionArch, images: Sequence[TowerImage], num_patches: int) -> dict[str, Any]:
    """Return the features that make each embedding."""
    num_embeddings = arch.max_embeddings(num_patches)
    index, weight = np.zeros((num_embeddings, 4), np.int32), np.zeros((num_embeddings, 4), np.float32)
    filled = 0
    for start, _, image in Packed.join(images).images():
        taps = _image_taps(arch, image, start, num_patches)
        index[filled : filled + len(taps.index)], weight[filled : filled + len(taps.index)] = _weighted(taps)
        filled += len(taps.index)
    return {"outputs": Taps(index, weight)}


def _image_taps(arch: VisionArch, image: TowerImage, start: int, row_end: int) -> Taps:
    """Return the features that make one image's embeddings.

    Args:
        arch: the tower.
        image: the image.
        start: index of its first feature.
        row_end: index of the feature that ends each row.
    """
    assert arch.grid is not None, "images have one size"
    assert arch.tiles is not None, "images have tiles"
    (rows, columns), tile_size = arch.grid, arch.grid[0] * arch.grid[1]
    whole = _single(start + np.arange(tile_size))
    best = arch.tiles.best(image.size)
    across, down = best[1] // arch.tiles.tile_size, best[0] // arch.tiles.tile_size
    tiles = start + tile_size + np.arange(down * across * tile_size).reshape(down, across, rows, columns)
    features = _unpadded(tiles.swapaxes(1, 2).reshape(down * rows, across * columns), image.size)
    sums = _reduced(features, math.sqrt(features.size / (arch.tiles.max_tiles * rows**2)))
    ends = _single(np.full(len(sums.index), row_end))
    lines = [_joined([Taps(*line), Taps(*end)]) for line, end in zip(_rows(sums), _rows(ends), strict=True)]
    return _joined([whole, *lines])


def _reduced(features: NDArray[Any], ratio: float) -> Taps:
    """Return sums [rows, columns, 4] that reduce an image's features [rows, columns] on both axes by bilinear weights.

    Ratios below a limit leave them unchanged.
    """
    if ratio <= _LEAST_RATIO:
        return Taps(*(np.reshape(part, (*features.shape, 4)) for part in _weighted(_single(features.reshape(-1)))))
    height, width = (int(size // ratio) for size in features.shape)
    axes = zip((height, width), features.shape, strict=True)
    (row, row_weight), (column, column_weight) = (
        axis_taps(np.arange(new, dtype=np.int32), new, old, align_corners=False) for new, old in axes
    )
    index = features[row[:, None, :, None], column[None, :, None, :]]
    weight = row_weight[:, None, :, None] * column_weight[None, :, None, :]
    return Taps(index.reshape(height, width, 4), weight.reshape(height, width, 4))


def _weighted(taps: Taps) -> tuple[Any, Any]:
    """Return indices and weights."""
    assert taps.weight is not None, "features are weighted"
    return taps.index, taps.weight


def _rows(taps: Taps) -> Iterator[tuple[Any, Any]]:
    """Yield indices and weights [N, 4] for each row."""
    for index, weight in zip(*_weighted(taps), strict=True):
        yield index.reshape(-1, 4), weight.reshape(-1, 4)


def _single(index: Any) -> Taps:
    """Return sums with one feature each."""
    weight = np.zeros((len(index), 4), np.float32)
    weight[:, 0] = 1
    return Taps(np.pad(index[:, None], ((0, 0), (0, 3))).astype(np.int32), weight)


def _joined(parts: Sequence[Taps]) -> Taps:
    """Return the sums of all parts."""
    index, weight = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Taps(index.astype(np.int32), weight.astype(np.float32))


def _unpadded(features: Any, size: tuple[int, int]) -> Any:
    """Return features [rows, columns] without those for padding, given an image's rows and columns of pixels."""
    (rows, columns), (height, width) = features.shape, size
    if width / height > columns / rows:
        padding = (rows - int(round(height * (columns / width), 7))) // 2
        return features[padding : rows - padding]
    padding = (columns - int(round(width * (rows / height), 7))) // 2
    return features[:, padding : columns - padding]


def _project(
    p: Params, arch: VisionArch, states: Sequence[Float[Array, "T D"]], inputs: EncoderInputs
) -> Float[Array, "E out"]:
    """Return the embeddings of images and of their rows' ends."""
    assert inputs.outputs is not None, "features are interpolated"
    index, weight = _weighted(inputs.outputs)
    x = llava.LLAVA.project(p, arch, states, inputs)
    features = jnp.concatenate([x, p["projector"]["row_end"][None].astype(x.dtype)])
    taps = [features[index[:, tap]] * weight[:, tap, None].astype(x.dtype) for tap in range(4)]
    return taps[0] + taps[1] + taps[2] + taps[3]


ONEVISION = Projector(_parse, _specs, _project, _operands)
