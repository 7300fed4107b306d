"""Settings, classes of shapes and conditions that the Pallas kernels of quantised products have in common."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from jaxserve.pallas_kernels.quantized_matmul.interface import Problem
from jaxserve.pallas_kernels.tuning import Settings

SETTINGS = Settings(Path(__file__).parent / "tuned")
ELEMENTS = ("int8", "int4", "e4m3")


def shape_class(problem: Problem) -> dict[str, int | str]:
    """Return the facts that problems with the same best sizes have in common."""
    return {
        "num_rows": 1 << max(0, problem.num_rows - 1).bit_length(),
        "num_outputs": problem.num_outputs,
        "num_inputs": problem.num_inputs,
        "num_groups": problem.num_groups,
        "elements": problem.elements,
    }


def unsupported(problem: Problem, platform: str, dtypes: Collection[str]) -> str | None:
    """Return the reason why a kernel cannot run the problem, whatever its sizes, or None if it can.

    Args:
        problem: facts of the call.
        platform: platform of the kernel.
        dtypes: dtypes of rows that it multiplies.
    """
    if problem.platform != platform and SETTINGS.interpreter is None:
        return f"it runs on {platform.upper()}s only"
    if problem.elements not in ELEMENTS:
        return f"elements must be one of {ELEMENTS}, not {problem.elements}"
    if problem.further:
        return f"it has no {', '.join(problem.further)}"
    if problem.dtype.name not in dtypes or problem.scale_dtype != "float32":
        return f"rows must be one of {dtypes} and scales float32, not {problem.dtype} and {problem.scale_dtype}"
    return None
