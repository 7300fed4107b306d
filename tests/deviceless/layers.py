"""Large models of which a test needs few layers."""

import dataclasses

from jaxserve.models.arch import ArchConfig


def first_layers(arch: ArchConfig, count: int | None) -> ArchConfig:
    """Return a model of the first layers of another, or all of it.

    Programs for GPUs have every layer one after the other, so that all of a large model take minutes to compile.
    """
    if count is None:
        return arch
    return dataclasses.replace(arch, num_layers=count, ropes=arch.ropes[:count], windows=arch.windows[:count])
