"""DraftPacer: chooses how many tokens to draft, by how many are accepted and by how long rounds take.

A round with k drafted tokens yields E(k) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k tokens of a row, where a_i is the
probability that its i-th drafted token is accepted once those before it were. For all a_i = p that is
(1 - p^(k+1)) / (1 - p) (Leviathan et al. 2023). A round takes the time of the verification and k times that of a draft
step, which are measured while serving. The k with the most tokens per second is taken, 0 where plain steps yield more.

Drafts for several rows take the time of the longest, so that k is chosen for all rows together; a row whose drafts
would hardly ever be accepted so far asks for fewer.

Plain steps tell nothing about acceptance, rounds with drafts nothing about the time of plain steps, and both change. So
some dispatches are probes with another k. After plain steps those are the largest k, which shows the acceptance of all
positions, and the best k but for 0; after rounds with drafts all others, plain steps among them. The kind whose
measurement is the oldest goes first; single plain steps and dispatches of several are kinds of their own, and a probe
says which it needs. Plain probes, those with drafts and scouts may each lose the share PROBE_SHARE of the time of each
program: with many rows, of which a draft model has missed much, a probe costs more than hundreds with one row, and
those must not wait for it; nor must plain steps, where drafts do not pay any more.

Scouts are probes in which only some of many rows draft, others in each. While plain steps are the best, they show the
acceptance, and a draft model catches up with a few rows alone; their times are not kept. Where they are accepted so
often that rounds of all rows should pay, by the times that those took before, such rounds follow; otherwise probes of
all rows, which only measure these times again, may be rare.

A dispatch has a start and an end, so that a round of a long dispatch takes less than one of a short dispatch. Of a kind
that was measured in short dispatches only, as at first, before its time is known, more are measured.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.scheduling.plan import StepShape

DISPATCH_S = 0.010  # time that the rounds of a dispatch may take together
DECAY = 0.95  # factor on the weight of a round's acceptance with each later round
PRIOR_ROUNDS = 4.0  # weight, in rounds, of the acceptance of all requests in the estimate of one
FIRST_ROUNDS = 2  # rounds of a dispatch before any time is known
ROUND_PER_STEP = 3.0  # plain steps in the time of a round, before that is known
FIRST_GUESS = 0.6  # acceptance before any draft was verified
PROBE_SHARE = 0.01  # share of the time that probes may lose
RARE_SHARE = 0.001  # share of probes of all rows where scouts show the acceptance
SCOUTS = 4  # rows of a scout that draft
SURPRISE = 0.1  # weight that is left to what was accepted before where a scout finds the text changed
MAX_CREDIT_S = 0.02  # time that probes may lose at once
SAMPLES = 5  # latest times of a kind of dispatch, of which the median counts
LATEST = 5  # latest dispatches of the usual kind, whose median tells how fast the machine is now
SINGLE, SEVERAL = 0, -1  # kinds of plain dispatches by their steps, beside numbers of drafted tokens
PLAIN, DRAFTS, SCOUT = "plain", "drafts", "scout"  # sorts of probes
TRIALS = 2  # times that are measured of a kind before it is judged
MOST_TRIALS = 4  # times that are measured of a kind whose dispatches are shorter than they may be
WORTHLESS = 0.01  # probability of acceptance below which a token is not drafted


class Acceptance:
    """Decayed counts of drafted tokens by position, of each slot and of all requests together.

    Rounds of some slots make those of others older, too.

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
        """Forget what was counted of the requests that had these slots."""
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
class _Costs:
    """Times of one program: seconds per round by k, of plain steps by one and by several in a dispatch.

    A machine is now faster, now slower, and a kind that is not in use is measured seldom. So times are kept as
    multiples of `slowness`, which the usual kind shows around them; those of the usual kind itself stay as they are.

    Attributes:
        times: times of dispatches by kind, in seconds per round, with their rounds.
        usual: kind that was found best.
        latest: latest times of the usual kind, as multiples of the kept one.
        slowness: time that a dispatch takes now, as a multiple of the kept times.
        kept_s: medians of the kept times by kind.
        has_scouts: True if a few of the rows can show the acceptance, and need to.
        measured_s: time of the last measurement of each kind.
        credit_s: time that probes may lose by now, by their sort.
    """

    times: dict[int, deque[tuple[float, int]]] = field(default_factory=dict)
    usual: int | None = None
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    slowness: float = 1.0
    kept_s: dict[int, float] = field(default_factory=dict)
    has_scouts: bool = False
    measured_s: dict[int, float] = field(default_factory=dict)
    credit_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys((PLAIN, DRAFTS, SCOUT), 0.0))

    def add(self, kind: int, num_rounds: int, seconds: float, now_s: float) -> None:
        """Add the time of a dispatch."""
        self.measured_s[kind] = now_s
        times = self.times.setdefault(kind, deque(maxlen=SAMPLES))
        if kind == self.usual and len(times) >= MOST_TRIALS:
            self.latest.append(seconds / num_rounds / self.kept_s[kind])
            self.slowness = median(self.latest)
        else:
            times.append((seconds / num_rounds / self.slowness, num_rounds))
            self.kept_s[kind] = _median_s(times)

    def median_s(self, kind: int) -> float:
        """Return the seconds per round of a kind of dispatch; infinite for one that was not measured."""
        return self.kept_s.get(kind, math.inf) * self.slowness

    def guess_s(self, num_drafts: int) -> float:
        """Return the seconds per round of a number of drafts, or an estimate before any was measured."""
        known = [self.median_s(k) for k in self.times if k > 0]
        found = self.median_s(num_drafts)
        return found if math.isfinite(found) else max(known) if known else ROUND_PER_STEP * self.median_s(SINGLE)

    def is_tried(self, kind: int, num_rounds: int) -> bool:
        """Return whether a kind of dispatch, that would have so many rounds now, was measured enough to judge it."""
        times = self.times.get(kind, ())
        if len(times) < TRIALS:
            return False
        return len(times) >= MOST_TRIALS or 2 * max(rounds for _, rounds in times) >= num_rounds

    def round_s(self, max_drafts: int, plain: Sequence[int]) -> list[float]:
        """Return the seconds per round for each k from 0; where k was measured little, on a line by least squares."""
        drafts = [k for k in self.times if k > 0]
        known = {k: self.median_s(k) for k in drafts}
        weights = np.array([sum(num_rounds for _, num_rounds in self.times[k]) for k in drafts], np.float64)
        k, seconds = np.array(drafts, np.float64), np.array(list(known.values()))
        mean_k, mean_s = np.average(k, weights=weights), np.average(seconds, weights=weights)
        spread = float(np.sum(weights * (k - mean_k) ** 2))
        slope = (
            max(float(np.sum(weights * (k - mean_k) * (seconds - mean_s))) / spread, 0.0)
            if spread
            else mean_s / k[0] / 2
        )
        plain_s = min(map(self.median_s, plain))
        line = [max(float(mean_s + (each - mean_k) * slope), plain_s) for each in range(1, max_drafts + 1)]
        well_known = {k: s for k, s in known.items() if len(self.times[k]) >= MOST_TRIALS}
        return [plain_s, *(well_known.get(k, s) for k, s in enumerate(line, 1))]


def _median_s(times: Iterable[tuple[float, int]]) -> float:
    """Return the median of times with their rounds, of which there is one.

    It counts rounds, not dispatches: one that ended after a few rounds says little about others.
    """
    ordered = sorted(times)
    half = sum(num_rounds for _, num_rounds in ordered) / 2
    for seconds, num_rounds in ordered[:-1]:
        half -= num_rounds
        if half <= 0:
            return seconds
    return ordered[-1][0]


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

    @property
    def num_drafts(self) -> int:
        """Tokens drafted for a row in a round; 0 in plain dispatches."""
        return max(self.kind, 0)


class DraftPacer:
    """Chooses the number of drafted tokens and of rounds in a dispatch. Times come in as numbers, of any clock.

    Args:
        max_drafts: most tokens drafted in a round, K.
        num_slots: number of slots.
        adaptive: choose by what is measured; otherwise always draft K tokens.
        has_multi_step: True if plain dispatches of one step and of several are to be compared, where there may be
            several; otherwise all of them are of one kind, however many steps they have.
        dispatch_s: time that the rounds of a dispatch may take together; infinite for as many rounds as there may be.
    """

    def __init__(
        self,
        max_drafts: int,
        num_slots: int,
        *,
        adaptive: bool,
        has_multi_step: bool,
        dispatch_s: float = DISPATCH_S,
    ) -> None:
        self._max_drafts, self._adaptive = max_drafts, adaptive
        self._dispatch_s = dispatch_s
        self._acceptance = Acceptance(max_drafts, num_slots)
        self._has_multi_step = has_multi_step
        self._plain: Sequence[int] = [SINGLE]  # kinds of plain dispatches that the next one may be of
        self._costs: dict[StepShape, _Costs] = {}
        self._last: tuple[StepShape, int, bool] | None = None  # program and k of the latest end, and whether a scout's
        self._now_s = 0.0
        self._probe: _Probe | None = None
        self._is_probe = False  # the latest choice is a dispatch of the probe
        self._next_scout = 0  # place of the first row of the next scout that drafts, among the running ones

    def admit(self, slots: Sequence[int]) -> None:
        """Forget what was counted of the requests that had these slots."""
        self._acceptance.admit(slots)

    def choose(self, program: StepShape, slots: Sequence[int], max_steps: int = 1) -> tuple[NDArray[np.int64], int]:
        """Return the tokens to draft for each of the running slots, and the most rounds of the dispatch.

        The tokens are all zero where plain steps are to be taken. The rounds are then the steps of a dispatch that is
        to be measured, and 0 where their number does not matter.

        Args:
            program: program with drafts that holds the rows.
            slots: slots of the running requests.
            max_steps: most steps of a plain dispatch of these rows.
        """
        self._plain = [SINGLE, SEVERAL] if self._has_multi_step and max_steps > 1 else [SINGLE]
        self._is_probe = False
        chances = self._acceptance.chances(slots)
        kind, is_measured = self._best(program, chances) if self._adaptive else (self._max_drafts, True)
        if kind <= 0:
            return np.zeros(len(slots), np.int64), self._plain_steps(program, kind) if is_measured else 0
        wanted = np.full(len(slots), kind, np.int64)
        if self._is_probe and self._probe is not None and self._probe.is_scout:
            wanted[(np.arange(len(slots)) - self._next_scout) % len(slots) >= SCOUTS] = 0
        elif not is_measured:
            wanted = np.minimum(wanted, np.maximum((chances >= WORTHLESS).sum(axis=1), 1))
        return wanted, self._num_rounds(program, kind)

    def launched(self, num_drafts: int) -> bool:
        """Note the most tokens that are drafted for a row in the dispatch that was planned after the latest choice.

        It may be another one than was chosen, where pages are short or a request can join. A probe is then given up,
        and it is some time until the next.

        Returns:
            True if the dispatch is one of a scout.
        """
        probe = self._probe
        if probe is None or not self._is_probe:
            return False
        if num_drafts == probe.num_drafts:
            probe.num_left -= 1
            probe.num_running += 1
            return probe.is_scout
        costs = self._costs[probe.program]
        costs.credit_s[probe.sort] = -MAX_CREDIT_S
        costs.measured_s[probe.kind] = self._now_s  # the next is of another kind
        probe.num_left = 0
        if not probe.num_running:
            self._probe = None
        return False

    def ended(
        self,
        program: StepShape,
        num_drafts: int,
        num_rounds: int,
        num_tokens: float,
        end_s: float,
        *,
        is_scout: bool = False,
    ) -> None:
        """Note the end of a dispatch in which all rows were in decode.

        Args:
            program: program with drafts that ran, or would have run its rows.
            num_drafts: most tokens drafted for a row in a round; 0 in a plain dispatch.
            num_rounds: rounds, or steps, that ran.
            num_tokens: tokens of a row, on average; of a row that drafted in a dispatch of a scout.
            end_s: time of the end.
            is_scout: True for a dispatch of a scout.

        The time of a dispatch is that since the previous end, so that the host's share is included. The first dispatch
        of a kind is left out: a draft model may have had to catch up.
        """
        last, seconds = self._last, end_s - self._now_s
        self._last, self._now_s = (program, num_drafts, is_scout), end_s
        costs, probe = self._costs.setdefault(program, _Costs()), self._probe
        if probe is not None and (probe.program, probe.num_drafts, probe.is_scout) == self._last:
            probe.num_running -= 1
            if last is not None:
                lost_s = seconds - (num_rounds if is_scout else num_tokens) * probe.usual_s
                costs.credit_s[probe.sort] -= max(lost_s, 0.0)
                if lost_s < 0 and not is_scout:  # go on until the choice follows
                    probe.num_left = max(probe.num_left, 1)
            if not (probe.num_running or probe.num_left):
                self._probe = None
                if is_scout and num_tokens * probe.usual_s > num_rounds * costs.guess_s(num_drafts):
                    self._acceptance.fade(SURPRISE)
                    self._probe = _Probe(program, probe.kind, SCOUT, TRIALS)
        if last is None:
            return
        for sort, credit_s in costs.credit_s.items():
            share = RARE_SHARE if sort == DRAFTS and costs.has_scouts else PROBE_SHARE
            costs.credit_s[sort] = min(credit_s + share * seconds, MAX_CREDIT_S)
        if last == self._last and num_rounds and not is_scout:
            kind = num_drafts or (SEVERAL if self._has_multi_step and num_rounds > 1 else SINGLE)
            costs.add(kind, num_rounds, seconds, end_s)

    def accepted(self, slots: Sequence[int], wanted: NDArray[np.int32], accepted: NDArray[np.int32]) -> None:
        """Note how many drafted tokens were wanted and accepted in each round [rows, rounds] of some slots."""
        self._acceptance.add(slots, wanted, accepted)

    def pause(self) -> None:
        """Note that something else ran, so that the time of the next dispatch cannot be told from its end."""
        self._last = self._probe = None

    def _best(self, program: StepShape, chances: NDArray[np.float64]) -> tuple[int, bool]:
        """Return the kind of the next dispatch, and whether it is chosen to be measured: then it must be just that."""
        costs = self._costs.setdefault(program, _Costs())
        for kind in dict.fromkeys([*self._plain, self._max_drafts, max(self._max_drafts // 2, 1)]):
            num_rounds = self._num_rounds(program, kind) if kind > 0 else self._plain_steps(program, kind)
            if not costs.is_tried(kind, num_rounds):
                return kind, True
        round_s = costs.round_s(self._max_drafts, self._plain)
        tokens = np.concatenate([[len(chances)], len(chances) + np.cumsum(chances.sum(axis=0))])
        best = int(np.argmax(tokens / round_s))
        best_drafts = 1 + int(np.argmax(tokens[1:] / round_s[1:]))
        costs.usual = best or min(self._plain, key=costs.median_s)
        costs.has_scouts = not best and len(chances) > SCOUTS
        return self._probed(program, best, best_drafts, round_s[best] / float(tokens[best]) * len(chances))

    def _plain_steps(self, program: StepShape, kind: int) -> int:
        """Return the steps of a plain dispatch of a kind; 0 if dispatches of one step and of several are one kind."""
        if SEVERAL not in self._plain:
            return 0
        step_s = min(map(self._costs[program].median_s, self._plain))
        return 1 if kind == SINGLE else max(int(self._dispatch_s / step_s), 2)

    def _probed(self, program: StepShape, best: int, best_drafts: int, usual_s: float) -> tuple[int, bool]:
        """Return what `_best` does, for a probe while one is due; a token of each row usually takes `usual_s`."""
        if self._probe is not None and (self._probe.program != program or self._probe.kind == best):
            self._probe = None  # if its rounds paid, the choice has followed it
        costs = self._costs[program]
        kinds = [*self._plain, *range(1, self._max_drafts + 1)] if best else [self._max_drafts, best_drafts]
        sort_of = {kind: DRAFTS if kind > 0 else PLAIN for kind in kinds if kind != best}
        due = [kind for kind, sort in sort_of.items() if costs.credit_s[sort] > 0]
        if self._probe is None and due:
            oldest = min(due, key=lambda kind: (costs.measured_s.get(kind, -math.inf), kind))
            self._probe = _Probe(program, oldest, sort_of[oldest], TRIALS)
        elif self._probe is None and costs.has_scouts and costs.credit_s[SCOUT] > 0:
            self._next_scout += SCOUTS
            self._probe = _Probe(program, self._max_drafts, SCOUT, TRIALS, is_scout=True)
        if self._probe is not None:
            self._probe.usual_s = usual_s
        if self._probe is None or not self._probe.num_left:
            return best, False
        self._is_probe = True
        return self._probe.kind, True

    def _num_rounds(self, program: StepShape, num_drafts: int) -> int:
        most = program.num_rounds
        if math.isinf(self._dispatch_s):
            return most
        costs = self._costs.get(program)
        return min(most, FIRST_ROUNDS if costs is None else max(int(self._dispatch_s / costs.guess_s(num_drafts)), 1))
