"""Compiled steps that are stubbed, as no compiler for accelerators is needed for what is planned from them."""

from collections.abc import Sequence
from typing import Any

import pytest

from jaxserve.pallas_kernels.deviceless import Chip
from jaxserve.tools.planner.program import Collective, StepCompiler, StepProgram
from tests.planner.plans import SUM_BYTES


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stub compiled steps with 100 kB of temporaries per token and, on several chips, two all-reduces per layer."""

    def step_program(num_tokens: int, num_devices: int) -> StepProgram:
        sums = (Collective("all-reduce", 2, SUM_BYTES * num_tokens),) if num_devices > 1 else ()
        return StepProgram(num_tokens, 100_000 * num_tokens, sums)

    def step_programs(self: StepCompiler, arch: Any, buckets: Sequence[int]) -> list[StepProgram]:
        return [step_program(num_tokens, self.target.num_devices) for num_tokens in buckets]

    def compile_times(self: StepCompiler, arch: Any, max_steps: int) -> dict[str, float]:
        shapes = self.schedule.shapes(max_steps)
        return {"set_slot": 1.5, **{shape.name: 2.0 + (shape.num_rounds > 1) for shape in shapes}}

    monkeypatch.setattr(StepCompiler, "step_programs", step_programs)
    monkeypatch.setattr(StepCompiler, "compile_times", compile_times)
    monkeypatch.setattr(Chip, "unavailable", lambda _: None)
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
