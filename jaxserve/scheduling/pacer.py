"""Pacer: chooses the rounds of a dispatch and the tokens to draft, by measured times and by how many are accepted.

A dispatch of several steps saves the host's work between steps, and the device's start and end of a program. In
exchange a request that comes meanwhile waits for it, and for the one planned behind it. Which of the two weighs more
depends on device, model and host, and on what else runs there, so single plain steps, dispatches of several and rounds
with each number of drafted tokens are kinds of dispatches, whose times are measured while serving.

A round with k drafted tokens yields E(k) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k tokens of a row, where a_i is the
probability that its i-th drafted token is accepted once those before it were. For all a_i = p that is
(1 - p^(k+1)) / (1 - p) (Leviathan et al. 2023). A round takes the time of one verification and of k draft steps. The
kind with the most tokens per second is taken. Tokens are the same either way.

Drafts for several rows take the time of the longest, so that k is chosen for all rows together; a row whose drafts
would hardly ever be accepted so far asks for fewer.

Plain steps tell nothing about acceptance, rounds with drafts nothing about the time of plain steps, and both change. So
some dispatches are probes of another kind: after plain steps the other plain kind, the largest k, which shows the
acceptance of all positions, and the best k but for 0; after rounds with drafts all others. The kind whose measurement
is the oldest goes first. Plain probes, those with drafts and scouts may each lose a share of the time of each program,
beyond their gain: with many rows that a draft model has to catch up with, a probe costs more than hundreds with one
row, and those must not wait for it; nor must plain steps, where drafts do not pay any more.

Scouts are probes in which only some of many rows draft, others in each. While plain steps are the best, they show the
acceptance, and a draft model catches up with a few rows alone; their times are not kept. Where they are accepted so
often that rounds of all rows should pay, by the times that those took before, such rounds follow; otherwise probes of
all rows, which only measure these times again, may be rare.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.scheduling.step_plan import StepShape
from jaxserve.scheduling.step_time import FRESH, SEVERAL, SINGLE, STRETCH, StepTime

DISPATCH_S = 0.010  # time that rounds may take together; a new request may have to wait for two dispatches
DECAY = 0.95  # factor on the weight of a round's acceptance with each later round
PRIOR_ROUNDS = 4.0  # weight, in rounds, of the acceptance of all requests in the estimate of one
FIRST_ROUNDS = 2  # rounds of a dispatch before any time is known
FIRST_GUESS = 0.6  # acceptance before any draft was verified
PLAIN, DRAFTS, SCOUT = "plain", "drafts", "scout"  # sorts of probes
PROBE_FRACTION = {PLAIN: 0.002, DRAFTS: 0.01, SCOUT: 0.01}  # share of the time that probes may lose
RARE_FRACTION = 0.001  # share of probes of all rows where scouts show the acceptance
SCOUTS = 4  # rows of a scout that draft
SURPRISE = 0.1  # weight left to earlier acceptance if a scout finds the text changed
MAX_CREDIT_S = 0.02  # maximum of time that probes may have to lose, and what they begin with
PROBES = 2  # dispatches of a probe with drafts; the first is not timed
NO_DRAFTS: NDArray[np.int64] = np.zeros(0, np.int64)
WORTHLESS = 0.01  # probability of acceptance below which a token is not drafted


class Acceptance:
    """Decayed counts of drafted tokens by position, of each slot and of all requests together.

    Rounds of some slots make the counts of others older, too.

    Args:
        max_drafts: most tokens drafted in a round, K.
        num_slots: number of slots, S.
    """

    def __init__(self, max_drafts: int, num_slots: int) -> None:
        self._offered: NDArray[Any] = np.zeros((num_slots, max_drafts))
        self._accepted: NDArray[Any] = np.zeros((num_slots, max_drafts))
        self._all_offered: NDArray[Any] = np.full(max_drafts, PRIOR_ROUNDS)
        self._all_accepted: NDArray[Any] = np.full(max_drafts, PRIOR_ROUNDS * FIRST_GUESS)

    def admit(self, slots: Sequence[int]) -> None:
        """Forget the counts of the requests that had these slots."""
        self._offered[slots] = self._accepted[slots] = 0

    def add(self, slots: Sequence[int], wanted: NDArray[np.int32], accepted: NDArray[np.int32]) -> None:
        """Count rounds [rows, rounds] of some slots.

        A position counts where a token was wanted there, found or not, and all before it were accepted.
        """
        drafting = wanted.any(axis=1)
        chosen, wanted, accepted = np.asarray(slots)[drafting], wanted[drafting], accepted[drafting]
        if not len(chosen):
            return
        position = np.arange(self._offered.shape[1])
        offered = (wanted[:, :, None] > position) & (accepted[:, :, None] >= position)
        taken = offered & (accepted[:, :, None] > position)
        num_rounds = (wanted > 0).sum(axis=1, keepdims=True)
        self.fade(float(np.power(DECAY, num_rounds.mean())))
        self._offered[chosen] += offered.sum(axis=1)
        self._accepted[chosen] += taken.sum(axis=1)
        self._all_offered += offered.sum(axis=(0, 1)) / len(chosen)
        self._all_accepted += taken.sum(axis=(0, 1)) / len(chosen)

    def fade(self, factor: float) -> None:
        """Give all that was counted less weight."""
        self._offered *= factor
        self._accepted *= factor
        self._all_offered *= factor
        self._all_accepted *= factor

    def chances(self, slots: Sequence[int]) -> NDArray[np.float64]:
        """Return the probability that each drafted token of these slots is accepted, those before it included."""
        prior = (self._all_accepted + FIRST_GUESS) / (self._all_offered + 1)
        found = self._accepted[slots] + PRIOR_ROUNDS * prior
        chances: NDArray[np.float64] = np.cumprod(found / (self._offered[slots] + PRIOR_ROUNDS), axis=1)
        return chances


@dataclass(slots=True)
class _Probe:
    """Dispatches of another kind than the best."""

    program: StepShape
    kind: int
    sort: str  # sort of probe whose time it may lose
    num_left: int  # dispatches to choose
    is_scout: bool = False
    usual_s: float = 0.0  # time that a token of each row takes otherwise
    num_running: int = 0  # dispatches in flight


class Pacer:
    """Chooses the number of drafted tokens and of rounds in a dispatch. Times come in as numbers, of any clock.

    Args:
        step_time: times of dispatches, which it adds to.
        max_drafts: most tokens drafted in a round, K.
        num_slots: number of slots.
        adaptive: choose by measurements; otherwise always draft K tokens where there may be drafts.
        dispatch_s: time that the rounds of a dispatch may take together; infinite for as many rounds as there may be,
            where plain dispatches are of one kind.
    """

    def __init__(
        self,
        step_time: StepTime,
        max_drafts: int = 0,
        num_slots: int = 0,
        *,
        adaptive: bool = True,
        dispatch_s: float = DISPATCH_S,
    ) -> None:
        self._step_time = step_time
        self._max_drafts, self._adaptive = max_drafts, adaptive
        self._dispatch_s, self._is_timed = dispatch_s, math.isfinite(dispatch_s)
        self._acceptance = Acceptance(max_drafts, num_slots)
        # Time that probes may lose by now, by program and sort.
        self._credit_s = defaultdict[StepShape, dict[str, float]](lambda: dict.fromkeys(PROBE_FRACTION, MAX_CREDIT_S))
        self._last: tuple[StepShape, int, bool] | None = None  # program and kind of the latest end, if a scout's
        self._now_s = 0.0
        self._probe: _Probe | None = None
        self._again: tuple[StepShape, int] | None = None  # program and most steps of a choice that does not change yet
        self._is_probe = False  # the latest choice is a dispatch of the probe
        self._next_scout = 0  # place of the first row of the next scout that drafts, among the running ones

    def admit(self, slots: Sequence[int]) -> None:
        """Forget the counts of the requests that had these slots."""
        self._acceptance.admit(slots)

    def choose(self, program: StepShape, slots: Sequence[int], max_steps: int = 1) -> tuple[NDArray[np.int64], int]:
        """Return the tokens to draft for each of the running slots, and the most rounds of the dispatch.

        The tokens are all zero where plain steps are to be taken.

        Args:
            program: program that holds the rows, with drafts if there are slots.
            slots: slots of the running requests; empty if none may draft.
            max_steps: most steps of a plain dispatch of these rows.
        """
        if not slots and (program, max_steps) == self._again:
            return NO_DRAFTS, 1
        self._is_probe = False
        chances = self._acceptance.chances(slots) if len(slots) else None
        kind, is_measured = SINGLE, False
        if chances is not None and not self._adaptive:
            kind, is_measured = self._max_drafts, True
        elif chances is not None or (self._is_timed and max_steps > 1):
            kind, is_measured = self._best(program, chances, max_steps)
        num_rounds = self._num_rounds(program, kind, max_steps)
        self._again = (program, max_steps) if chances is None and num_rounds == 1 and not is_measured else None
        if kind <= 0 or chances is None:
            return np.zeros(len(slots), np.int64), num_rounds
        wanted = np.full(len(slots), kind, np.int64)
        if self._is_probe and self._probe is not None and self._probe.is_scout:
            wanted[(np.arange(len(slots)) - self._next_scout) % len(slots) >= SCOUTS] = 0
        elif not is_measured:
            wanted = np.minimum(wanted, np.maximum((chances >= WORTHLESS).sum(axis=1), 1))
        return wanted, num_rounds

    def launched(self, num_drafts: int, num_rounds: int) -> bool:
        """Note the most tokens drafted for a row, and the rounds, of the dispatch planned after the latest choice.

        It may be another one than was chosen, where pages are short or a request can join. A probe is then given up,
        and if it was one with drafts, it is some time until the next.

        Returns:
            True if the dispatch is one of a scout.
        """
        probe = self._probe
        if probe is None or not self._is_probe:
            return False
        if self._kind(num_drafts, num_rounds) == probe.kind:
            probe.num_left -= 1
            probe.num_running += 1
            return probe.is_scout
        if probe.kind > 0:
            self._credit_s[probe.program][probe.sort] = -MAX_CREDIT_S
        times = self._step_time.dispatches(probe.program)
        times.kinds[probe.kind].measured_s = self._now_s  # the next is of another kind
        probe.num_left = 0
        if not probe.num_running:
            self._probe = None
        return False

    def ended(
        self,
        program: StepShape,
        num_drafts: int,
        num_planned: int,
        num_rounds: int,
        num_tokens: float,
        end_s: float,
        *,
        is_scout: bool = False,
    ) -> None:
        """Note the end of a dispatch in which all rows were in decode.

        Args:
            program: program of the choice for so many rows.
            num_drafts: most tokens drafted for a row in a round; 0 in a plain dispatch.
            num_planned: rounds, or steps, that were planned.
            num_rounds: rounds, or steps, that ran.
            num_tokens: tokens of a row, on average; of a row that drafted in a dispatch of a scout.
            end_s: time of the end.
            is_scout: True for a dispatch of a scout.

        The time of a dispatch is that since the previous end, so that the host's share is included. The first dispatch
        of a kind is left out: a draft model may have had to catch up.
        """
        kind, last, seconds = self._kind(num_drafts, num_planned), self._last, end_s - self._now_s
        self._last, self._now_s = (program, kind, is_scout), end_s
        times, credit_s, probe = self._step_time.dispatches(program), self._credit_s[program], self._probe
        is_probe = False
        if probe is not None and (probe.program, probe.kind, probe.is_scout) == self._last:
            is_probe = True
            probe.num_running -= 1
            if last is not None:
                credit_s[probe.sort] -= seconds - (num_rounds if is_scout else num_tokens) * probe.usual_s
            if not (probe.num_running or probe.num_left):
                self._probe = None
                if is_scout and num_tokens * probe.usual_s > num_rounds * times.guess_s(num_drafts):
                    self._acceptance.fade(SURPRISE)
                    self._probe = _Probe(program, probe.kind, SCOUT, PROBES)
        if last is None:
            return
        for sort, fraction in PROBE_FRACTION.items():
            is_rare = sort == DRAFTS and times.has_scouts
            credit_s[sort] = min(credit_s[sort] + (RARE_FRACTION if is_rare else fraction) * seconds, MAX_CREDIT_S)
        credit_s[PLAIN] = max(credit_s[PLAIN], -MAX_CREDIT_S)  # a moment was slow, rather than a kind
        is_timed = last == self._last and num_rounds and not is_scout
        if not is_timed or times.add(kind, num_rounds, seconds, end_s, is_probe=is_probe):
            self._again = None

    def accepted(self, slots: Sequence[int], wanted: NDArray[np.int32], accepted: NDArray[np.int32]) -> None:
        """Note how many drafted tokens were wanted and accepted in each round [rows, rounds] of some slots."""
        self._acceptance.add(slots, wanted, accepted)

    def pause(self) -> None:
        """Note that something else ran, so that the time of the next dispatch cannot be told from its end."""
        self._last = self._probe = None

    def _kind(self, num_drafts: int, num_rounds: int) -> int:
        return num_drafts or (SEVERAL if self._is_timed and num_rounds > 1 else SINGLE)

    def _best(self, program: StepShape, chances: NDArray[np.float64] | None, max_steps: int) -> tuple[int, bool]:
        """Return the kind of the next dispatch, and whether it is chosen to be measured: then it must be just that."""
        times, drafts = self._step_time.dispatches(program), self._max_drafts if chances is not None else 0
        has_several = self._is_timed and max_steps > 1 and times.step_s <= self._dispatch_s / 2
        plain = [SINGLE, SEVERAL] if has_several else [SINGLE]
        kinds = dict.fromkeys([*plain, drafts, max(drafts // 2, 1)]) if drafts else plain
        for kind in kinds:
            if not times.is_tried(kind, self._num_rounds(program, kind, max_steps)):
                return kind, True
        usual = min(plain, key=times.round_s)
        usual_s, best_drafts = times.round_s(usual), 0
        if chances is not None:
            round_s = times.rounds_s(drafts, usual_s)
            tokens = np.concatenate([[len(chances)], len(chances) + np.cumsum(chances.sum(axis=0))])
            best, best_drafts = int(np.argmax(tokens / round_s)), 1 + int(np.argmax(tokens[1:] / round_s[1:]))
            usual, usual_s = best or usual, round_s[best] / float(tokens[best]) * len(chances)
            times.has_scouts = not best and len(chances) > SCOUTS
        others = range(1, drafts + 1) if usual > 0 else [drafts, best_drafts] if drafts else []
        return self._probed(program, usual, [*plain, *others], usual_s)

    def _probed(self, program: StepShape, usual: int, kinds: Sequence[int], usual_s: float) -> tuple[int, bool]:
        """Return the same as `_best`, for a probe while one is due; a token of each row usually takes `usual_s`."""
        if self._probe is not None and (self._probe.program != program or self._probe.kind == usual):
            self._probe = None  # the choice has followed it if its rounds paid
        times, credit_s = self._step_time.dispatches(program), self._credit_s[program]
        due = [kind for kind in kinds if kind != usual and credit_s[DRAFTS if kind > 0 else PLAIN] > 0]
        if self._probe is None and due and times.num_usual >= FRESH:
            oldest = min(due, key=lambda kind: (times.kinds[kind].measured_s, kind))
            num_dispatches = PROBES if oldest > 0 else 1 + STRETCH[oldest]
            self._probe = _Probe(program, oldest, DRAFTS if oldest > 0 else PLAIN, num_dispatches)
        elif self._probe is None and times.has_scouts and credit_s[SCOUT] > 0:
            self._next_scout += SCOUTS
            self._probe = _Probe(program, self._max_drafts, SCOUT, PROBES, is_scout=True)
        if self._probe is not None:
            self._probe.usual_s = usual_s
        if self._probe is None or not self._probe.num_left:
            return usual, False
        self._is_probe = True
        return self._probe.kind, True

    def _num_rounds(self, program: StepShape, kind: int, max_steps: int) -> int:
        """Return the most rounds of a dispatch of a kind; of plain ones, at most `max_steps`."""
        most = program.num_rounds if kind > 0 else max_steps
        if not self._is_timed:
            return most
        if kind == SINGLE:
            return 1
        times = self._step_time.dispatches(program)
        round_s = times.guess_s(kind) if kind > 0 else max(times.step_s, min(times.several_s))
        if math.isinf(round_s):
            return min(most, FIRST_ROUNDS)
        return min(most, max(int(self._dispatch_s / round_s), 1 if kind > 0 else 2))
