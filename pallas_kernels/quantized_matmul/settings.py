"""Settings, classes of shapes and conditions that the Pallas kernels of quantised products have in common."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from jaxserve.pallas_kernels.pallas_kernel import Settings
from jaxserve.pallas_kernels.quantized_matmul.interface import FLOAT16_BITS, Problem

SETTINGS = Settings(Path(__file__).parent / "tuned")
ALIGNED = 16  # rows of a matrix: for others, lines of grids are not whole for TMA, and XLA lays out TPU's transposed
ELEMENTS = ("int8", "int4", "e4m3", "e2m1")
SCALES = ("float32", "bfloat16", FLOAT16_BITS.name, "float8_e4m3fn")


def shape_class(problem: Problem) -> dict[str, int | str]:
    """Return the facts that problems with the same best sizes have in common."""
    return {
        "num_rows": 1 << max(0, problem.num_rows - 1).bit_length(),
        "num_outputs": problem.num_outputs,
        "num_inputs": problem.num_inputs,
        "num_groups": problem.num_groups,
        "elements": problem.elements,
        "scale_dtype": problem.scale_dtype.name,
    }


def unsupported(problem: Problem, dtypes: Collection[str]) -> str | None:
    """Return the reason why a kernel cannot run the problem, whatever its sizes, or None if it can.

    Args:
        problem: facts of the call.
        dtypes: dtypes of rows that it multiplies.
    """
    if problem.elements not in ELEMENTS:
        return f"elements must be one of {ELEMENTS}, not {problem.elements}"
    if problem.num_outputs % ALIGNED:
        return f"rows of the matrix must be a multiple of {ALIGNED}, not {problem.num_outputs}"
    if problem.dtype.name not in dtypes or problem.scale_dtype.name not in SCALES:
        names = f"{problem.dtype} and {problem.scale_dtype}"
        return f"rows must be one of {tuple(dtypes)} and scales one of {SCALES}, not {names}"
    return None
