"""CachedTokens: prompt tokens found in a cache, by the tier that supplied them."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens that were not computed, by the tier that had them when their request was scheduled.

    Attributes:
        device: tokens in the page pool; also those that another request was just loading.
        host: tokens loaded from host memory.
        disk: tokens loaded from disk.
        store: tokens loaded from a shared store.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    store: int = 0

    @property
    def total(self) -> int:
        """Number of tokens in all tiers."""
        return self.device + self.loaded

    @property
    def loaded(self) -> int:
        """Number of tokens from tiers below the device."""
        return self.host + self.disk + self.store

    def __add__(self, other: CachedTokens) -> CachedTokens:
        return CachedTokens(*[getattr(self, name) + getattr(other, name) for name in _NAMES])

    def __sub__(self, other: CachedTokens) -> CachedTokens:
        return CachedTokens(*[getattr(self, name) - getattr(other, name) for name in _NAMES])


_NAMES = tuple(field.name for field in fields(CachedTokens))
LOWER_TIERS = _NAMES[1:]  # names of the tiers below the device
NO_CACHED_TOKENS = CachedTokens()
