"""Content parts with images: their fields are read, or refused by name."""

from functools import partial

import pytest

from jaxserve.errors import RequestError
from jaxserve.images.placeholders import Placeholders
from jaxserve.images.processor_files import image_processor
from jaxserve.images.reader import ImageOptions, ImageReader
from jaxserve.text.image_chats import split_images
from jaxserve.text.messages import ImagePart

READER = ImageReader(
    partial(image_processor, {"image_processor_type": "Qwen2VLImageProcessor"}, {}),
    Placeholders(7, written="<image>"),
    ImageOptions(),
)


def split(part):
    return split_images([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}], READER)


@pytest.mark.parametrize(
    ("part", "image", "name"),
    [
        ({"type": "image_url", "image_url": {"url": "data:,x"}}, "data:,x", None),
        ({"type": "image_url", "image_url": {"url": "data:,x", "detail": "auto"}, "uuid": "a"}, "data:,x", "a"),
        ({"type": "image_url", "image_url": None, "uuid": "a"}, None, "a"),
        ({"type": "image_url", "image_url": {}, "uuid": "a"}, None, "a"),
        ({"type": "image_url", "image_url": "data:,x", "cache_control": {"type": "ephemeral"}}, "data:,x", None),
        ({"type": "input_image", "image_url": "data:,x", "detail": "auto"}, "data:,x", None),
        ({"type": "image", "image": b"x"}, b"x", None),
        ({"type": "image", "url": "data:,x"}, "data:,x", None),
        ({"type": "image_pil", "image_pil": b"x", "uuid": "a"}, b"x", "a"),
    ],
)
def test_images_in_parts(part, image, name):
    messages, inputs, ignored = split(part)
    assert (list(inputs.images), list(inputs.names), ignored) == ([image], [name], set())
    text, stand_in = messages[0]["content"]
    assert isinstance(stand_in, ImagePart)
    assert (text["text"], stand_in.written) == ("a", "<image>")


@pytest.mark.parametrize("detail", ["low", "high"])
def test_a_detail_is_reported_as_ignored(detail):
    assert split({"type": "image_url", "image_url": {"url": "data:,x", "detail": detail}}).ignored == {"detail"}
    assert split({"type": "input_image", "image_url": "data:,x", "detail": detail}).ignored == {"detail"}


@pytest.mark.parametrize(
    ("part", "word"),
    [
        (
            {"type": "image_url", "image_url": {"url": "data:,x"}, "min_pixels": 3},
            r"\['min_pixels'\] in a content part",
        ),
        ({"type": "image_url", "image_url": {"url": "data:,x", "details": "low"}}, "did you mean detail"),
        ({"type": "image_url", "image_pil": b"x"}, "image_pil"),
        ({"type": "image", "image": b"x", "url": "data:,x"}, "or only the uuid"),
        ({"type": "image_url", "image_url": {}}, "or only the uuid"),
        ({"type": "image_url", "image_url": "data:,x", "uuid": 3}, "uuid of a content part must be a string"),
    ],
)
def test_other_parts_are_refused(part, word):
    with pytest.raises(RequestError, match=word):
        split(part)
