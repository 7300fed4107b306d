"""How many of the mappings that Linux lets a process have (65,530) are taken: a compiled program takes a few."""

from pathlib import Path

MANY = 20_000  # beyond all of them XLA crashes


def are_many() -> bool:
    """Whether it is time to forget programs."""
    mappings = Path("/proc/self/maps")
    return mappings.exists() and mappings.read_bytes().count(b"\n") > MANY
