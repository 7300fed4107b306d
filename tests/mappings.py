"""Number of memory mappings in use, of the 65,530 that Linux allows a process: a compiled program takes a few."""

from pathlib import Path

MANY = 20_000  # XLA crashes beyond the limit


def are_many() -> bool:
    """Return whether compiled programs should be forgotten."""
    mappings = Path("/proc/self/maps")
    return mappings.exists() and mappings.read_bytes().count(b"\n") > MANY
