"""Remedies for a model that does not fit: each is planned before it is advised."""

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.api.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.tools.planner.sizes import Memory, Sizes
from jaxserve.tools.planner.targets import Target, larger_targets

_FORMATS = ("int8", "int4")
_SMALL_STEPS = {"max_num_seqs": 16, "max_num_batched_tokens": 256}
_HIGH_UTILIZATION = 0.95


@dataclass(frozen=True)
class Remedy:
    """Options with which a model fits, or lacks less memory.

    Attributes:
        options: options as on the command line.
        missing: bytes that each chip lacks for a request with max_model_len tokens; 0 if it fits.
        fitting_len: largest max_model_len that fits; None if the given one does, 0 if none does.
    """

    options: str
    missing: int
    fitting_len: int | None

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key: remedies that fit come first, then remedies that fit shorter requests."""
        return 2 if self.fitting_len == 0 else int(self.fitting_len is not None), self.missing

    @property
    def fits(self) -> bool:
        """True if the model fits, perhaps only for shorter requests."""
        return self.fitting_len != 0


def find_fitting_len(config: EngineConfig, target: Target, memory: Memory, schedule: ScheduleConfig) -> int | None:
    """Return the largest max_model_len that fits; None if the planned one does, 0 if none does.

    Args:
        config: engine options.
        target: the chips.
        memory: memory per device with the planned max_model_len.
        schedule: sizes with the planned max_model_len.
    """
    # Slots grow with max_model_len: a length that fits beside the slots of the longest requests fits in any case, and
    # the slots of a shorter length give an upper bound.
    if not memory.missing:
        return None

    def sized(length: int) -> Memory:
        """Return the memory per device with another max_model_len."""
        sizes = Sizes.resolve_tightest(dataclasses.replace(config, max_model_len=length), target)
        return dataclasses.replace(sizes.memory, temp=memory.temp)

    def bound(memory: Memory) -> int:
        """Return the largest shorter length whose pages fit alongside the slots that `memory` counts."""
        tokens = schedule.kv_groups.max_tokens(memory.num_fitting_pages)
        return schedule.max_model_len - 1 if tokens is None else min(tokens, schedule.max_model_len - 1)

    if (least := bound(memory)) <= 0:
        return 0
    lengths = range(least + 1, bound(sized(least)) + 1)
    return least + bisect_left(lengths, True, key=lambda length: sized(length).missing > 0)


def find_remedies(config: EngineConfig, target: Target, memory: Memory) -> list[Remedy]:
    """Return the best remedy of each type for a model that fits with no max_model_len.

    Args:
        config: options with which it does not fit.
        target: chips on which it does not fit.
        memory: memory per device with these options.
    """
    missing = memory.missing * target.devices_per_chip
    formats, chips = [{"quantization": each} for each in _FORMATS], list(larger_targets(target))
    best = [_best(_tried(config, [(each, target) for each in formats], memory.temp), missing)]
    settings = [(each, target) for each in _settings(config, target) if each]
    best += [remedy for remedy in _tried(config, settings, memory.temp) if remedy.fits]
    best.append(_best(_tried(config, [({}, each) for each in chips], memory.temp), missing))
    found = [remedy for remedy in best if remedy is not None]
    if not any(remedy.fits for remedy in found):
        both = ((options, each) for each in chips for options in formats)
        if (together := _best(_tried(config, both, memory.temp), missing)) is not None and together.fits:
            found.append(together)
    return found


def _settings(config: EngineConfig, target: Target) -> Iterator[Mapping[str, Any]]:
    """Yield options that reserve less memory for steps than `config`, or that use more of the target's memory."""
    yield {name: value for name, value in _SMALL_STEPS.items() if (getattr(config, name) or math.inf) > value}
    if target.platform != "cpu" and config.gpu_memory_utilization < _HIGH_UTILIZATION:
        yield {"gpu_memory_utilization": _HIGH_UTILIZATION}


def _best(remedies: Iterator[Remedy], missing: int) -> Remedy | None:
    """Return the first remedy that fits, or else the one that lacks least; None if all lack `missing` bytes or more."""
    others = []
    for remedy in remedies:
        if remedy.fitting_len is None:
            return remedy
        if remedy.fits or remedy.missing < missing:
            others.append(remedy)
    return min(others, key=lambda remedy: remedy.rank, default=None)


def _tried(config: EngineConfig, candidates: Iterable[tuple[Mapping[str, Any], Target]], temp: int) -> Iterator[Remedy]:
    """Yield a remedy for each pair of options and chips, without the pairs that the engine refuses.

    Args:
        config: options that `candidates` change.
        candidates: changed options and chips.
        temp: size of temporaries per device.
    """
    for options, target in candidates:
        tried = dataclasses.replace(config, **options, tensor_parallel_size=target.num_devices)
        try:
            sizes = Sizes.resolve_tightest(tried, target)
            memory = dataclasses.replace(sizes.memory, temp=temp)
            fitting_len = find_fitting_len(tried, target, memory, sizes.schedule)
        except ConfigError:
            continue
        flags = [f"--{name.replace('_', '-')} {value}" for name, value in options.items()]
        flags += [f"--target {target.name}"] if target.num_devices != config.tensor_parallel_size else []
        yield Remedy(" ".join(flags), memory.missing * target.devices_per_chip, fitting_len)
