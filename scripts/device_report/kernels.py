"""A device's attention kernels: their required cases, and how they run without such a device."""

import contextlib
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import ModuleType

import jax

from device_report.points import UnavailableError
from jaxserve.pallas_kernels.op import AUTO
from jaxserve.pallas_kernels.ragged_paged_attention import BACKENDS, OP, mosaic_gpu, mosaic_tpu
from jaxserve.pallas_kernels.ragged_paged_attention.interface import Problem
from tests.kernels.attention_cases import CASES, GPU_CASES, TPU_CASES, Case, widened

FALLBACK = "xla"


@dataclass(frozen=True)
class Kernel:
    """A device's attention kernels, as a backend.

    Attributes:
        backend: name of the backend.
        module: module of the backend.
        cases: cases that must be correct.
        tiny_cases: names of the cases for a dry run.
        interpreter: Pallas' interpreter: module and parameter class.
        first_interpreter: first jax version that has it.
    """

    backend: str
    module: ModuleType
    cases: tuple[Case, ...]
    tiny_cases: tuple[str, ...]
    interpreter: tuple[str, str]
    first_interpreter: tuple[int, ...]

    @property
    def backends(self) -> tuple[str, str]:
        """The backend itself, and its fallback."""
        return self.backend, FALLBACK

    def runnable(self) -> AbstractContextManager[None]:
        """Return a context in which traced calls run here: natively on the device, elsewhere in the interpreter, if jax
        has it.
        """
        if jax.default_backend() != "cpu" or jax.__version_info__ < self.first_interpreter:
            return contextlib.nullcontext()
        module, params = self.interpreter
        interpreted: AbstractContextManager[None] = self.module.KERNEL.settings.interpreted(
            getattr(importlib.import_module(module), params)()
        )
        return interpreted

    def best(self, problem: Problem) -> str:
        """Return the kernel if it runs, otherwise XLA's."""
        with self.runnable():
            return FALLBACK if self.module.KERNEL.unsupported_reason(problem) else self.backend

    def served(self, problem: Problem) -> str:
        """Return the kernel if an engine can run it here, otherwise the engine's own choice."""
        requested = AUTO if self.module.KERNEL.unsupported_reason(problem) else self.backend
        return OP.select(requested, lambda backend: backend.unsupported_reason(problem))

    def check(self, backend: str, problem: Problem) -> None:
        """Raise UnavailableError for a backend that cannot run here."""
        with self.runnable():
            if (reason := BACKENDS[backend].unsupported_reason(problem)) is not None:
                raise UnavailableError(f"{backend}: {reason}")


def _tpu_cases() -> Iterator[Case]:
    """Yield the float32 cases, most of them; half-precision ones if they differ; and the kernel's own."""
    yield from map(widened, (*CASES, *TPU_CASES))
    yield from (widened(replace(case, name=f"{case.name}_half")) for case in GPU_CASES if case not in CASES)


KERNELS = {  # keyed by device
    "gpu": Kernel(
        "mosaic_gpu",
        mosaic_gpu,
        GPU_CASES,
        ("rope_bfloat16", "int8_pages_of_8_rope"),
        ("jax.experimental.pallas.mosaic_gpu", "InterpretGPUParams"),
        (0, 11),
    ),
    "tpu": Kernel(
        "mosaic_tpu",
        mosaic_tpu,
        tuple(_tpu_cases()),
        ("rope_bfloat16", "fp8_pages_of_32_rope"),
        ("jax.experimental.pallas.tpu", "InterpretParams"),
        (0, 10),
    ),
}
