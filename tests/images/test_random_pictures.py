"""Random sizes, modes and settings: each image is as transformers has it, or refused by one of the two."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.errors import ConfigError, RequestError
from jaxserve.images.processor import as_rgb
from jaxserve.images.processor_files import image_processor
from tests.images.test_processors import FAMILIES, all_modes, expected_patches

pytestmark = pytest.mark.long

SIDES = st.one_of(
    st.sampled_from([28, 56]),
    st.fixed_dictionaries({"height": st.sampled_from([28, 56, 70]), "width": st.sampled_from([28, 56, 84])}),
    st.fixed_dictionaries({"shortest_edge": st.sampled_from([28, 56])}),
    st.fixed_dictionaries({"longest_edge": st.sampled_from([56, 140])}),
    st.fixed_dictionaries({"shortest_edge": st.just(28), "longest_edge": st.sampled_from([56, 5000])}),
)
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "size": SIDES,
    "crop_size": SIDES,
    **dict.fromkeys(("do_center_crop", "do_pad", "do_rescale", "do_normalize", "default_to_square"), st.booleans()),
    "pad_size": st.just({"height": 112, "width": 112}),
    "rescale_factor": st.sampled_from([1 / 255, 0.5]),
    "resample": st.integers(0, 5),
    "image_mean": st.sampled_from([[0.1, 0.2, 0.3]]),
    **dict.fromkeys(("min_pixels", "max_pixels"), st.sampled_from([784, 3136, 50000])),
    "max_soft_tokens": st.sampled_from([70, 140]),
}
SIDE = st.integers(1, 300)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.sampled_from(sorted(all_modes())),
    SIDE,
    SIDE,
    st.fixed_dictionaries({}, optional=SETTINGS),
)
def test_random_pictures_equal_transformers(
    family: str, mode: str, height: int, width: int, changes: dict[str, Any]
) -> None:
    fields, config = FAMILIES[family]
    image = all_modes((height, width))[mode]
    try:
        processor = image_processor({**fields, **changes}, config)
        patches = processor.prepare(processor.fit(as_rgb(image)), (height, width)).patches
    except (ConfigError, RequestError):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, family, ({**fields, **changes}, config))
        try:
            expected = expected_patches(family, processor, image)
        except (ValueError, AttributeError, TypeError):  # its ways to refuse settings
            return
    np.testing.assert_array_equal(patches, expected)
