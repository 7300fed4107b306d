"""Programs that are compiled before and while an engine serves."""

import contextlib
import time
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve.execution import lowering
from jaxserve.execution.lowering import Lowering
from jaxserve.execution.program_store import ProgramStore
from jaxserve.execution.programs import Programs
from jaxserve.models import registry
from jaxserve.planner.program import abstract_params
from jaxserve.schedule_config import ScheduleConfig
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
    monkeypatch.setattr(Lowering, "split", lambda *_: (None, None))
    return names


def compiled(compile_ahead: str, num_seqs: int, budget: int, **sizes: Any) -> Programs:
    """Return the programs of these sizes of steps, all of them compiled."""
    programs = begun(compile_ahead, num_seqs, budget, **sizes)
    programs.wait_until_warm()
    return programs


def begun(compile_ahead: str, num_seqs: int, budget: int, **sizes: Any) -> Programs:
    """Return the programs of these sizes of steps, of which those for the first request are compiled."""
    arch = registry.from_hf_config(hf_dict("llama"))
    schedule = ScheduleConfig(num_seqs, budget, max_model_len=64, page_size=4, num_pages=24, **sizes)
    params = abstract_params(arch, jnp.dtype("float32"))
    own = Lowering(arch, params, schedule, jnp.dtype("float32"), backend="xla", linear_backend="xla", max_steps=5)
    programs = Programs(own, directory=None, cache_scope=contextlib.nullcontext)
    programs.warm_up(compile_ahead)
    return programs


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
    assert sorted(programs.steps) == [1, 2, 3, 4]
    assert sorted(programs.multi_steps) == [1, 2]
    made = {id(program) for program in (*programs.steps.values(), *programs.multi_steps.values())}
    assert 2 + len(made) == programs.lowering.schedule.num_programs(5) == 6


@pytest.mark.usefixtures("names")
def test_engines_of_other_policies_share_their_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = compiled("minimal", 4, 16)._store._facts
    own: dict[str, Any] = {"tenant_weights": (("a", 2.0),), "targets": ((None, 1.0, 0.1),)}
    own |= {"has_split_steps": True, "few_programs": True, "long_prefill_token_threshold": 8}
    assert compiled("minimal", 4, 16, **own)._store._facts == plain
    assert compiled("minimal", 4, 16, max_logprobs=7)._store._facts != plain
    monkeypatch.setattr(lowering, "step_options", lambda _: {"xla_backend_optimization_level": "3"})
    assert compiled("minimal", 4, 16)._store._facts != plain, "machine code of other compiler options"


def test_a_short_run_compiles_nothing_in_the_background(names: list[str]) -> None:
    """Nor does its exit wait: what was begun would have to be finished."""
    for _ in range(3):
        programs = begun("background", 4, 40)
        num_needed = len(names)
        assert [programs.bucket_for(9) for _ in range(3)] == [40] * 3
        time.sleep(0.1)
        began_s = time.monotonic()
        programs.close()
        programs._stop()
        assert time.monotonic() - began_s < 1
        assert len(names) == num_needed
        names.clear()


def test_a_short_run_loads_what_is_stored(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgramStore, "has", lambda _, name: name == "step 8")
    programs = begun("background", 4, 40)
    while 8 not in programs.steps:
        time.sleep(0.01)
    assert programs.bucket_for(7) == 8
    assert "step 7" not in names
    programs.close()


def test_steps_that_lack_a_program_end_the_short_run(names: list[str]) -> None:
    programs = begun("background", 4, 40)
    num_needed = len(names)
    for _ in range(8):
        assert len(names) == num_needed
        programs.bucket_for(9)
    programs._compiled.wait()
    assert programs.bucket_for(9) < 40
