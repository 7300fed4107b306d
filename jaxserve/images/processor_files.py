"""A checkpoint's image processor, from preprocessor_config.json or processor_config.json and config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.api import schema
from jaxserve.api.schema import FieldType
from jaxserve.errors import ConfigError, did_you_mean
from jaxserve.images.layouts import (
    BoundedLayout,
    FixedLayout,
    Layout,
    MergedLayout,
    PanAndScan,
    PooledLayout,
    Resampling,
    Size,
    TiledLayout,
)
from jaxserve.images.processor import ImageProcessor, Normalization

MAX_PATCHES = 16384  # per image
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
_BILINEAR, _BICUBIC = 2, 3
_AREAS = ("min_pixels", "max_pixels")
_SOFT_TOKENS = (70, 140, 280, 560, 1120)
_PAN_AND_SCAN = ("min_crop_size", "max_num_crops", "min_ratio_to_activate")
_MAX_CROPS = 16  # each of them is as large for the tower as the whole image
# The tower's own sizes, which no request can change
_OF_TOWER = {"patch_size", "merge_size", "temporal_patch_size", "pooling_kernel_size", "image_grid_pinpoints"}

_COUNT = schema.integer(1)
_MAYBE = _COUNT.optional()
_SWITCH = schema.SWITCH.optional()
_OFF = FieldType("false", lambda value: value is False)
_ABSENT = FieldType("left out", lambda value: False)
_SIDES = FieldType(
    "an object with height and width, shortest_edge or longest_edge, or a number",
    lambda value: (
        _COUNT.holds(value) or (isinstance(value, dict) and all(map(_COUNT.optional().holds, value.values())))
    ),
)
_COLOUR = FieldType(
    "3 numbers", lambda value: isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_number, value))
)
_PINPOINTS = FieldType(
    "a list of [height, width]",
    lambda value: (
        isinstance(value, list)
        and value != []
        and all(isinstance(each, list | tuple) and len(each) == 2 and all(map(_COUNT.holds, each)) for each in value)
    ),
)
_COMMON: Mapping[str, FieldType] = {
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), _SWITCH),
    "rescale_factor": schema.number(0, excludes_low=True),
    "image_mean": _COLOUR,
    "image_std": _COLOUR,
    "resample": schema.integer(0, 5),
}


def _is_number(value: object) -> bool:
    return schema.number().holds(value)


@dataclass(frozen=True)
class _Kind:
    """Type for image processors.

    Attributes:
        mean_std: default mean and standard deviation per channel.
        resample: default resampling filter.
        fields: further fields.
        defaults: their values, if the files have none.
        build: function from all fields and config.json to the layout.
        is_square: True if a number as size is both sides; otherwise it is the shorter one.
    """

    mean_std: tuple[tuple[float, ...], tuple[float, ...]]
    resample: int
    fields: Mapping[str, FieldType]
    defaults: Mapping[str, Any]
    build: Callable[[Mapping[str, Any], Mapping[str, Any]], Layout]
    is_square: bool = False


def _merged(fields: Mapping[str, Any], config: Mapping[str, Any]) -> Layout:
    patch, merge = fields["patch_size"], fields["merge_size"]
    size = fields["size"]
    low = fields.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels")
    high = fields.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels")
    if not low or not high or low > high:
        raise ConfigError(
            "size of the image processor must have shortest_edge and longest_edge, the smaller and larger number of "
            f"pixels, unless min_pixels and max_pixels replace these, got {low} and {high}"
        )
    # The tower takes no more patches, and larger images are reduced by the processor's own rule.
    high = min(high, fields["max_patches"] * patch**2)
    return MergedLayout(patch, merge, fields["temporal_patch_size"], min(low, high), high)


def _bounded(fields: Mapping[str, Any], config: Mapping[str, Any]) -> Layout:
    size, vision = fields["size"], config.get("vision_config") or {}
    longest = (size["longest_edge"],) * 2 if size.get("longest_edge") else _both(size)
    if longest is None:
        raise ConfigError(f"size of the image processor must have longest_edge, or height and width, got {size}")
    patch = _side(vision.get("patch_size")) or _side(fields["patch_size"])
    return BoundedLayout(patch, config.get("spatial_merge_size", 1) if "Mistral3" in _name(config) else 1, longest)


def _fixed(fields: Mapping[str, Any], config: Mapping[str, Any]) -> Layout:
    vision, size = config.get("vision_config") or {}, fields["size"]
    crop = fields["crop_size"] if fields.get("do_center_crop") else None
    background = None
    if fields.get("do_pad") and fields["image_processor_type"] == "LlavaImageProcessor":
        red, green, blue = (int(255 * each) for each in fields["image_mean"])
        background = red, green, blue
    given = {side for side in size if size[side] is not None}
    if given not in ({"height", "width"}, {"shortest_edge"}):
        raise ConfigError(f"size of the image processor must have height and width, or shortest_edge, got {size}")
    if crop is not None and not isinstance(crop, int) and _both(crop) is None:
        raise ConfigError(f"crop_size of the image processor must have height and width, got {crop}")
    short = size.get("shortest_edge") or 0
    has_class_token = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
    drops_one = config.get("vision_feature_select_strategy", "default") == "default"
    return FixedLayout(
        _side(vision.get("patch_size", 14)),
        _both(size),
        short,
        (crop, crop) if isinstance(crop, int) else _both(crop or {}),
        background,
        num_extra=has_class_token - drops_one,
    )


def _gemma3(fields: Mapping[str, Any], config: Mapping[str, Any]) -> Layout:
    vision, size = config.get("vision_config") or {}, fields["size"]
    both = _both(size)
    if both is None:
        raise ConfigError(f"the image processor of Gemma 3 must have a size with height and width, got {size}")
    pan_and_scan = PanAndScan(*(fields[f"pan_and_scan_{each}"] for each in _PAN_AND_SCAN))
    return FixedLayout(
        vision.get("patch_size", 14),
        both,
        0,
        None,
        num_pooled=config.get("mm_tokens_per_image", 256),
        pan_and_scan=pan_and_scan if fields.get("do_pan_and_scan") else None,
    )


def _pooled(fields: Mapping[str, Any], config: Mapping[str, Any]) -> Layout:
    return PooledLayout(fields["patch_size"], fields["pooling_kernel_size"], fields["max_soft_tokens"])


def _tiled(fields: Mapping[str, Any], config: Mapping[str, Any]) -> Layout:
    vision, size = config.get("vision_config") or {}, fields["size"]
    tile = _both(size) or (size.get("shortest_edge"),) * 2
    if tile[0] is None or tile[0] != tile[1]:
        raise ConfigError(f"size of the image processor must be a square tile, got {size}")
    limit = str(config.get("vision_aspect_ratio", "anyres_max_9"))
    pinpoints = [(rows, columns) for rows, columns in fields["image_grid_pinpoints"]]
    if not limit.startswith("anyres_max_") or any(side % tile[0] for grid in pinpoints for side in grid):
        raise ConfigError(
            "vision_aspect_ratio must be anyres_max_N, and image_grid_pinpoints whole tiles, got "
            f"{limit!r} and {pinpoints} with tiles of {tile[0]}"
        )
    strategy = config.get("vision_feature_select_strategy", "full")
    return TiledLayout(
        _side(vision.get("patch_size", 14)),
        tile[0],
        tuple(pinpoints),
        int(limit.removeprefix("anyres_max_")),
        drops_one=strategy == "default",
    )


_STEPS = (384, 768, 1152, 1536, 1920, 2304)
_CROPPED = _Kind(
    _CLIP,
    _BICUBIC,
    {
        **dict.fromkeys(("size", "crop_size"), _SIDES.optional()),
        **dict.fromkeys(("do_center_crop", "do_pad"), _SWITCH),
        "pad_size": _ABSENT,
    },
    {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True},
    _fixed,
)
_QWEN = _Kind(
    _CLIP,
    _BICUBIC,
    {
        **dict.fromkeys(("patch_size", "merge_size", "temporal_patch_size"), _COUNT),
        **dict.fromkeys(_AREAS, _COUNT.optional()),
        "size": FieldType(
            "an object with whole numbers",
            lambda value: isinstance(value, dict) and all(map(_COUNT.optional().holds, value.values())),
        ),
    },
    {
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    },
    _merged,
)
_KINDS: Mapping[str, _Kind] = {
    "CLIPImageProcessor": _CROPPED,
    "LlavaImageProcessor": _CROPPED,
    "SiglipImageProcessor": _Kind(
        _HALF,
        _BICUBIC,
        _CROPPED.fields,
        {"size": {"height": 224, "width": 224}, "crop_size": None},
        _fixed,
    ),
    "Qwen2VLImageProcessor": _QWEN,
    "Qwen2_5_VLImageProcessor": _QWEN,
    "Qwen3VLImageProcessor": _QWEN,
    "PixtralImageProcessor": _Kind(
        _CLIP,
        _BICUBIC,
        {"size": _SIDES, "patch_size": _SIDES, "do_center_crop": _OFF, "pad_size": _ABSENT},
        {"size": {"longest_edge": 1024}, "patch_size": 16},
        _bounded,
        is_square=True,
    ),
    "Gemma3ImageProcessor": _Kind(
        _HALF,
        _BILINEAR,
        {
            "size": _SIDES,
            "do_pan_and_scan": _SWITCH,
            "pan_and_scan_min_crop_size": _COUNT,
            "pan_and_scan_max_num_crops": schema.integer(1, _MAX_CROPS),
            "pan_and_scan_min_ratio_to_activate": schema.number(0),
        },
        {
            "size": 224,
            "pan_and_scan_min_crop_size": 256,
            "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        },
        _gemma3,
        is_square=True,
    ),
    "Gemma4ImageProcessor": _Kind(
        ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
        _BICUBIC,
        {
            **dict.fromkeys(("patch_size", "pooling_kernel_size"), _COUNT),
            "max_soft_tokens": schema.one_of(_SOFT_TOKENS),
        },
        {"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 280, "do_normalize": False},
        _pooled,
    ),
    "LlavaOnevisionImageProcessor": _Kind(
        _CLIP,
        _BICUBIC,
        {"size": _SIDES, "image_grid_pinpoints": _PINPOINTS, "do_center_crop": _OFF, "crop_size": _ABSENT},
        {"size": {"height": 384, "width": 384}, "image_grid_pinpoints": [[h, w] for h in _STEPS for w in _STEPS]},
        _tiled,
    ),
}
_OLD_NAMES = {"CLIPFeatureExtractor": "CLIPImageProcessor"}


def read_processor_files(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a checkpoint's fields for its image processor, and for its processor; empty without such files.

    Raises:
        ConfigError: a file is not a JSON object.
    """
    processor = _read(path / "processor_config.json")
    own = processor.get("image_processor")
    return (own if isinstance(own, dict) else _read(path / "preprocessor_config.json")), processor


def image_processor(
    fields: Mapping[str, Any],
    config: Mapping[str, Any],
    adjusted: Mapping[str, Any] | None = None,
    *,
    max_patches: int = MAX_PATCHES,
    where: str = "preprocessor_config.json",
) -> ImageProcessor:
    """Return an image processor.

    Args:
        fields: the processor's fields, as in preprocessor_config.json.
        config: the model's config.json.
        adjusted: values that replace some fields, such as a request's `mm_processor_kwargs`.
        max_patches: maximum number of patches that the tower takes.
        where: the fields' file for error messages.

    Raises:
        ConfigError: the processor's type or one of its fields is not supported.
    """
    name = _type(fields)
    if name not in _KINDS:
        raise ConfigError(f"{where}: image_processor_type must be one of {sorted(_KINDS)}, got {name!r}")
    kind = _KINDS[name]
    mean, std = kind.mean_std
    common = {"rescale_factor": 1 / 255, "image_mean": list(mean), "image_std": list(std), "resample": kind.resample}
    given = {**common, **kind.defaults, **{each: value for each, value in fields.items() if value is not None}}
    values = {**replaced(given, _checked(adjusted or {}, kind)), "image_processor_type": name}
    if isinstance(side := values.get("size"), int):
        is_square = values.get("default_to_square", kind.is_square)
        values["size"] = {"height": side, "width": side} if is_square else {"shortest_edge": side}
    where = f"{where} and mm_processor_kwargs" if adjusted else where
    kinds = {**_COMMON, **kind.fields}
    found = ((each, kinds[each]) for each in kinds if values.get(each) is not None)
    if bad := [problem for each, kind_of_value in found if (problem := kind_of_value.problem(each, values[each]))]:
        raise ConfigError(f"{where}: {'; '.join(bad)}")
    scale = float(values["rescale_factor"]) if values.get("do_rescale", True) else 1.0
    normalizes = values.get("do_normalize", True)
    normalization = Normalization(
        scale, _three(values["image_mean"]) if normalizes else None, _three(values["image_std"]) if normalizes else None
    )
    if not normalization.is_finite:
        named = {name: values[name] for name in ("rescale_factor", "image_mean", "image_std")}
        raise ConfigError(f"{where}: pixels must become finite numbers, got {named}")
    layout = kind.build({**values, "max_patches": max_patches}, config)
    resampling = Resampling(
        int(values["resample"]) if values.get("do_resize", True) else None,
        rows_first=_written_type(fields).endswith("Fast"),
    )
    return ImageProcessor(layout, normalization, resampling, max_patches)


def replaced(fields: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return an image processor's fields with some changed, except to None.

    A new `size` also replaces the `min_pixels` and `max_pixels` in `fields`, which would otherwise come before it.
    """
    changed = {name: value for name, value in changed.items() if value is not None}
    kept = {name: value for name, value in fields.items() if "size" not in changed or name not in _AREAS}
    return {**kept, **changed}


def _checked(adjusted: Mapping[str, Any], kind: _Kind) -> Mapping[str, Any]:
    """Return `mm_processor_kwargs`; ConfigError if this type has no such adjustable fields."""
    adjustable = {*_COMMON, *kind.fields} - _OF_TOWER
    if unknown := sorted(adjusted.keys() - adjustable):
        raise ConfigError(
            f"mm_processor_kwargs takes {sorted(adjustable)}, got {unknown}{did_you_mean(unknown, adjustable)}"
        )
    return adjusted


def _type(fields: Mapping[str, Any]) -> str:
    """Return the image processor's type, without the suffix for its implementation."""
    name = _written_type(fields).removesuffix("Fast").removesuffix("Pil")
    return _OLD_NAMES.get(name, name)


def _written_type(fields: Mapping[str, Any]) -> str:
    """Return the image processor's type as files have it. "Fast" means torchvision."""
    return str(fields.get("image_processor_type") or fields.get("feature_extractor_type") or "")


def _name(config: Mapping[str, Any]) -> str:
    """Return the architecture's name."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _both(size: Mapping[str, Any]) -> Size | None:
    """Return an object's height and width; None unless it has both."""
    rows, columns = size.get("height"), size.get("width")
    return (rows, columns) if rows and columns else None


def _side(size: Any) -> int:
    """Return a square's side, given as a number or an object; 0 without one."""
    side = size.get("height") if isinstance(size, Mapping) else size
    return int(side) if isinstance(side, int) else 0


def _three(values: Any) -> tuple[float, float, float]:
    red, green, blue = map(float, values)
    return red, green, blue


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} must be a JSON object, but: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a JSON object, got {type(content).__name__}")
    return content
