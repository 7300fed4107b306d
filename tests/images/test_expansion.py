"""Prompts with images against transformers' processors: the same token ids for the same text."""

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers
import transformers
from PIL import Image
from tokenizers import AddedToken

from jaxserve.images.families import read_placeholders
from jaxserve.images.inputs import ImageInputs
from jaxserve.images.layouts import unfolded
from jaxserve.images.prepared import EncodedPrompt
from jaxserve.images.processor import ImageProcessor
from jaxserve.images.processor_files import image_processor
from jaxserve.images.reader import ImageOptions, ImageReader
from tests.oracles import skipped_without_torch

TOKENS = {"image_token": "<img>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
SIZES = [(40, 60), (200, 31), (113, 97)]
PROMPT = "user\n\n{0}\nOnce {0} upon{0}a time"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = tiny_tokenizers.byte_level(319)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in TOKENS.values()])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=TOKENS)


def pictures() -> list[Image.Image]:
    return [Image.fromarray(np.full((*size, 3), size[0], np.uint8)) for size in SIZES]


def expanded(tokenizer: Any, name: str, processor: ImageProcessor, text: str, **config: Any) -> list[int]:
    """Return the expanded ids of a text with three images."""
    found = read_placeholders(
        {"architectures": [f"{name}ForConditionalGeneration"], **config},
        {},
        tokenizer.image_token_id,
        processor.layout,
        tokenizer.convert_tokens_to_ids,
        tokenizer.decode,
    )
    images = [processor.prepare(processor.fit(each), (each.height, each.width)) for each in pictures()]
    return found.expand(tokenizer.encode(found.in_text(text)), images)[0]


def image_processor_of(module: str, name: str, **fields: Any) -> Any:
    """Return transformers' image processor."""
    return getattr(import_module(f"transformers.models.{module}.image_processing_pil_{module}"), f"{name}Pil")(**fields)


def test_llava(tokenizer):
    fields = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, "do_center_crop": True}
    with skipped_without_torch():
        processor = transformers.LlavaProcessor(
            image_processor_of("clip", "CLIPImageProcessor", **fields),
            tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    text = PROMPT.format("<img>")
    config = {"vision_config": {"patch_size": 14}}
    own = image_processor({"image_processor_type": "CLIPImageProcessor", **fields}, config)
    assert expanded(tokenizer, "Llava", own, text) == processor(images=pictures(), text=[text])["input_ids"][0]


def test_gemma3_whose_processor_adds_line_breaks_that_join_those_of_the_text(tokenizer):
    fields = {"size": {"height": 56, "width": 56}}
    with skipped_without_torch():
        processor = transformers.Gemma3Processor(
            image_processor_of("gemma3", "Gemma3ImageProcessor", **fields), tokenizer, image_seq_length=4
        )
    text = PROMPT.format("<boi>")
    config = {"mm_tokens_per_image": 4}
    config |= {"boi_token_index": tokenizer.boi_token_id, "eoi_token_index": tokenizer.eoi_token_id}
    own = image_processor({"image_processor_type": "Gemma3ImageProcessor", **fields}, config)
    expected = processor(images=[pictures()], text=[text])["input_ids"][0]
    assert expanded(tokenizer, "Gemma3", own, text, **config) == expected


CROPPED = [
    (1, 1),
    (1, 17),
    (33, 1),
    (8, 10),
    (8, 9),
    (9, 8),
    (31, 310),
    (300, 30),
    (64, 64),
    (113, 97),
    (50, 333),
    (7, 80),
]
CROPPED += [
    (24, 57),
    (57, 24),
    (24, 61),
    (25, 24),
    (24, 29),
    (100, 41),
    (41, 100),
    (23, 200),
    (24, 240),
    (13, 26),
    (26, 52),
]
CROPPED += [(200, 24)]


def test_gemma3_with_crops_of_long_images(tokenizer):
    """Each size by itself, and all in one prompt: crops and ids equal, also if the prompt has ids and no text."""
    fields = {"size": {"height": 56, "width": 56}}
    pan_and_scan = {"min_crop_size": 12, "max_num_crops": 5, "min_ratio_to_activate": 1.25}
    adjusted = {"do_pan_and_scan": True} | {f"pan_and_scan_{name}": value for name, value in pan_and_scan.items()}
    with skipped_without_torch():
        theirs = transformers.Gemma3Processor(
            image_processor_of("gemma3", "Gemma3ImageProcessor", **fields), tokenizer, image_seq_length=4
        )
    config = {"mm_tokens_per_image": 4, "boi_token_index": tokenizer.boi_token_id}
    config |= {"eoi_token_index": tokenizer.eoi_token_id, "architectures": ["Gemma3ForConditionalGeneration"]}
    kind = {"image_processor_type": "Gemma3ImageProcessor", **fields}
    placeholders = read_placeholders(
        *(config, {}, tokenizer.image_token_id, image_processor(kind, config).layout),
        *(tokenizer.convert_tokens_to_ids, tokenizer.decode, tokenizer.encode),
    )
    reader = ImageReader(partial(image_processor, kind, config), placeholders, ImageOptions())
    sizes = [[size] for size in CROPPED] + [CROPPED]
    for each in sizes:
        images = [Image.fromarray(np.full((*size, 3), index, np.uint8)) for index, size in enumerate(each)]
        text = "user\n\n" + "".join(f"<boi>\nOnce {index} " for index, _ in enumerate(each))
        output = theirs(images=[images], text=[text], images_kwargs=adjusted, return_tensors="np")
        inputs = ImageInputs(images, [None] * len(images), adjusted)

        def encode(counts: Sequence[int], text: str = text) -> list[int]:
            return tokenizer.encode(placeholders.in_text(text, counts))

        ids, spans = reader.expand(EncodedPrompt(encode(()), encode), inputs)
        assert ids == output["input_ids"][0].tolist()
        tiles = np.moveaxis(output["pixel_values"], 1, -1)
        expected = unfolded(tiles, image_processor(kind, config).layout).reshape(len(spans), 16, -1)
        np.testing.assert_array_equal([span.image.patches for span in spans], expected)
        assert reader.expand(ids, inputs) == (ids, spans), "a prompt that is already expanded"
        # Ids for one image: its text stands alone, and so do the line breaks before it.
        plain = (
            reader.expand([7, tokenizer.boi_token_id, tokenizer.image_token_id, 8], inputs)[0] if len(each) == 1 else []
        )
        own = placeholders.in_text("<boi>", [len(spans) - 1]).strip("\n").replace("<img>", "<img>" * 4)
        assert not plain or plain == [7, *tokenizer.encode(own), 8]
    assert sum(len(reader.prepare(ImageInputs([image], [None], adjusted))) > 1 for image in images) > 12


@pytest.mark.parametrize(
    ("module", "name", "image_module", "fields", "config", "given"),
    [
        (
            *("qwen2_5_vl", "Qwen2_5_VL", "qwen2_vl"),
            {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 20000},
            {},
            {},
        ),
        (
            *("qwen3_vl", "Qwen3VL", "qwen2_vl"),
            {
                "image_processor_type": "Qwen2VLImageProcessor",
                "size": {"shortest_edge": 4096, "longest_edge": 20000},
                "patch_size": 16,
            },
            {},
            {},
        ),
        (
            *("gemma4", "Gemma4", "gemma4"),
            {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70},
            {"boi_token_id": 320, "eoi_token_id": 321},
            {"boi_token": "<boi>", "eoi_token": "<eoi>"},
        ),
        (
            *("llava_onevision", "LlavaOnevision", "llava_onevision"),
            {
                "image_processor_type": "LlavaOnevisionImageProcessor",
                "size": {"height": 56, "width": 56},
                "image_grid_pinpoints": [[56, 56], [56, 112], [112, 56], [112, 112], [56, 224], [168, 168]],
            },
            {"vision_config": {"patch_size": 14, "model_type": "siglip_vision_model"}},
            {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_2"},
        ),
    ],
)
def test_families_whose_processors_need_torchvision(tokenizer, module, name, image_module, fields, config, given):
    """Expand by the processor's own function, as the processor itself cannot be built."""
    with skipped_without_torch():
        kind = getattr(import_module(f"transformers.models.{module}.processing_{module}"), f"{name}Processor")
        own_fields = {key: value for key, value in fields.items() if key != "image_processor_type"}
        images = image_processor_of(image_module, fields["image_processor_type"], **own_fields)
    fake = SimpleNamespace(image_processor=images, image_token="<img>", **given)
    for method in ("_get_number_of_features", "_get_unpadded_features"):
        if hasattr(kind, method):
            setattr(fake, method, MethodType(getattr(kind, method), fake))
    inputs = images(pictures(), return_tensors="np")
    if "batch_num_images" in inputs:
        inputs["image_sizes"] = [tuple(map(int, size)) for size in inputs["image_sizes"]]
    parts = PROMPT.format("<img>").split("<img>")
    text = parts[0]
    for index, part in enumerate(parts[1:]):
        text += kind.replace_image_token(fake, inputs, index) + part
    config = {"vision_aspect_ratio": "anyres_max_2", **config}
    own = image_processor(fields, config)
    found = expanded(tokenizer, name, own, PROMPT.format("<img>"), **config)
    assert found == tokenizer.encode(text)
