"""Names for types in Pallas kernel bodies, which have no public classes: annotations name the kind of value."""

from typing import Any

Scalar = Any
"""Traced int32 or bool without axes: a number that is known only on the chip."""
Ref = Any
"""Reference to an array, or to barriers or semaphores, in the memory that the comment or docstring names."""
Registers = Any
"""Array that was loaded from memory: it is in a GPU warpgroup's registers, or in a TPU's vector registers."""
