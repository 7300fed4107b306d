"""Image processors against transformers' on odd sizes, modes and arrays."""

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxserve.errors import ConfigError, RequestError
from jaxserve.images.layouts import TiledLayout, unfolded
from jaxserve.images.processor import ImageProcessor, as_rgb, image_from_array
from jaxserve.images.processor_files import image_processor, read_processor_files
from tests.oracles import skipped_without_torch

SIZES = [(1, 1), (1, 17), (33, 1), (31, 310), (300, 30), (64, 64), (113, 97), (448, 448), (500, 333)]
VISION = {"patch_size": 14}
FAMILIES = {
    "clip": (
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
            "do_center_crop": True,
        },
        {"vision_config": VISION},
    ),
    "clip_padded": (
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"height": 50, "width": 41},
            "crop_size": {"height": 56, "width": 28},
        },
        {"vision_config": VISION},
    ),
    "llava": (
        {"image_processor_type": "LlavaImageProcessor", "do_pad": True, "size": {"shortest_edge": 56}, "crop_size": 56},
        {"vision_config": VISION},
    ),
    "siglip": (
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 56, "width": 70}},
        {"vision_config": VISION | {"model_type": "siglip_vision_model"}, "vision_feature_select_strategy": "full"},
    ),
    "qwen2": ({"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 50176}, {}),
    "qwen3": (
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 4096, "longest_edge": 65536},
            "patch_size": 16,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        {},
    ),
    "pixtral": (
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 140}, "patch_size": 14},
        {"vision_config": VISION},
    ),
    "gemma3": (
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}},
        {"vision_config": VISION, "mm_tokens_per_image": 4},
    ),
    "gemma4": ({"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70}, {}),
    "onevision": (
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 56, "width": 56},
            "image_grid_pinpoints": [[56, 56], [56, 112], [112, 56], [112, 112], [56, 224]],
        },
        {"vision_config": VISION, "vision_aspect_ratio": "anyres_max_9"},
    ),
}


def picture(size: tuple[int, int], channels: int = 3) -> np.ndarray:
    return np.random.default_rng(sum(size)).integers(0, 256, (*size, channels), np.uint8)


def reference(fields: dict) -> object:
    name = fields["image_processor_type"].removesuffix("Fast")
    module = {
        "CLIPImageProcessor": "clip",
        "LlavaImageProcessor": "llava",
        "SiglipImageProcessor": "siglip",
        "Qwen2VLImageProcessor": "qwen2_vl",
        "PixtralImageProcessor": "pixtral",
        "Gemma3ImageProcessor": "gemma3",
        "Gemma4ImageProcessor": "gemma4",
        "LlavaOnevisionImageProcessor": "llava_onevision",
    }[name]
    with skipped_without_torch():
        kind = getattr(import_module(f"transformers.models.{module}.image_processing_pil_{module}"), f"{name}Pil")
    return kind(**{key: value for key, value in fields.items() if key != "image_processor_type"})


def expected_patches(family: str, processor: ImageProcessor, image: Image.Image) -> np.ndarray:
    """Return transformers' patches, unfolded here for towers that begin with a convolution."""
    output = reference(FAMILIES[family][0])(image, return_tensors="np")
    pixels = np.asarray(output["pixel_values"])
    if family.startswith("qwen"):
        assert output["image_grid_thw"].tolist()[0][0] == 1
        return pixels
    if family == "gemma4":
        return pixels[0][: int(output["num_soft_tokens_per_image"][0]) * 9]
    tiles = pixels[0] if family == "onevision" else pixels
    return unfolded(np.moveaxis(tiles, 1, -1), processor.layout)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_patches_equal_transformers(family, size):
    processor = image_processor(*FAMILIES[family])
    image = Image.fromarray(picture(size))
    if family == "pixtral" and max(size) > 14 * 10 * min(size):
        pytest.skip("no pixel is left")
    prepared = processor.prepare(processor.fit(image), size)
    np.testing.assert_array_equal(prepared.patches, expected_patches(family, processor, image))
    num_tiles = len(prepared.patches) / (prepared.grid[0] * prepared.grid[1])
    assert num_tiles == 1 or isinstance(processor.layout, TiledLayout)


def all_modes(size: tuple[int, int] = (37, 53)) -> dict[str, Image.Image]:
    rgb, rgba = picture(size), picture(size, 4)
    modes = {
        "RGB": Image.fromarray(rgb),
        "L": Image.fromarray(rgb[..., 0]),
        "1": Image.fromarray(rgb[..., 0]).convert("1"),
        "LA": Image.fromarray(rgba).convert("LA"),
        "RGBA": Image.fromarray(rgba),
        "RGBa": Image.fromarray(rgba).convert("RGBa"),
        "I": Image.fromarray(rgb[..., 0].astype(np.int32) * 300),
        "F": Image.fromarray(rgb[..., 0].astype(np.float32) * 1.1),
        "HSV": Image.fromarray(rgb).convert("HSV"),
        "PA": Image.fromarray(rgba).convert("PA"),
        "CMYK": Image.fromarray(rgb).convert("CMYK"),
        "P": Image.fromarray(rgb).quantize(16),
        "I;16": Image.fromarray(rgb[..., 0].astype(np.uint16) * 256),
    }
    modes["P transparent"] = modes["P"].copy()
    modes["P transparent"].info["transparency"] = 3
    return modes


@pytest.mark.parametrize("mode", all_modes())
def test_modes_equal_transformers(mode):
    image = all_modes()[mode]
    processor = image_processor(*FAMILIES["qwen2"])
    patches = processor.prepare(processor.fit(as_rgb(image)), (37, 53)).patches
    np.testing.assert_array_equal(patches, expected_patches("qwen2", processor, image))


def test_premultiplied_gray_is_converted():
    gray = Image.fromarray(picture((9, 12), 4)).convert("LA")
    assert as_rgb(gray.convert("La")).tobytes() == as_rgb(gray.convert("La").convert("LA")).tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(orientation):
    image = Image.fromarray(picture((20, 30)))
    image.getexif()[0x0112] = orientation
    upright = as_rgb(image)
    assert upright.size == ((30, 20) if orientation < 5 else (20, 30))
    assert as_rgb(upright).tobytes() == upright.tobytes()


def test_arrays_of_all_shapes_are_the_same_image():
    rgb = picture((9, 12))
    same = [rgb, np.moveaxis(rgb, -1, 0), np.concatenate([rgb, np.full((9, 12, 1), 255, np.uint8)], -1)]
    assert {image_from_array(each).tobytes() for each in same} == {rgb.tobytes()}
    gray = rgb[..., 0]
    assert image_from_array(gray).tobytes() == image_from_array(gray[..., None]).tobytes()


@pytest.mark.parametrize(
    "array", [np.zeros((2, 2, 3), np.float32), np.zeros((0, 3), np.uint8), np.zeros((2, 2, 2), np.uint8)]
)
def test_other_arrays_are_refused(array):
    with pytest.raises(RequestError, match=r"uint8|shape"):
        image_from_array(array)


@pytest.mark.parametrize("size", [(113, 97), (50, 60), (400, 20), (20, 400)])
@pytest.mark.parametrize(("resample", "mode"), [(2, "bilinear"), (3, "bicubic")])
def test_resampling_is_that_of_the_fast_processors(size, resample, mode):
    """Compare with torchvision's resampling, which is torch's of 8-bit values with antialiasing; it rounds twice."""
    from tests.oracles import torch

    image, (fields, config) = picture(size), FAMILIES["gemma3"]
    fields = {**fields, "image_processor_type": "Gemma3ImageProcessorFast", "resample": resample}
    ours = image_processor(fields, config).fit(Image.fromarray(image))[0].astype(int)
    tensor = torch.from_numpy(np.moveaxis(image, -1, 0)[None].copy())
    fast = torch.nn.functional.interpolate(tensor, (56, 56), mode=mode, antialias=True)[0].numpy()
    error = np.abs(np.moveaxis(fast, 0, -1).astype(int) - ours)
    assert error.max() <= 2
    assert (error > 1).mean() < 1e-3


def test_digests_cover_pixels_and_settings():
    fields, config = FAMILIES["qwen2"]
    processor, other = image_processor(fields, config), image_processor({**fields, "max_pixels": 100000}, config)
    image, changed = (Image.fromarray(picture((64, 64 + delta))) for delta in (0, 1))
    digests = [
        processor.prepare(processor.fit(image), (64, 64)).digest,
        processor.prepare(processor.fit(changed), (64, 64)).digest,
        other.prepare(other.fit(image), (64, 64)).digest,
    ]
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"image_processor_type": "FooImageProcessor"}, "image_processor_type"),
        ({"do_resize": 1}, "do_resize"),
        ({"resample": 9}, "resample"),
        ({"patch_size": "14"}, "patch_size"),
        ({"size": {}, "min_pixels": None}, "shortest_edge"),
        ({"image_processor_type": "PixtralImageProcessor", "do_center_crop": True}, "do_center_crop must be false"),
        (
            {"image_processor_type": "SiglipImageProcessor", "pad_size": {"height": 9, "width": 9}},
            "pad_size must be left",
        ),
        (
            {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 9, "longest_edge": 9}},
            "size of the",
        ),
        ({"image_processor_type": "CLIPImageProcessor", "crop_size": {"shortest_edge": 9}}, "crop_size of the image"),
        ({"size": {"shortest_edge": "56", "longest_edge": 112}}, "size must be an object with whole numbers"),
    ],
)
def test_unsupported_settings_are_refused(changes, word):
    with pytest.raises(ConfigError, match=word):
        image_processor({**FAMILIES["qwen2"][0], **changes}, {})


def test_null_settings_are_the_defaults():
    fields = FAMILIES["qwen2"][0]
    assert (
        image_processor({**fields, "patch_size": None, "do_rescale": None}, {}).key == image_processor(fields, {}).key
    )
    with pytest.raises(ConfigError, match="size must be an object with whole numbers"):  # its text is no excuse
        image_processor({**fields, "size": {"shortest_edge": " got None"}}, {})


def test_settings_that_requests_may_change():
    fields, config = FAMILIES["qwen2"]
    image = Image.fromarray(picture((448, 448)))
    smaller = image_processor(fields, config, {"max_pixels": 28 * 28 * 4})
    assert smaller.prepare(smaller.fit(image), (448, 448)).num_embeddings == 4
    assert image_processor(fields, config, {"size": None}).key == image_processor(fields, config).key
    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 4}
    for bounds in ({}, {"min_pixels": 28 * 28 * 9, "max_pixels": 28 * 28 * 64}):
        own = image_processor({**fields, **bounds}, config, {"size": size})
        assert own.key == image_processor(fields, config, {"size": size}).key
        assert own.prepare(own.fit(image), (448, 448)).num_embeddings == 4
    with pytest.raises(ConfigError, match="min_pixels and max_pixels replace these, got 9000 and 784"):
        image_processor({**fields, "min_pixels": 9000}, config, {"max_pixels": 28 * 28})
    with pytest.raises(ConfigError, match=r"mm_processor_kwargs takes .*did you mean max_pixels"):
        image_processor(fields, config, {"max_pixel": 3})
    gray = image_processor(fields, config, {"image_mean": [0, 0, 0], "image_std": [1, 1, 1], "resample": 2})
    changed = {**fields, "image_mean": [0, 0, 0], "image_std": [1, 1, 1], "resample": 2}
    assert gray.key == image_processor(changed, config).key != image_processor(fields, config).key
    whole = image_processor(fields, config, {"do_resize": False})
    assert whole.prepare(whole.fit(image.crop((0, 0, 84, 56))), (56, 84)).grid == (4, 6)
    with pytest.raises(RequestError, match="do_resize is false: 84 x 56 pixels, got 85 x 56"):
        whole.fit(image.crop((0, 0, 85, 56)))
    with pytest.raises(ConfigError, match=r"takes .*'size'.* got .'patch_size'"):
        image_processor(*FAMILIES["clip"], {"patch_size": 3})


@pytest.mark.parametrize("square", [None, True, False])
@pytest.mark.parametrize("family", ["clip", "gemma3", "onevision", "pixtral", "siglip"])
def test_a_number_as_size_is_read_like_transformers(family: str, square: bool | None, monkeypatch):
    fields, config = FAMILIES[family]
    fields = {**fields, "size": 56} | ({} if square is None else {"default_to_square": square})
    monkeypatch.setitem(FAMILIES, family, (fields, config))
    image = Image.fromarray(picture((56, 84)))
    try:
        processor = image_processor(fields, config)
    except ConfigError:
        assert square is False  # without both sides, as these families need
        return
    patches = processor.prepare(processor.fit(image), (56, 84)).patches
    np.testing.assert_array_equal(patches, expected_patches(family, processor, image))


def test_pixels_beyond_whole_patches_are_dropped():
    """The published sizes of LLaVA OneVision."""
    fields = {"image_processor_type": "LlavaOnevisionImageProcessor"}
    config = {"vision_config": {"patch_size": 14}, "vision_aspect_ratio": "anyres_max_9"}
    processor, image = image_processor(fields, config, max_patches=3 * 729), Image.fromarray(picture((300, 500)))
    prepared = processor.prepare(processor.fit(image), (300, 500))
    assert prepared.grid == (27, 27)
    assert prepared.patches.shape == (3 * 27 * 27, 3 * 14 * 14)
    whole = np.asarray(reference(fields)(image, return_tensors="np")["pixel_values"])[0]
    corner = prepared.patches.reshape(3, 27, 27, 3, 14, 14)[:, -1, -1]
    np.testing.assert_array_equal(corner, whole[:, :, 364:378, 364:378])


def test_large_images_are_reduced_to_the_patches_that_the_tower_takes():
    fields, config = FAMILIES["qwen2"]
    processor = image_processor({**fields, "max_pixels": 12845056}, config, max_patches=64)
    assert processor.prepare(processor.fit(Image.new("RGB", (3000, 2000))), (2000, 3000)).num_embeddings <= 16
    with pytest.raises(RequestError, match="at most 15 patches of 14 pixels, got 16 from 70 x 56 pixels"):
        image_processor(*FAMILIES["gemma3"], max_patches=15).fit(Image.new("RGB", (70, 56)))


def test_impossible_sizes_are_refused():
    qwen, clip = (image_processor(*FAMILIES[name]) for name in ("qwen2", "clip"))
    with pytest.raises(RequestError, match="200 times"):
        qwen.fit(Image.new("RGB", (201, 1)))
    with pytest.raises(RequestError, match="crop its longer side"):
        clip.fit(Image.new("RGB", (30000, 1)))
    padding = image_processor(FAMILIES["clip"][0] | {"image_processor_type": "LlavaImageProcessor", "do_pad": True}, {})
    with pytest.raises(RequestError, match="after padding to a square"):
        padding.fit(Image.new("RGB", (30000, 1)))


def test_files_of_both_generations_are_read(tmp_path: Path):
    fields = FAMILIES["qwen2"][0]
    assert read_processor_files(tmp_path) == ({}, {})
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    assert read_processor_files(tmp_path) == (fields, {})
    processor = {"image_processor": {**fields, "patch_size": 16}, "image_token": "x"}
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    assert read_processor_files(tmp_path) == (processor["image_processor"], processor)
