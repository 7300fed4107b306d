"""Groups of layers with pages of their own: what they hold, and where each layer is."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.layers.kv_forms import HeadVectors
from jaxserve.models.arch import ArchConfig
from jaxserve.models.kv_layout import MAX_KV_GROUPS
from jaxserve.models.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from jaxserve.scheduling.kv_cache.groups import KVGroups
from jaxserve.tools.planner.models import read_model

PAGE_SIZES = st.integers(1, 16)
WINDOWS = st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=4)


def arch_of(*windows: int | None) -> ArchConfig:
    layers = (LayerSpec(AttentionSpec(1, HeadVectors(1, 8), window=window), MlpSpec(8)) for window in windows)
    return ArchConfig("Fake", vocab_size=8, hidden_size=8, layers=tuple(layers), max_position=64, norm_eps=1e-6)


@given(page_size=PAGE_SIZES, windows=WINDOWS, num_tokens=st.integers(1, 300))
def test_pages_grow_with_tokens_and_no_more_than_without_windows(
    page_size: int, windows: list[int | None], num_tokens: int
) -> None:
    groups = KVGroups(page_size, tuple(windows))
    num_pages = groups.num_pages(num_tokens)
    assert groups.num_pages(num_tokens - 1) <= num_pages <= groups.size * groups.num_blocks(num_tokens)
    most = groups.max_tokens(num_pages)
    assert most is None or groups.num_pages(most) <= num_pages < groups.num_pages(most + 1)
    assert most is None or most >= num_tokens


@given(page_size=PAGE_SIZES, windows=WINDOWS.filter(any), num_tokens=st.integers(1, 300))
def test_a_window_reaches_only_held_blocks(page_size: int, windows: list[int | None], num_tokens: int) -> None:
    """No token of a window, in whatever block it begins, is in a block that was released."""
    groups = KVGroups(page_size, tuple(windows))
    first, window = groups.first_block(num_tokens), max(w for w in groups.windows if w is not None)
    seen = range(max(num_tokens - window + 1, 0), num_tokens + 1)
    assert first == seen[0] // groups.page_size
    assert groups.num_blocks(num_tokens + 1) - first <= groups.num_held_blocks
    if num_tokens % groups.page_size == 0:
        assert num_tokens // groups.page_size - first <= groups.num_window_blocks


@pytest.mark.parametrize(
    ("windows", "group_windows", "group_layers"),
    [
        ((None,) * 5, (None,), 5),
        ((8,) * 5, (8,), 5),
        ((8, None) * 3, (8, None), 3),
        ((8, 8, None, None) * 2, (8, None), 4),
        (((8,) * 5 + (None,)) * 10 + (8, 8), (8,) * 5 + (None,), 11),  # Gemma 3 27B
        ((None, None, 8, 8, 8, 8), (None, 8, 8), 2),  # does not repeat
        ((None, *[8] * 27), (None, *[8] * 7), 4),
    ],
)
def test_layers_of_one_window_share_groups(
    windows: tuple[int | None, ...], group_windows: tuple[int | None, ...], group_layers: int
) -> None:
    arch = arch_of(*windows)
    assert (arch.kv_layout.windows, arch.kv_layout.num_pool_layers) == (group_windows, group_layers)


@pytest.mark.parametrize(
    ("windows", "num_pages", "share"),
    [
        ((4096,) * 32, 258, 1 / 8),  # Mistral 7B v0.1
        (((1024,) * 5 + (None,)) * 10 + (1024,) * 2, 2048 + 5 * 66, 1 / 5),  # Gemma 3 27B: a sixth, and the windows
        ((None, 4096) * 21, 2048 + 258, 9 / 16),  # Gemma 2 9B
        ((None,) * 32, 2048, 1),
    ],
)
def test_windows_save_this_fraction_of_a_long_sequence(
    windows: tuple[int | None, ...], num_pages: int, share: float
) -> None:
    arch, num_tokens, page_size = arch_of(*windows), 32768, 16
    assert KVGroups(page_size, arch.kv_layout.windows).num_pages(num_tokens) == num_pages
    # A page has room for the layers of a group; without groups a sequence would hold all layers of all its tokens.
    held = num_pages * page_size * arch.kv_layout.num_pool_layers
    assert held / (num_tokens * arch.num_layers) == pytest.approx(share, rel=0.04)


@given(windows=st.lists(st.sampled_from([None, 4, 8]), min_size=1, max_size=12), times=st.integers(1, 3))
def test_no_two_layers_have_the_same_position(windows: list[int | None], times: int) -> None:
    arch = arch_of(*windows * times)
    layers, period = arch.kv_layout.layers, arch.period
    assert max(Counter(layers).values()) == 1
    assert all(arch.kv_layout.windows[kept.group] == window for kept, window in zip(layers, arch.windows, strict=True))
    for number in range(period if 2 * period <= arch.num_layers else 0):  # scanned: the group is static, steps are even
        alike = layers[number::period]
        assert len({kept.group for kept in alike}) == 1
        assert len({b.position - a.position for a, b in pairwise(alike)}) <= 1
    if 2 * period > arch.num_layers:
        assert len(arch.kv_layout.windows) <= MAX_KV_GROUPS + 2


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8, 16])
def test_pages_of_two_head_sizes_are_full_on_every_device(num_devices: int) -> None:
    """A layer's share of a page is another one where several devices have a copy of each of the fewer heads."""
    arch = read_model("gemma-4-31b")[1].divided(num_devices)
    local = arch.local(num_devices)
    positions = [[(kept.group, kept.position) for kept in each.kv_layout.layers] for each in (arch, local)]
    assert (positions[0], arch.period) == (positions[1], local.period)
    assert arch.num_layers % arch.period == 0
    sizes = [attention.kv.token_size for attention in local.attention_layers]
    pool = len(local.kv_layout.windows) * local.kv_layout.num_pool_layers * max(sizes)
    assert pool == sum(sizes) == local.kv_layout.num_layers_read * max(sizes)
