"""The choice of drafted tokens on a simulated clock: text and number of rows change, times of rounds are given."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from jaxserve.scheduling.pacer import Acceptance, Pacer
from jaxserve.scheduling.step_plan import StepShape
from jaxserve.scheduling.step_time import StepTime
from tests.parameters import mainly

K = 4
STEP_S, VERIFY_S, DRAFT_S = 0.010, 0.011, 0.001  # one row: bound by memory
ROW_S, VERIFY_ROW_S = 0.0001, 0.0004  # more for each further row: a round computes K + 1 tokens of each
HOST_S = 0.008  # time of a dispatch beside its rounds, where there is any
MAX_STEPS = 16
MAX_MISSED = 200  # tokens of a request: there are no more to catch up with


def round_s(num_rows: int, num_drafts: int) -> float:
    """Time of a round, of a plain step without drafts."""
    if not num_drafts:
        return STEP_S + ROW_S * (num_rows - 1)
    return VERIFY_S + VERIFY_ROW_S * (num_rows - 1) + num_drafts * (DRAFT_S + ROW_S / 10 * (num_rows - 1))


def expected_tokens(p: float, num_drafts: int) -> float:
    return sum(p**i for i in range(num_drafts + 1))


@dataclass(frozen=True)
class Phase:
    """A stretch of text: rows in decode, and the chance that a drafted token is accepted."""

    num_rows: int
    p: float
    seconds: float

    def rate(self, num_drafts: int) -> float:
        return self.num_rows * expected_tokens(self.p, num_drafts) / round_s(self.num_rows, num_drafts)


def program_of(num_rows: int, num_rounds: int = MAX_STEPS) -> StepShape:
    return StepShape(num_rows, num_rounds, has_drafts=True)


class Simulation:
    """A pacer and what it paces, without an engine."""

    def __init__(self, seed: int, noise: float = 0.05, *, multi_step: bool = False, slow_s: float = 0.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.noise, self.now_s, self.multi_step, self.slow_s = noise, 0.0, multi_step, slow_s
        self.pacer = Pacer(StepTime(), K, 64, dispatch_s=0.3) if multi_step else Pacer(StepTime(), K, 64)
        self.in_flight: list[tuple[NDArray[np.int64], int, bool]] = []
        self.catch_up_s = 0.0  # time for each token that the draft model has missed of a row
        self.missed = np.zeros(64)  # these tokens, by row

    def run(self, phase: Phase) -> float:
        """Return the tokens per second of a phase; choices are a dispatch ahead, as the engine's are."""
        slots, num_tokens, start_s = list(range(phase.num_rows)), 0, self.now_s
        while self.now_s < start_s + phase.seconds:
            wanted, num_rounds = self.pacer.choose(
                program_of(phase.num_rows), slots, MAX_STEPS if self.multi_step else 1
            )
            is_scout = self.pacer.launched(int(wanted.max()), num_rounds)
            self.in_flight.append((wanted, num_rounds, is_scout))
            if len(self.in_flight) == 2:
                num_tokens += self._end(phase, slots, *self.in_flight.pop(0))
        return num_tokens / (self.now_s - start_s)

    def _end(self, phase: Phase, slots: list[int], wanted: NDArray[np.int64], num_rounds: int, is_scout: bool) -> int:
        num_drafts = int(wanted.max())
        if len(wanted) != phase.num_rows:  # planned in the phase before
            wanted = np.full(phase.num_rows, num_drafts)
        noise = 1 + self.noise * float(self.rng.exponential())
        if self.now_s < self.slow_s and not num_drafts and num_rounds > 1:
            noise *= 4  # a machine that has something else to do
        self.now_s += (num_rounds * round_s(phase.num_rows, num_drafts) + HOST_S * self.multi_step) * noise
        drafting = np.flatnonzero(wanted)
        self.now_s += self.catch_up_s * float(self.missed[drafting].sum())
        self.missed = np.minimum(self.missed + num_rounds, MAX_MISSED)
        self.missed[drafting] = 0
        right = self.rng.random((phase.num_rows, num_rounds, K)) < phase.p
        accepted = np.minimum(np.cumprod(right, axis=2).sum(axis=2), wanted[:, None]).astype(np.int32)
        num_tokens = int((accepted + 1).sum())
        if num_drafts:
            self.pacer.acceptance.add(
                slots, np.broadcast_to(wanted[:, None], accepted.shape).astype(np.int32), accepted
            )
        mean = float(accepted[drafting].sum(axis=1).mean() + num_rounds) if is_scout else num_tokens / len(slots)
        program = program_of(phase.num_rows)
        self.pacer.ended(program, num_drafts, num_rounds, num_rounds, mean, self.now_s, is_scout=is_scout)
        return num_tokens


PHASES = [Phase(1, 0.85, 60), Phase(1, 0.1, 60), Phase(64, 0.85, 60), Phase(1, 0.85, 60), Phase(64, 0.2, 60)]


@pytest.mark.parametrize(("seed", "seconds", "num_times"), [(2, 20, 1), pytest.param(0, 60, 2, marks=pytest.mark.full)])
def test_every_phase_goes_nearly_as_fast_as_with_the_best_fixed_number(
    seed: int, seconds: float, num_times: int
) -> None:
    """The times give each phase another best: 4 tokens, none, none or 1, ..."""
    simulation = Simulation(seed)
    assert len({max(range(K + 1), key=phase.rate) for phase in PHASES}) > 1
    for phase in [replace(phase, seconds=seconds) for phase in PHASES] * num_times:
        noise = 1 + simulation.noise
        reached = simulation.run(phase) * noise
        assert reached > 0.95 * max(map(phase.rate, range(K + 1))), phase
        assert reached > 0.98 * phase.rate(0), phase


@pytest.mark.parametrize("seed", mainly([0], 1, 2))
def test_short_phases_of_many_rows_hardly_pay_for_drafts_that_are_not_worth_it(seed: int) -> None:
    """A draft model that has missed 64 rows takes as long to catch up as twenty plain steps; a few rows show enough."""
    simulation, hard = Simulation(seed), Phase(64, 0.05, 3)
    simulation.catch_up_s = 0.3 / (64 * MAX_MISSED)
    simulation.run(hard)  # trials of all kinds
    reached = [simulation.run(hard) * (1 + simulation.noise) for _ in range(4)]
    assert min(reached) > 0.96 * hard.rate(0)
    easy = Phase(64, 0.95, 30)
    assert simulation.run(easy) > 1.2 * easy.rate(0), "and they show when drafts have become worth it"


@pytest.mark.parametrize("seed", mainly([0], 1, 2))
def test_a_costly_probe_of_many_rows_does_not_delay_those_of_one_row(seed: int) -> None:
    """A draft model has missed much of 64 rows; meanwhile the text of one row becomes easy."""
    simulation = Simulation(seed)
    hard, many, easy = Phase(1, 0.05, 20), Phase(64, 0.05, 10), Phase(1, 0.9, 20)
    simulation.run(hard)
    simulation.catch_up_s = 2.0 / (64 * MAX_MISSED)
    simulation.run(many)
    simulation.catch_up_s = 0.0
    simulation.run(easy)
    assert simulation.run(easy) * (1 + simulation.noise) > 0.95 * max(map(easy.rate, range(K + 1)))


@pytest.mark.parametrize("seed", mainly([0], 1, 2))
def test_plain_steps_that_were_slow_at_first_are_measured_again(seed: int) -> None:
    """Drafts are hardly accepted, and several plain steps in a dispatch are the fastest; single ones are not."""
    simulation, phase = Simulation(seed, multi_step=True, slow_s=2.0), Phase(1, 0.05, 30)
    for _ in range(5):  # probes while all was slow are paid for by then
        simulation.run(phase)
    fastest = 1 / (round_s(1, 0) + HOST_S / MAX_STEPS)
    assert 1 / (round_s(1, 0) + HOST_S) < phase.rate(1) / 1.2
    assert simulation.run(phase) * (1 + simulation.noise) > 0.95 * fastest


def test_tokens_that_are_hardly_accepted_are_measured_and_then_not_drafted() -> None:
    """A token that is accepted after fifteen others is nearly worthless; trials of all of them end nevertheless."""
    most, chosen, now_s = 16, [], 0.0
    pacer = Pacer(StepTime(), most, 1)
    for _ in range(200):
        wanted, _ = pacer.choose(program_of(1, 1), [0])
        chosen.append(int(wanted[0]))
        pacer.launched(chosen[-1], 1)
        if chosen[-1]:
            pacer.acceptance.add([0], np.array([[chosen[-1]]], np.int32), np.zeros((1, 1), np.int32))
        now_s += 0.001 * (1 + chosen[-1])
        pacer.ended(program_of(1, 1), chosen[-1], 1, 1, 1.0, now_s)
    assert most in chosen
    assert chosen.count(0) > 150


def run_accepted(
    pacer: Pacer, max_steps: int, launch: Callable[[int], int] = lambda k: k, now_s: float = 0.0
) -> list[int]:
    """Let 32 rows decode while every draft is accepted; return the numbers of tokens that were wanted."""
    chosen, slots = [], range(32)
    for _ in range(500):
        wanted, num_rounds = pacer.choose(program_of(64, 3), slots, max_steps)
        chosen.append(int(wanted.max()))
        k = launch(chosen[-1])
        pacer.launched(k, num_rounds)
        now_s += (0.012 if k else 0.010) * num_rounds
        if k:
            drafts = np.full((32, num_rounds), k, np.int32)
            pacer.acceptance.add(slots, drafts, drafts)
        pacer.ended(program_of(64, 3), k, num_rounds, num_rounds, num_rounds * (k + 1.0), now_s)
    return chosen


@pytest.mark.parametrize("max_steps", [1, 16])
def test_drafts_are_tried_if_plain_dispatches_have_one_step(max_steps: int) -> None:
    """Programs of several plain steps have fewer rows than those with drafts on accelerators."""
    pacer = Pacer(StepTime(), K, 64)
    assert run_accepted(pacer, max_steps).count(K) > 400


def test_a_probe_that_could_not_be_planned_is_not_waited_for() -> None:
    pacer = Pacer(StepTime(), K, 64)
    run_accepted(pacer, 1)
    chosen = run_accepted(pacer, 1, lambda k: k if k in (0, K) else 0, now_s=100.0)  # the same happens with few pages
    assert 1 < sum(k not in (0, K) for k in chosen) < 20
    assert set(run_accepted(pacer, 1, now_s=200.0)) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("seed", mainly([0], 1, 2))
def test_probes_continue_after_interleaved_steps(seed: int) -> None:
    """A probe may be the first dispatch after a prompt, whose time is not known."""
    simulation = Simulation(seed)
    simulation.run(Phase(64, 0.05, 30))
    simulation.pacer.pause()
    easy = Phase(64, 0.95, 30)
    assert simulation.run(easy) > 1.2 * easy.rate(0)


def test_acceptance_is_of_positions_and_of_requests() -> None:
    acceptance = Acceptance(2, 3)
    wanted = np.full((2, 40), 2, np.int32)
    accepted = np.array([[2] * 40, [1, 0] * 20], np.int32)
    acceptance.add([0, 2], wanted, accepted)
    chances = acceptance.chances([0, 2, 1])
    assert chances[0] == pytest.approx([1, 1], abs=0.1)
    assert chances[1] == pytest.approx([0.5, 0], abs=0.1)
    assert chances[2] == pytest.approx(chances[:2].mean(axis=0), abs=0.15), "nothing is known but the others'"
    acceptance.admit([0])
    assert acceptance.chances([0]) == pytest.approx(chances[2:], abs=0.01)


def test_a_fixed_number_is_always_drafted() -> None:
    pacer = Pacer(StepTime(), K, 4, adaptive=False)
    for _ in range(100):
        wanted, num_rounds = pacer.choose(program_of(2, 3), [0, 3])
        assert wanted.tolist() == [K, K]
        assert 1 <= num_rounds <= 3
        pacer.acceptance.add([0, 3], np.full((2, 3), K, np.int32), np.zeros((2, 3), np.int32))
        pacer.ended(program_of(2, 3), K, 3, 3, 3.0, random.random())
