"""How a stage runs a backend of attention: on a GPU as it is, elsewhere in the interpreter, where jax has it."""

import contextlib
from contextlib import AbstractContextManager

import jax

from pallas_kernels.ragged_paged_attention import BACKENDS, mosaic_gpu
from pallas_kernels.ragged_paged_attention.interface import Problem

FIRST_INTERPRETER = (0, 11)  # of jax


def runnable() -> AbstractContextManager[None]:
    """Calls traced inside run here."""
    if jax.default_backend() != "cpu" or jax.__version_info__ < FIRST_INTERPRETER:
        return contextlib.nullcontext()
    from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: PLC0415 - not in every jax

    return mosaic_gpu.interpreted(plgpu.InterpretGPUParams())


def best(problem: Problem) -> str:
    """The kernel that is measured: that of GPUs where it runs, XLA's elsewhere."""
    with runnable():
        return "xla" if BACKENDS["mosaic_gpu"].supports(problem) else "mosaic_gpu"
