"""Dumps of XLA: the order in which the host begins the parts of a program for a GPU."""

import re
from pathlib import Path


def dump_options(device_kind: str, directory: Path) -> dict[str, str]:
    """Return the options of XLA by which the program of a GPU is dumped to a directory."""
    return {"xla_dump_to": str(directory)} if "NVIDIA" in device_kind else {}


def thunks_of_step(directory: Path) -> list[str]:
    """Return the kinds of what the host begins, in order; what a CUDA graph holds is begun by the device."""
    (dump,) = directory.glob("*.thunk_sequence_after_thunk_passes.txt")
    return [line.split()[1] for line in dump.read_text().splitlines() if re.match(r"\d+:", line)]
