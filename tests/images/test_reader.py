"""Images of prompts from all kinds of values: read once, cached, limited and refused with a reason."""

import base64
import errno
import io
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxserve.api.config import EngineConfig
from jaxserve.assembly.generation_defaults import build_arch
from jaxserve.assembly.images import build_image_reader
from jaxserve.errors import BusyError, ConfigError, FaultError, PromptTooLongError, RequestError
from jaxserve.images import decoding
from jaxserve.images.cache import ImageCache
from jaxserve.images.deadline import Deadline
from jaxserve.images.families import read_placeholders
from jaxserve.images.inputs import ImageInputs
from jaxserve.images.placeholders import Placeholders
from jaxserve.images.prepared import EncodedPrompt, PreparedImage
from jaxserve.images.processor_files import image_processor
from jaxserve.images.reader import ImageOptions, ImageReader
from jaxserve.openai.errors import as_bad_request
from tests.vision_checkpoints import FAMILIES

IMAGE = 7
FIELDS = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 50176}
PIXELS = np.random.default_rng(0).integers(0, 256, (56, 84, 3), np.uint8)
PICTURE = Image.fromarray(PIXELS)


def new_reader(**options: Any) -> ImageReader:
    return ImageReader(partial(image_processor, FIELDS, {}), Placeholders(IMAGE), ImageOptions(**options))


@pytest.fixture(scope="module")
def reader() -> Iterator[ImageReader]:
    reader = new_reader()
    yield reader
    reader.close()


def encoded(kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    PICTURE.save(file, kind)
    return file.getvalue()


def inputs(*images: Any, names: Any = None, **adjusted: Any) -> ImageInputs:
    given = {"multi_modal_data": {"image": list(images)}, "mm_processor_kwargs": adjusted}
    return ImageInputs.from_prompt(given | ({} if names is None else {"multi_modal_uuids": {"image": names}}))


def test_the_same_image_in_all_types(reader):
    url = f"data:image/png;base64,{base64.b64encode(encoded()).decode()}"
    same = [PICTURE, PIXELS, encoded(), url, PICTURE.convert("RGBA"), np.moveaxis(PIXELS, -1, 0)]
    assert len({image.digest for image in reader.prepare(inputs(*same))}) == 1
    ids, spans = reader.expand([1, IMAGE, 2], inputs(PIXELS))
    assert ids == [1, *[IMAGE] * 6, 2]
    assert spans[0].image.grid == (4, 6)


def test_pillow_images_with_impossible_fields_are_refused(reader):
    picture = PICTURE.convert("P")
    picture.info["transparency"] = 9999
    with pytest.raises(RequestError, match="image 1 of the prompt: must be convertible to RGB, but: palette index"):
        reader.prepare(inputs(picture))


def test_one_image_needs_no_list():
    one = ImageInputs.from_prompt({"multi_modal_data": {"image": PIXELS}, "multi_modal_uuids": {"image": "a"}})
    assert one.names == ["a"]
    assert one.images[0] is PIXELS
    named = ImageInputs.from_prompt({"multi_modal_uuids": {"image": ["a", "b"]}})
    assert (named.images, named.names) == ([None, None], ["a", "b"])
    several = ImageInputs.from_prompt({"multi_modal_data": {"image": np.stack([PIXELS, PIXELS])}})
    assert [image.shape for image in several.images] == [PIXELS.shape] * 2


def test_known_images_are_not_processed_again():
    reader = new_reader()
    (first,) = reader.prepare(inputs(PICTURE))
    (again,) = reader.prepare(inputs(PICTURE.copy()))
    assert again is first
    (smaller,) = reader.prepare(inputs(PICTURE, max_pixels=3136))
    assert smaller.digest != first.digest
    assert smaller.num_embeddings == 2
    assert (reader.cache.num_queries, reader.cache.num_hits) == (3, 1)
    assert reader.cache.num_bytes == first.num_bytes + smaller.num_bytes


def test_palettes_are_content(reader):
    """Pictures with equal indices, and other colours for these, also beside transparency."""
    pictures = [Image.new("P", (56, 56)) for _ in range(2)]
    for picture, colour in zip(pictures, ((255, 0, 0), (0, 255, 0)), strict=True):
        picture.putpalette(colour)
    pictures += [picture.convert("PA") for picture in pictures]
    digests = [image.digest for image in reader.prepare(inputs(*pictures))]
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]


def test_names_stand_for_content_within_a_namespace():
    reader = new_reader()
    (named,) = reader.prepare(inputs(PICTURE, names=["a"]), "tenant")
    assert reader.prepare(inputs(None, names=["a"]), "tenant") == [named]
    for names, namespace in ((["b"], "tenant"), (["a"], "other"), (["a"], "")):
        with pytest.raises(RequestError, match=r"image 1 of the prompt: must be sent again"):
            reader.prepare(inputs(None, names=names), namespace)


def test_digests_are_of_content_whatever_its_name():
    """Pages on disk are found by digests, after a name has come to mean another image."""
    reader, other = new_reader(), PICTURE.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    (plain,) = reader.prepare(inputs(PICTURE))
    assert reader.prepare(inputs(PICTURE, names=["a"]))[0].digest == plain.digest
    assert reader.prepare(inputs(other, names=["a"]))[0].digest == plain.digest, "a cached name is not read again"
    reader.cache.clear()
    (later,) = reader.prepare(inputs(other, names=["a"]))
    assert later.digest == reader.prepare(inputs(other))[0].digest != plain.digest


class Unread:
    """Image that must not be read."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"an image was read: {name}")


def test_placeholders_are_counted_before_any_image_is_read(reader):
    many = [Unread()] * 999
    for ids, word in (([IMAGE] * 2, "got 2 of them .* 999 images"), ([1], "got 0 of them .* 999 images")):
        with pytest.raises(RequestError, match=word):
            reader.expand(ids, inputs(*many))


@pytest.mark.parametrize(("num_placeholders", "limit", "num_read"), [(3, 2, 0), (3, 7, 1), (3, 12, 2), (18, 17, 0)])
def test_prompts_are_too_long_as_soon_as_their_first_images_are(reader, num_placeholders, limit, num_read):
    lengths = []

    def check(num_tokens: int) -> None:
        lengths.append(num_tokens)
        if num_tokens > limit:
            raise PromptTooLongError("too long", num_tokens, limit)

    images = [*[PIXELS] * num_read, *[Unread()] * (3 - num_read)]
    with pytest.raises(PromptTooLongError):
        reader.expand([IMAGE] * num_placeholders, inputs(*images), check_len=check)
    assert lengths == [num_placeholders + 5 * count for count in range(num_read + 1)]


def test_expanded_prompts_are_as_long_as_they_are(reader):
    lengths: list[int] = []
    ids, spans = reader.expand([IMAGE] * 6, inputs(PIXELS), check_len=lengths.append)
    assert (ids, len(spans), lengths) == ([IMAGE] * 6, 1, [6, 6])


def test_all_images_of_a_prompt_have_one_deadline(monkeypatch):
    reader = new_reader()
    monkeypatch.setattr("jaxserve.images.reader.PROMPT_S", 0.0)
    with pytest.raises(RequestError, match=r"image 1 of the prompt: the images of a prompt must be loaded .* in 0 s"):
        reader.prepare(inputs(encoded()))
    assert reader.prepare(inputs(PICTURE)), "a caller's own image needs no time"


@pytest.mark.parametrize("prompt_s", [0.1, 60.0])
def test_waiting_for_a_decoder_is_no_fault_of_the_images(monkeypatch, prompt_s):
    reader = new_reader()
    monkeypatch.setattr("jaxserve.images.reader.PROMPT_S", prompt_s)
    monkeypatch.setattr(decoding, "DECODE_S", 0.03)
    monkeypatch.setattr(reader._decoders, "_free", [])
    with pytest.raises(BusyError, match="image 1 of the prompt: images of others are being decoded"):
        reader.prepare(inputs(encoded()))
    deadline = Deadline(0.01)
    with deadline.waiting():
        time.sleep(0.02)
    with pytest.raises(BusyError):
        deadline.left_s(1)


@pytest.mark.parametrize(
    ("broken", "kind", "word"),
    [
        (None, FaultError, "which ends with status 2"),
        (errno.EACCES, FaultError, "but"),
        (errno.EAGAIN, BusyError, "but"),
    ],
)
def test_a_decoder_that_cannot_start_is_an_error_at_once(monkeypatch, tmp_path, broken, kind, word):
    """It is the server's fault, for which a batch does not wait; a lack of processes may pass."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(broken, "no process")

    reader, image = new_reader(), inputs(encoded())
    with monkeypatch.context() as patch:
        if broken is None:
            patch.setattr(decoding, "_SCRIPT", tmp_path / "absent.py")
        else:
            patch.setattr(subprocess, "Popen", refuse)
        with pytest.raises(kind, match=f"image 1 of the prompt: images are decoded by a process of their own, {word}"):
            reader.prepare(image)
    assert as_bad_request(kind("")).status_code == (500 if kind is FaultError else 503)
    assert reader.prepare(image)
    reader.close()


def test_the_cache_keeps_what_was_used_last():
    def image(num_floats: int) -> PreparedImage:
        return PreparedImage(bytes(16), np.zeros((1, num_floats), np.float32), (1, 1), 1)

    cache = ImageCache(100)
    one, two, three = image(10), image(10), image(10)
    cache.put("one", (one,))
    cache.put("two", (two,))
    assert cache.get("one") == (one,)
    cache.put("three", (three,))
    assert (cache.get("one"), cache.get("two"), cache.get("three")) == ((one,), None, (three,))
    assert cache.num_bytes == 80
    cache.put("large", (image(26),))
    assert cache.get("large") is None


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"multi_modal_data": {"video": [1]}}, "audio and video are not supported"),
        ({"multi_modal_data": {"image": PIXELS, "audio": 1}}, r"\['audio'\]"),
        ({"multi_modal_data": {"video": np.stack([PIXELS, PIXELS])}}, r"\['video'\]"),
        ({"multi_modal_data": {"image": PIXELS.tolist()}}, "must be an array, not nested lists"),
        ({"multi_modal_data": [PIXELS]}, "must be a dict"),
        ({"multi_modal_data": {"image": [PIXELS]}, "multi_modal_uuids": {"image": ["a", "b"]}}, "for 1 images"),
        ({"multi_modal_data": {"image": [None]}}, "may have None only"),
        ({"mm_processor_kwargs": [1]}, "mm_processor_kwargs must be a dict"),
    ],
)
def test_malformed_fields_are_refused(given, word):
    with pytest.raises(RequestError, match=word):
        ImageInputs.from_prompt(given)


@pytest.mark.parametrize(
    ("image", "word"),
    [
        (3, "must be a Pillow image"),
        (b"no image", "none of the formats"),
        ("http://127.0.0.1/a.png", "allowed domain"),
        ("/etc/passwd", "must begin with data:"),
        (np.zeros((3, 3), np.float32), "uint8"),
        (encoded()[:200], "cannot be decoded"),
        (Image.new("RGB", (300, 1)), "200 times"),
    ],
)
def test_unreadable_images_are_named_by_their_number(reader, image, word):
    with pytest.raises(RequestError, match=rf"image 2 of the prompt: .*{word}"):
        reader.prepare(inputs(PIXELS, image))


def test_a_truncated_file_that_the_caller_opened(reader):
    with pytest.raises(RequestError, match="must be readable"):
        reader.prepare(inputs(Image.open(io.BytesIO(encoded()[:-40]))))


def test_more_images_than_allowed_are_refused():
    with pytest.raises(RequestError, match=r"at most 1 images, got 2; .*limit_mm_per_prompt"):
        new_reader(max_images=1).prepare(inputs(PIXELS, PIXELS))


def test_images_of_unfinished_requests_are_bounded(monkeypatch):
    monkeypatch.setattr("jaxserve.images.reader.MIN_LIVING_BYTES", 0)
    reader = new_reader(cache_bytes=1_400_000)
    sizes = [Image.new("RGB", (168, 168 + 28 * i)) for i in range(4)]  # 677 KB and more
    held = [reader.prepare(inputs(size)) for size in sizes]
    assert reader.living.num_bytes == sum(image.num_bytes for images in held for image in images) > 2_800_000
    with pytest.raises(BusyError, match="image 1 of the prompt: must wait, as those of unfinished requests take"):
        reader.prepare(inputs(Image.new("RGB", (168, 300))))
    held.clear()
    assert reader.living.num_bytes == 0, "the cache gives way to requests"
    reader.prepare(inputs(Image.new("RGB", (168, 300))))


def test_a_prompt_never_waits_for_its_own_images(monkeypatch):
    monkeypatch.setattr("jaxserve.images.reader.MIN_LIVING_BYTES", 0)
    sizes = [Image.new("RGB", (168, 168 + 28 * i)) for i in range(5)]
    with pytest.raises(RequestError, match="image 5 of the prompt: needs too much memory after") as caught:
        new_reader(cache_bytes=1_400_000).prepare(inputs(*sizes))
    assert not isinstance(caught.value, BusyError), "a client that tries again has no more success"
    assert len(new_reader(cache_bytes=1_400_000).prepare(inputs(*sizes[:1] * 9))) == 9, "one image counts once"


def test_large_images_and_many_options_are_bounded(monkeypatch):
    reader = new_reader()
    monkeypatch.setattr("jaxserve.images.reader.MAX_PIXELS", 100)
    with pytest.raises(RequestError, match="at most 100 pixels, got 84 x 56"):
        reader.prepare(inputs(PICTURE))
    monkeypatch.setattr("jaxserve.images.reader._MAX_PROCESSORS", 3)
    for max_pixels in range(3136, 3142):
        reader.prepare(inputs(PIXELS, max_pixels=max_pixels))
    assert list(reader._processors)[::2] == ["{}", '{"max_pixels": 3141}']
    assert len(reader._processors) == 3


def test_options_of_the_processor(reader):
    with pytest.raises(RequestError, match="did you mean max_pixels"):
        reader.prepare(inputs(PIXELS, max_pixel=1))
    with pytest.raises(RequestError, match="must be JSON values"):
        reader.prepare(inputs(PIXELS, max_pixels=object()))
    with pytest.raises(RequestError, match="did you mean max_pixels"):
        reader.expand([1, 2], inputs(max_pixel=1))
    with pytest.raises(ConfigError, match="mm_processor_kwargs takes"):
        new_reader(adjusted={"crop": 1})
    limited = new_reader(adjusted={"max_pixels": 3136})
    size = {"shortest_edge": 3136, "longest_edge": 50176}
    assert [limited.prepare(inputs(PIXELS, size=each))[0].num_embeddings for each in (None, size)] == [2, 6]


def test_encoded_texts_become_plain_ids(reader):
    """Prompts go to other processes, which take no function, also if they are already expanded."""
    for ids in ([1, IMAGE, 2], [1, *[IMAGE] * 6, 2]):
        found, _ = reader.expand(EncodedPrompt(ids, lambda counts: []), inputs(PIXELS))
        assert type(found) is list
        assert found == [1, *[IMAGE] * 6, 2]


def test_prompts_without_images_stay_the_same_object(reader):
    ids = [1, 2, 3]
    assert reader.expand(ids, ImageInputs())[0] is ids
    with pytest.raises(RequestError, match="got 1 of them in the prompt and 0 images"):
        reader.expand([1, IMAGE], ImageInputs())


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("LlavaForConditionalGeneration", {}, Placeholders(IMAGE, written="<7>")),
        ("Gemma4ForConditionalGeneration", {}, Placeholders(IMAGE, (255_999,), (258_882,), written="<7>")),
        (
            "Gemma3ForConditionalGeneration",
            {"boi_token_index": 1, "eoi_token_index": 2},
            Placeholders(IMAGE, (1,), (2,), written="<1>", encoded="\n\n<1><7><2>\n\n"),
        ),
    ],
)
def test_placeholders_of_families(name, config, expected):
    layout = image_processor(FIELDS, {}).layout
    config = {**config, "architectures": [name]}
    assert read_placeholders(config, {}, IMAGE, layout, {}.get, lambda token: f"<{token}>") == expected


def test_rows_of_pixtral_end_in_the_tokenizers_tokens():
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "spatial_merge_size": 2}
    layout = image_processor({"image_processor_type": "PixtralImageProcessor"}, config).layout
    ids = {"[IMG_BREAK]": 12, "[IMG_END]": 13}
    found = read_placeholders(config, {}, IMAGE, layout, ids.get, str)
    assert found == Placeholders(IMAGE, row_end=12, image_end=13, block_size=2, written="7")
    with pytest.raises(ConfigError, match=r"\[IMG_BREAK\]"):
        read_placeholders(config, {}, IMAGE, layout, {}.get, str)


TILES = {
    "image_processor_type": "LlavaOnevisionImageProcessor",
    "size": {"height": 20, "width": 20},
    "image_grid_pinpoints": FAMILIES["onevision"].config["image_grid_pinpoints"],
}


def checkpoint(path: Path, family: str, fields: dict[str, Any], **options: Any) -> tuple[EngineConfig, Any]:
    """Write a tiny checkpoint's JSON files; return its configuration and sizes."""
    (path / "config.json").write_text(json.dumps(FAMILIES[family].config_dict()))
    (path / "preprocessor_config.json").write_text(json.dumps(fields))
    config = EngineConfig(str(path), skip_tokenizer_init=True, **options)
    return config, build_arch(config)


def test_readers_are_built_from_checkpoints(tmp_path: Path, caplog):
    fields = FIELDS | {"patch_size": 4}
    options = {"mm_processor_kwargs": '{"max_pixels": 640}', "limit_mm_per_prompt": {"image": {"count": 2, "width": 9}}}
    config, arch = checkpoint(tmp_path, "qwen2_5_vl", fields | {"min_pixels": 64}, **options)
    reader = build_image_reader(config, arch, None)
    assert reader is not None
    assert reader.options.max_images == 2
    assert reader.prepare(inputs(PIXELS))[0].num_embeddings == 6
    (tmp_path / "preprocessor_config.json").unlink()
    assert build_image_reader(config, arch, None) is None
    assert "has no preprocessor_config.json" in caplog.text
    assert build_image_reader(config, replace(arch, images=None), None) is None
    assert build_image_reader(*checkpoint(tmp_path, "onevision", TILES), None) is not None


@pytest.mark.parametrize(
    ("family", "fields", "word"),
    [
        ("qwen2_5_vl", FIELDS, "tower's patch_size 4, got 14"),
        ("qwen2_5_vl", FIELDS | {"patch_size": 4, "merge_size": 1}, "tower's 8 embeddings"),
        ("qwen2_5_vl", FIELDS | {"patch_size": 4, "image_std": [0, 1, 1]}, "finite numbers"),
        ("llava", {"image_processor_type": "SiglipImageProcessor", "size": {"height": 24, "width": 24}}, r"\(5, 5\)"),
        ("onevision", {**TILES, "size": {"height": 40, "width": 40}, "image_grid_pinpoints": [[40, 40]]}, "tile_size"),
        ("onevision", TILES | {"image_grid_pinpoints": [[20, 20]]}, r"pinpoints of config.json, .*got \(\(20, 20\),\)"),
    ],
)
def test_processors_that_do_not_fit_the_tower_are_refused(tmp_path: Path, family, fields, word):
    config, arch = checkpoint(tmp_path, family, fields)
    with pytest.raises(ConfigError, match=word):
        build_image_reader(config, arch, None)
