"""Programs that are compiled before and while an engine serves."""

import contextlib
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve.execution import lowering
from jaxserve.execution.lowering import Lowering
from jaxserve.execution.program_store import ProgramStore
from jaxserve.execution.programs import Programs
from jaxserve.execution.state import ServeState
from jaxserve.models import registry
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.step_plan import StepShape
from jaxserve.tools.planner.program import abstract_params
from tests.checkpoints import hf_dict


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of programs, each of which takes some time and is no more than an object."""
    names: list[str] = []

    def get(self: Programs, name: str, lower: Any) -> object:
        names.append(name)
        time.sleep(0.005)  # as long as the other thread needs to begin
        return object()

    monkeypatch.setattr(Programs, "_get", get)
    monkeypatch.setattr(Lowering, "split", lambda *_: (lambda: None, lambda: None))
    return names


def compiled(compile_ahead: str, num_seqs: int, budget: int, **options: Any) -> Programs:
    """Return the programs of these sizes of steps, all of them compiled."""
    programs = begun(compile_ahead, num_seqs, budget, **options)
    programs.wait_until_warm()
    return programs


def begun(
    compile_ahead: str,
    num_seqs: int,
    budget: int,
    *,
    family: dict[str, Any] | None = None,
    linear_backend: str = "xla",
    max_steps: int = 5,
    directory: Path | None = None,
    **sizes: Any,
) -> Programs:
    """Return the programs of these sizes of steps, of which those for the first request are compiled."""
    arch = registry.from_hf_config(hf_dict("llama", **family or {}))
    schedule = ScheduleConfig(num_seqs, budget, max_model_len=64, page_size=4, num_pages=24, **sizes)
    params = abstract_params(arch, jnp.dtype("float32"))
    backends = {"backend": "xla", "linear_backend": linear_backend}
    own = Lowering(arch, params, schedule, jnp.dtype("float32"), **backends, max_steps=max_steps)
    programs = Programs(own, directory=directory, cache_scope=contextlib.nullcontext)
    programs.warm_up(compile_ahead)
    return programs


def take(programs: Programs, num_tokens: int) -> int:
    """Return the tokens of the program that runs a step of `num_tokens`."""
    step = StepShape(num_tokens)
    program = programs.fit(step)
    assert program is not None
    assert programs.take(program, step) == programs.table[program]
    return program.num_tokens


@pytest.mark.parametrize("compile_ahead", ["all", "background", "minimal"])
@pytest.mark.parametrize("budget", [1, 16, 40])
@pytest.mark.parametrize("few_programs", [False, True])
def test_no_program_is_compiled_twice(names: list[str], compile_ahead: str, budget: int, few_programs: bool) -> None:
    """The smallest bucket may be the largest, too, and two threads compile."""
    compiled(compile_ahead, min(4, budget), budget, few_programs=few_programs, max_drafts=3, has_split_steps=True)
    assert len(names) == len(set(names)) > 5


@pytest.mark.usefixtures("names")
def test_a_program_of_several_steps_runs_single_ones() -> None:
    """One program runs both single and multi-step decode of few rows on a CPU."""
    programs = compiled("all", 2, 4)
    assert [shape[:2] for shape in sorted(programs.table)] == [(1, 5), (2, 5), (3, 1), (4, 1)]
    assert programs.fit(StepShape(2)) == programs.fit(StepShape(2, 5)) == StepShape(2, 5)
    assert 2 + len(programs.table) == programs.lowering.schedule.num_programs(5) == 6


def stored(**options: Any) -> dict[str, Path | None]:
    """Return the files of all programs of an engine, by name, as another start of the same engine looks for them."""
    files: dict[str, Path | None] = {}

    def get(self: ProgramStore, name: str, _: Any) -> Any:
        files[name] = self._path(name)
        return lambda: ServeState(None, None, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgramStore, "get", get)
        compiled("all", 4, **{"budget": 16, "directory": Path("programs")} | options).new_state()
    return files


def test_engines_share_the_programs_that_are_the_same_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = stored()
    writers = {"new_state", "admit", "copy_pages", "set_slot", "set_masks"}
    assert len({*plain.values()}) == len(plain) > len(writers)

    def shared(**options: Any) -> set[str]:
        own = stored(**options)
        return {name for name, file in own.items() if file == plain.get(name)}

    policy: dict[str, Any] = {"tenant_weights": (("a", 2.0),), "targets": ((None, 1.0, 0.1),)}
    assert shared(**policy, long_prefill_token_threshold=8) == {*plain}
    assert shared(family={"eos_token_id": 7}) == {*plain}
    assert {*plain} - shared(budget=8) == {f"step {size}" for size in (12, 16)}
    assert {*plain} - shared(max_steps=3) == {f"multi-step {size} of 5" for size in (1, 2, 3, 4)}
    assert shared(has_split_steps=True, few_programs=True) == {*writers, "step 16"}
    assert shared(linear_backend="native") == writers
    assert shared(family={"intermediate_size": 64}) == shared(max_logprobs=7) == set()
    monkeypatch.setattr(lowering, "step_options", lambda _: {"xla_backend_optimization_level": "3"})
    assert shared() == set(), "machine code of other compiler options"


def test_a_short_run_compiles_nothing_in_the_background(names: list[str]) -> None:
    """Nor does its exit wait: what was begun would have to be finished."""
    for _ in range(3):
        programs = begun("background", 4, 40)
        while (1, 5) not in [shape[:2] for shape in programs.table]:
            time.sleep(0.001)
        num_needed = len(names)
        assert [take(programs, 9) for _ in range(3)] == [40] * 3
        time.sleep(0.1)
        began_s = time.monotonic()
        programs.close()
        programs._stop()
        assert time.monotonic() - began_s < 1
        assert len(names) == num_needed
        names.clear()


def test_a_short_run_loads_stored_programs(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgramStore, "has", lambda _, name: name == "step 8")
    programs = begun("background", 4, 40)
    while StepShape(8) not in programs.table:
        time.sleep(0.01)
    assert take(programs, 7) == 8
    assert "step 7" not in names
    programs.close()


def test_steps_that_lack_a_program_end_the_short_run(names: list[str]) -> None:
    programs = begun("background", 4, 40)
    num_needed = len(names)
    for _ in range(8):
        assert len(names) == num_needed
        take(programs, 9)
    assert programs._compiled.wait(60)
    assert take(programs, 9) < 40
