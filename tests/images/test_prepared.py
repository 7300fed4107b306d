import numpy as np

from jaxserve.core.prompt import read_prompt
from jaxserve.images.prepared import ExpandedPrompt, ImageSpan, PreparedImage, count_embeddings


def image(digest: bytes, num_embeddings: int) -> PreparedImage:
    return PreparedImage(digest, np.zeros((4 * num_embeddings, 12), np.float32), (4, num_embeddings), num_embeddings)


def test_spans_index_the_expanded_prompt():
    # A break after two embeddings, as Pixtral's.
    span = ImageSpan(image(b"a" * 16, 4), 7, np.asarray([0, 1, 3, 4], np.int32))
    assert span.positions.tolist() == [7, 8, 10, 11]
    assert (span.first, span.end) == (7, 12)


def test_images_are_equal_by_digest():
    assert image(b"a" * 16, 1) == image(b"a" * 16, 2) != image(b"b" * 16, 1)
    assert len({image(b"a" * 16, 1), image(b"a" * 16, 2)}) == 1


def test_embeddings_are_counted_over_all_images():
    spans = [ImageSpan(image(b"a" * 16, size), 0, np.arange(size, dtype=np.int32)) for size in (3, 5)]
    assert count_embeddings(spans) == 8


def test_expanded_prompts_are_cut_unless_they_have_images():
    images = (ImageSpan(image(b"a" * 16, 2), 1, np.arange(2, dtype=np.int32)),)
    assert read_prompt({"prompt_token_ids": ExpandedPrompt([1, 2, 3])}, None, None, 2)[1] == [2, 3]
    assert read_prompt({"prompt_token_ids": ExpandedPrompt([1, 2, 3], images)}, None, None, 2)[1] == [1, 2, 3]
