"""Places of layers in the KV groups, whose pages they share."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

MAX_KV_GROUPS = 8  # most groups of layers whose kinds do not repeat
STATES = -1  # group of layers without keys and values, which have a state


class KVPlace(NamedTuple):
    """Place of a layer's keys and values, or of its state.

    Attributes:
        group: KV group of the layer; STATES if it has a state.
        layer: number of the layer in the group, or among the layers with a state.
    """

    group: int
    layer: int


class LayerKind(NamedTuple):
    """Facts that layers of a KV group have in common.

    Attributes:
        window: sliding window in tokens, None for full attention.
        is_global: True if their KV heads are those of `GlobalAttention`.
        num_parts: number of these layers that take the room of one layer of the pool.
    """

    window: int | None
    is_global: bool
    num_parts: int


def place_layers(kinds: Sequence[LayerKind | None], period: int | None) -> list[KVPlace]:
    """Return the place of each layer in the KV groups: layers of one kind and of equal room in each, in every period.

    If the layers do not repeat, a group has as many layers as have the rarest kind, or more if there would be more
    than MAX_KV_GROUPS groups; the last group of a kind may have fewer. Layers with a state are in none.

    Args:
        kinds: kind of each layer; None if it has a state.
        period: number of layers after which their kinds repeat; None if they do not.
    """
    counts = Counter(kind for kind in kinds[:period] if kind is not None)
    rooms = {kind: -(-count // kind.num_parts) for kind, count in counts.items()}
    group_room = math.gcd(*rooms.values())
    if period is None:
        group_room, period = max(min(rooms.values()), -(-sum(rooms.values()) // MAX_KV_GROUPS)), len(kinds)
    num_groups = (-(-room // group_room) for room in rooms.values())
    first_groups = dict(zip(rooms, accumulate(num_groups, initial=0), strict=False))
    places: list[KVPlace] = []
    for layer, kind in enumerate(kinds):
        if kind is None:
            places.append(KVPlace(STATES, kinds[:layer].count(None)))
            continue
        start, group_size = layer // period * period, group_room * kind.num_parts
        group, number = divmod(kinds[start:layer].count(kind), group_size)
        places.append(KVPlace(first_groups[kind] + group, start // period * group_size + number))
    return places
