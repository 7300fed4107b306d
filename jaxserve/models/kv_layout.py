"""KVLayout: KV groups, whose layers share pages, and each layer's position in its group."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

from jaxserve.errors import ConfigError
from jaxserve.layers.indexed_latents import IndexedLatents
from jaxserve.layers.kv_forms import HeadVectors, KVForm, LatentForm, MixedHeads, PartOfPages
from jaxserve.layers.page_bounds import BoundedHeads
from jaxserve.models.layer_spec import LayerSpec, local_kv

MAX_KV_GROUPS = 8  # maximum if the layers do not repeat
NO_GROUP = -1  # recurrent layers and cross attention, which keep no keys and values


class _Kind(NamedTuple):
    """Properties that all layers of a KV group share.

    Attributes:
        window: sliding window in tokens, None for full attention.
        kv: vectors that a token keeps in such a layer.
        num_parts: number of such layers that fill one pool layer.
    """

    window: int | None
    kv: HeadVectors | LatentForm[Any]
    num_parts: int


class LayerKV(NamedTuple):
    """A layer's keys and values in the pool.

    Attributes:
        group: KV group, or NO_GROUP.
        position: the layer's position in the group, or among the recurrent layers.
        kind: properties that all layers in the group share; None without a group.
    """

    group: int
    position: int
    kind: _Kind | None


@dataclass(frozen=True)
class KVLayout:
    """Layout of the KV pool.

    Attributes:
        layers: for each layer, the group and position of the keys and values that it reads: its own, or an earlier
            layer's.
        pool: token layout in the pool; if layers have different heads, it fits the larger ones.
        num_groups: number of KV groups, of which some have no layer in a pipeline stage; None if all have layers.
    """

    layers: tuple[LayerKV, ...]
    pool: KVForm[Any]
    num_groups: int | None = None

    def form(self, layer: int) -> KVForm[Any]:
        """Return a layer's token layout in the pool."""
        kind = self.layers[layer].kind
        return self.pool if kind is None else self._form(kind)

    def _form(self, kind: _Kind) -> KVForm[Any]:
        """Return the token layout for layers with these properties: a part of a page if their heads are smaller."""
        if isinstance(self.pool, BoundedHeads | IndexedLatents):
            return self.pool
        if not isinstance(self.pool, MixedHeads) or kind.kv != self.pool.smaller:
            return kind.kv
        return PartOfPages(self.pool.smaller.num_kv_heads, self.pool.smaller.head_dim, kind.num_parts)

    @cached_property
    def _groups(self) -> list[_Kind]:
        """Properties of each KV group's layers, by group."""
        kinds = {layer.group: layer.kind for layer in self.layers if layer.kind is not None}
        any_kind = next(iter(kinds.values()))  # no layer reads the pages of a group without layers
        return [kinds.get(group, any_kind) for group in range(self.num_groups or len(kinds))]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each group's sliding window; None for full attention."""
        return tuple(kind.window for kind in self._groups)

    @property
    def forms(self) -> tuple[KVForm[Any], ...]:
        """Each group's token layout."""
        return tuple(map(self._form, self._groups))

    def with_bounds(self, budget: int, axis: tuple[str, ...] | None) -> "KVLayout":
        """Return the layout in which pages have bounds of their keys; see `BoundedHeads` for the arguments."""
        assert isinstance(self.pool, HeadVectors), "`ArchConfig.with_page_budget` has checked the layers"
        return replace(self, pool=BoundedHeads(self.pool.num_kv_heads, self.pool.head_dim, budget, axis))

    @property
    def num_pool_layers(self) -> int:
        """Layers per page, enough for the largest group."""
        return 1 + max(layer.position // layer.kind.num_parts for layer in self.layers if layer.kind is not None)

    @property
    def num_layers_read(self) -> Fraction:
        """Layers whose keys and values a token reads, counted in pool layers."""
        kinds = (layer.kind for layer in self.layers if layer.kind is not None)
        return sum((Fraction(1, kind.num_parts) for kind in kinds), Fraction(0))


def lay_out(
    layers: Sequence[LayerSpec],
    *,
    num_devices: int,
    period: int | None,
    has_one_group: bool = False,
    groups: Sequence[int] | None = None,
    num_groups: int | None = None,
) -> KVLayout:
    """Assign each layer a KV group and a position in the KV pool.

    Args:
        layers: layer specs.
        num_devices: devices that divide the heads.
        period: period in layers; None if the layers do not repeat.
        has_one_group: True if all layers share one group, whatever their windows.
        groups: group of each layer of a pipeline stage in the whole model; None for a whole model.
        num_groups: number of groups in the whole model; None for a whole model.
    """
    kinds = _kinds(layers, num_devices)
    smaller, *others = sorted(
        {kind.kv: None for kind in kinds if kind is not None}, key=partial(_token_size, num_devices=1)
    )
    pool: KVForm[Any] = smaller
    if others:
        [larger] = others
        assert isinstance(larger, HeadVectors), "no model has both MLA and KV heads"
        assert isinstance(smaller, HeadVectors), "no model has both MLA and KV heads"
        pool = MixedHeads(larger.num_kv_heads, larger.head_dim, smaller)
    if isinstance(pool, IndexedLatents) and any(layer.attention.shares_choice for layer in layers):
        pool = replace(pool, num_indexers=sum(not layer.attention.shares_choice for layer in layers))
    sources = [_source(layers, layer) for layer in range(len(layers))]
    num_recurrent = [*accumulate((layer.state is not None for layer in layers), initial=0)]
    if groups is not None:
        own = _in_groups(kinds, groups, sources, num_recurrent)
    elif has_one_group:
        assert None not in kinds, "only draft models have one group, and these have attention in all layers"
        own = [LayerKV(0, layer * kind.num_parts, kind) for layer, kind in enumerate(kinds) if kind is not None]
    else:
        num_own = next((layer for layer, source in enumerate(sources) if source < layer), len(layers))
        own = _group(kinds[:num_own], period, num_recurrent)
    return KVLayout(tuple(own[source] for source in sources), pool, num_groups)


def _in_groups(
    kinds: Sequence[_Kind | None], groups: Sequence[int], sources: Sequence[int], num_recurrent: Sequence[int]
) -> list[LayerKV]:
    """Assign each layer of a pipeline stage its position in the group that the whole model gives it.

    Args:
        kinds: each layer's kind.
        groups: each layer's group.
        sources: layer whose keys and values each layer reads.
        num_recurrent: recurrent layers before each layer.
    """
    num_before, found = Counter[int](), list[LayerKV]()
    for layer, (kind, group) in enumerate(zip(kinds, groups, strict=True)):
        found.append(LayerKV(group, num_recurrent[layer] if kind is None else num_before[group], kind))
        num_before[group] += kind is not None and sources[layer] == layer
    return found


def _group(kinds: Sequence[_Kind | None], period: int | None, num_recurrent: Sequence[int]) -> list[LayerKV]:
    """Assign each layer a KV group and a position in it; groups take equal space per page in every period.

    If the layers do not repeat, a group has as many layers as the rarest kind, or more if there would be more than
    MAX_KV_GROUPS groups; a kind's last group may have fewer.

    Args:
        kinds: each layer's kind.
        period: see `lay_out`.
        num_recurrent: recurrent layers before each layer.
    """
    counts = Counter(kind for kind in kinds[:period] if kind is not None)
    pool_layers = {kind: -(-count // kind.num_parts) for kind, count in counts.items()}
    group_size = math.gcd(*pool_layers.values())
    if period is None:
        group_size = max(min(pool_layers.values()), -(-sum(pool_layers.values()) // MAX_KV_GROUPS))
        period = len(kinds)
    num_groups = (-(-count // group_size) for count in pool_layers.values())
    first_groups = dict(zip(pool_layers, accumulate(num_groups, initial=0), strict=False))
    grouped: list[LayerKV] = []
    for layer, kind in enumerate(kinds):
        if kind is None:
            grouped.append(LayerKV(NO_GROUP, num_recurrent[layer], None))
            continue
        start, num_layers = layer // period * period, group_size * kind.num_parts
        group, index = divmod(kinds[start:layer].count(kind), num_layers)
        grouped.append(LayerKV(first_groups[kind] + group, start // period * num_layers + index, kind))
    return grouped


def _source(layers: Sequence[LayerSpec], layer: int) -> int:
    """Return the index of the layer whose keys and values a layer reads: its own index unless it shares KV."""
    source = None if layers[layer].state else layers[layer].attention.kv_source
    return layer if source is None or source < 0 else source


def _kinds(layers: Iterable[LayerSpec], num_devices: int) -> list[_Kind | None]:
    """Return each layer's properties by which KV groups are made; None for layers that keep no keys and values."""
    mixers = [layer.attention if layer.keeps_tokens else None for layer in layers]
    sizes = {mixer.kv: _token_size(mixer.kv, num_devices) for mixer in mixers if mixer is not None}
    largest = max(sizes.values())
    return [_Kind(mixer.window, mixer.kv, largest // sizes[mixer.kv]) if mixer else None for mixer in mixers]


def _token_size(kv: HeadVectors | LatentForm[Any], num_devices: int) -> int:
    """Return the elements per token in a layer on a device; 1 for MLA, whose layers are alike."""
    local = local_kv(kv, num_devices)
    return local.token_size if isinstance(local, HeadVectors) else 1


def check_sizes(layers: Iterable[LayerSpec], num_devices: int) -> None:
    """Raise a ConfigError if layers differ in their KV heads so that one kind cannot fill the other's pages."""
    kinds = dict.fromkeys(layer.attention.kv for layer in layers if layer.keeps_tokens)
    sizes = [_token_size(kv, num_devices) for kv in kinds]
    if max(sizes) % min(sizes):
        raise ConfigError(
            f"num_key_value_heads * head_dim must be a multiple or a divisor of the same of global layers, so that "
            f"their pages have equal bytes, got {sizes[0] // 2} and {sizes[1] // 2} on a device"
        )


def filled_period(layers: Sequence[LayerSpec], period: int, num_devices: int) -> int:
    """Return the first multiple of a period that fills whole pages; the period if the multiple would not repeat.

    Args:
        layers: layer specs.
        period: number of layers after which specs repeat.
        num_devices: devices that divide the heads.
    """
    counts = Counter(kind.num_parts for kind in _kinds(layers, num_devices)[:period] if kind is not None)
    factor = math.lcm(*(num_parts // math.gcd(num_parts, count) for num_parts, count in counts.items()))
    return factor * period if 2 * factor * period <= len(layers) else period
