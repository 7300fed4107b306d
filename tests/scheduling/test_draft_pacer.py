"""The choice of drafted tokens on a simulated clock: text and number of rows change, times of rounds are given."""

import random
from dataclasses import dataclass

import numpy as np
import pytest

from jaxserve.scheduling.draft_pacer import Acceptance, DraftPacer

K = 4
STEP_S, VERIFY_S, DRAFT_S = 0.010, 0.011, 0.001  # one row: bound by memory
ROW_S, VERIFY_ROW_S = 0.0001, 0.0004  # more for each further row: a round computes K + 1 tokens of each


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


class Simulation:
    """A pacer and what it paces, without an engine."""

    def __init__(self, seed: int, noise: float = 0.05) -> None:
        self.rng = np.random.default_rng(seed)
        self.noise, self.now_s = noise, 0.0
        self.pacer = DraftPacer(K, 64, adaptive=True, has_multi_step=False, max_rounds=lambda bucket: 16)
        self.in_flight: list[tuple[int, int]] = []

    def run(self, phase: Phase) -> float:
        """Return the tokens per second of a phase; choices are a dispatch ahead, as the engine's are."""
        slots, num_tokens, start_s = list(range(phase.num_rows)), 0, self.now_s
        while self.now_s < start_s + phase.seconds:
            wanted, num_rounds = self.pacer.choose(phase.num_rows, slots)
            self.in_flight.append((int(wanted.max()), max(num_rounds, 1)))
            if len(self.in_flight) == 2:
                num_tokens += self._end(phase, slots, *self.in_flight.pop(0))
        return num_tokens / (self.now_s - start_s)

    def _end(self, phase: Phase, slots: list[int], num_drafts: int, num_rounds: int) -> int:
        noise = 1 + self.noise * float(self.rng.exponential())
        self.now_s += num_rounds * round_s(phase.num_rows, num_drafts) * noise
        right = self.rng.random((phase.num_rows, num_rounds, K)) < phase.p
        accepted = np.minimum(np.cumprod(right, axis=2).sum(axis=2), num_drafts).astype(np.int32)
        num_tokens = int((accepted + 1).sum())
        if num_drafts:
            self.pacer.accepted(slots, np.full_like(accepted, num_drafts), accepted)
        self.pacer.ended(phase.num_rows, num_drafts, num_rounds, num_tokens / phase.num_rows, self.now_s)
        return num_tokens


PHASES = [Phase(1, 0.85, 60), Phase(1, 0.1, 60), Phase(64, 0.85, 60), Phase(1, 0.85, 60), Phase(64, 0.2, 60)]


@pytest.mark.parametrize("seed", range(3))
def test_every_phase_goes_nearly_as_fast_as_with_the_best_fixed_number(seed: int) -> None:
    """The times give each phase another best: 4 tokens, none, none or 1, ..."""
    simulation = Simulation(seed)
    assert len({max(range(K + 1), key=phase.rate) for phase in PHASES}) > 1
    for phase in PHASES * 2:
        noise = 1 + simulation.noise
        reached = simulation.run(phase) * noise
        assert reached > 0.95 * max(map(phase.rate, range(K + 1))), phase
        assert reached > 0.98 * phase.rate(0), phase


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
    pacer = DraftPacer(K, 4, adaptive=False, has_multi_step=True, max_rounds=lambda bucket: 3)
    for _ in range(100):
        wanted, num_rounds = pacer.choose(2, [0, 3])
        assert wanted.tolist() == [K, K]
        assert 1 <= num_rounds <= 3
        pacer.accepted([0, 3], np.full((2, 3), K, np.int32), np.zeros((2, 3), np.int32))
        pacer.ended(2, K, 3, 3.0, random.random())
