"""Settings, classes of shapes and conditions that the Pallas kernels of grouped products have in common."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from jaxserve.pallas_kernels.grouped_matmul.interface import Problem
from jaxserve.pallas_kernels.pallas_kernel import Settings

SETTINGS = Settings(Path(__file__).parent / "tuned")


def shape_class(problem: Problem) -> dict[str, int | str]:
    """Return the facts that problems with the same best sizes have in common."""
    return {
        "mean_rows": problem.mean_rows,
        "num_outputs": problem.num_outputs,
        "num_inputs": problem.num_inputs,
        "dtype": problem.matrix_dtype.name,
    }


def unsupported(problem: Problem, dtypes: Collection[str], *, outputs: int, inputs: int) -> str | None:
    """Return the reason why a kernel cannot run the problem, or None if it can.

    Args:
        problem: facts of the call.
        dtypes: dtypes that it multiplies.
        outputs: number of which the rows of matrices must be a multiple.
        inputs: number of which their columns must be a multiple.
    """
    if problem.is_packed:
        return "packed matrices are for the native kernels"
    if problem.matrix_dtype.name not in dtypes or problem.dtype != problem.matrix_dtype:
        return f"rows and matrices must both be one of {dtypes}, not {problem.dtype} and {problem.matrix_dtype}"
    if problem.num_inputs % inputs:
        return f"columns of matrices must be a multiple of {inputs}, not {problem.num_inputs}"
    if problem.num_outputs % outputs:
        return f"rows of matrices must be a multiple of {outputs}, not {problem.num_outputs}"
    return None
