import itertools
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import RequestError
from jaxserve.images.placeholders import Placeholders
from jaxserve.images.positions import axis_positions
from jaxserve.images.prepared import PreparedImage
from tests.oracles import skipped_without_torch, torch

IMAGE = 7
PLAIN = Placeholders(IMAGE)
ROWS = Placeholders(IMAGE, row_end=8, image_end=9, block_size=2)
WRAPPED = Placeholders(IMAGE, before=(5,), after=(6,))


def image(rows: int, columns: int, block: int = 2) -> PreparedImage:
    patches = np.zeros((rows * columns, 3), np.float32)
    return PreparedImage(bytes([rows, columns]) * 8, patches, (rows, columns), rows * columns // block**2)


def test_each_placeholder_becomes_its_images_tokens():
    ids, spans = PLAIN.expand([1, IMAGE, 2, IMAGE, IMAGE], [image(4, 2), image(2, 2), image(2, 6)])
    assert ids == [1, IMAGE, IMAGE, 2, IMAGE, IMAGE, IMAGE, IMAGE]
    assert [span.positions.tolist() for span in spans] == [[1, 2], [4], [5, 6, 7]]


def test_rows_end_in_their_own_tokens():
    ids, (span,) = ROWS.expand([1, IMAGE, 2], [image(4, 6)])
    assert ids == [1, IMAGE, IMAGE, IMAGE, 8, IMAGE, IMAGE, IMAGE, 9, 2]
    assert span.positions.tolist() == [1, 2, 3, 5, 6, 7]


@pytest.mark.parametrize("prompt", [[1, IMAGE, 2], [1, 5, IMAGE, 2], [1, IMAGE, 6, 2], [1, 5, IMAGE, 6, 2]])
def test_delimiters_are_inserted_unless_they_are_there(prompt):
    ids, (span,) = WRAPPED.expand(prompt, [image(2, 4)])
    assert ids == [1, 5, IMAGE, IMAGE, 6, 2]
    assert span.start == 2


@given(
    st.sampled_from([PLAIN, ROWS, WRAPPED]),
    st.lists(st.tuples(st.sampled_from([2, 4, 6]), st.sampled_from([2, 4, 6])), max_size=4),
    st.data(),
)
def test_expanded_prompts_stay_as_they_are(placeholders, grids, data):
    images = [image(*grid) for grid in grids]
    texts = [data.draw(st.lists(st.integers(1, 4), max_size=3)) for _ in range(len(images) + 1)]
    prompt = list(itertools.chain(*([*text, IMAGE] for text in texts[:-1]), texts[-1]))
    ids, spans = placeholders.expand(prompt, images)
    assert placeholders.expand(ids, images) == (ids, spans)
    assert [each for each in ids if each < 5] == [each for each in prompt if each < 5]
    assert all(ids[index] == IMAGE for span in spans for index in span.positions)
    assert sum(len(span.tokens) for span in spans) == ids.count(IMAGE)


@pytest.mark.parametrize(
    ("prompt", "images"),
    [([1], 1), ([IMAGE], 0), ([IMAGE], 2), ([IMAGE, IMAGE], 1), ([IMAGE, IMAGE, IMAGE, IMAGE, 1, IMAGE], 2)],
)
def test_other_counts_are_refused_with_both_numbers(prompt, images):
    message = rf"got {prompt.count(IMAGE)} of them in the prompt and {images} images"
    with pytest.raises(RequestError, match=message):
        PLAIN.expand(prompt, [image(2, 6)] * images)


def test_ids_of_any_size_are_left_to_the_check_of_the_vocabulary():
    assert PLAIN.expand([IMAGE, 10**30], [image(2, 2)])[0] == [IMAGE, 10**30]


def test_only_the_templates_placeholders_are_replaced():
    placeholders = Placeholders(IMAGE, written="<begin>", encoded="\n<begin><image><end>\n")
    assert placeholders.in_text("a<begin>b") == "a\n<begin><image><end>\nb"
    assert placeholders.in_text("<begin>x<begin>", marked="<begin>x#begin>") == "\n<begin><image><end>\nx<begin>"
    assert PLAIN.in_text("a<image>") == "a<image>"


@pytest.mark.parametrize(
    "model", ["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen2_vl", "qwen3_vl"))]
)
@pytest.mark.parametrize("grids", [[], [(4, 6)], [(2, 2), (8, 4), (4, 8), (6, 6)]])
@pytest.mark.parametrize("gap", [0, 3])
def test_axis_positions_equal_transformers(model, grids, gap):
    with skipped_without_torch():
        module = import_module(f"transformers.models.{model}.modeling_{model}")
    names = {"qwen2_vl": "Qwen2VLModel", "qwen2_5_vl": "Qwen2_5_VLModel", "qwen3_vl": "Qwen3VLModel"}
    kind = getattr(module, names[model])
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    fake = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    fake.get_vision_position_ids = lambda *args, **kwargs: kind.get_vision_position_ids(fake, *args, **kwargs)
    # transformers distinguishes images by the text between them
    prompt = [1] + [each for _ in grids for each in (IMAGE, *[2] * max(gap, 1))] + [3] * gap
    ids, spans = PLAIN.expand(prompt, [image(*grid) for grid in grids])
    types = torch.tensor([[int(each == IMAGE) for each in ids]])
    grid_thw = torch.tensor([[1, *grid] for grid in grids]) if grids else None
    expected, delta = kind.get_rope_index(fake, torch.tensor([ids]), types, image_grid_thw=grid_thw)
    positions, ours = axis_positions(len(ids), spans)
    np.testing.assert_array_equal(positions, expected[:, 0].numpy())
    assert ours == int(delta[0])
