"""Pacer: chooses rounds and drafted tokens per dispatch, from measured times and acceptance.

A dispatch with several steps saves the host's work between steps and program start-up, but a request that arrives
meanwhile must wait for it and for the dispatch planned after it. Which effect dominates depends on device, model, host
and other load. Single plain steps, dispatches with several steps, and rounds with each draft length are therefore
dispatch kinds, timed while serving. The longer no prompt has been computed, the longer a dispatch of the best kind may
take: requests arrive rarely then, and slow devices run several steps too.

A round with k drafted tokens yields E(k) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k tokens per row. Here a_i is the
probability that draft token i is accepted if all earlier ones were. For all a_i = p, E(k) = (1 - p^(k+1)) / (1 - p)
(Leviathan et al. 2023). A round takes one verification and k draft steps. The kind with the highest token rate is
chosen; the tokens are the same either way.

Drafting for several rows takes as long as the longest draft, so k is chosen for all rows together. A row whose drafts
are hardly ever accepted requests fewer.

Plain steps reveal nothing about acceptance, rounds with drafts nothing about plain step time, and both change over
time. Some dispatches are therefore probes of another kind. Plain steps are followed by probes of the other plain kind,
of the largest k, which reveals acceptance at all positions, and of the best k > 0; rounds with drafts by probes of all
other kinds, the oldest measurement first. Plain probes, draft probes and scouts may each lose a fraction of each
program's time, beyond their gain: if a draft model has many rows to catch up with, one probe costs more than hundreds
with a single row. A single row must not wait for that cost to be earned, nor must plain steps when drafts no longer
pay.

Scouts are probes in which only a few rows draft, different ones each time. They reveal acceptance while plain steps are
best, and a draft model catches up with only a few rows; their times are discarded. If their acceptance suggests that
rounds for all rows would pay, by earlier measured times, such rounds follow. Otherwise probes of all rows, which then
only refresh these times, may be rare.
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

DISPATCH_S = 0.010  # maximum time per dispatch soon after a prompt; a new request may wait for two dispatches
QUIET_DISPATCH_S = 0.040  # the same if no prompt was computed for long
QUIET_FRACTION = 0.2  # maximum time per dispatch between the two, as a fraction of the time since the latest prompt
DECAY = 0.95  # factor on a round's acceptance weight with each later round
PRIOR_ROUNDS = 4.0  # weight, in rounds, of the overall acceptance in a single request's estimate
FIRST_ROUNDS = 2  # rounds per dispatch before any time is known
FIRST_GUESS = 0.6  # assumed acceptance before any draft was verified
PLAIN, DRAFTS, SCOUT = "plain", "drafts", "scout"  # probe kinds
PROBE_FRACTION = {PLAIN: 0.002, DRAFTS: 0.01, SCOUT: 0.01}  # time fraction that probes may lose
RARE_FRACTION = 0.001  # fraction for probes of all rows while scouts reveal acceptance
SCOUTS = 4  # drafting rows in a scout
SURPRISE = 0.1  # weight of earlier acceptance after a scout finds that the text has changed
MAX_CREDIT_S = 0.02  # maximum time credit of probes, and their initial credit
PROBES = 2  # dispatches per draft probe; the first is not timed
NO_DRAFTS: NDArray[np.int64] = np.zeros(0, np.int64)
WORTHLESS = 0.01  # minimum acceptance probability to draft a token


class Acceptance:
    """Decayed counts of drafted tokens by position, per slot and overall.

    A round with some slots ages the counts of all slots.

    Args:
        max_drafts: maximum tokens drafted in a round, K.
        num_slots: S.
    """

    def __init__(self, max_drafts: int, num_slots: int) -> None:
        # counts of offered and accepted tokens: [2, S, K] by slot, and [2, K] overall
        self._by_slot: NDArray[Any] = np.zeros((2, num_slots, max_drafts))
        self._overall: NDArray[Any] = np.outer((PRIOR_ROUNDS, PRIOR_ROUNDS * FIRST_GUESS), np.ones(max_drafts))

    def admit(self, slots: Sequence[int]) -> None:
        """Reset the counts for newly used slots."""
        self._by_slot[:, slots] = 0

    def add(self, slots: Sequence[int], wanted: NDArray[np.int32], accepted: NDArray[np.int32]) -> None:
        """Count the accepted tokens of some slots by draft position.

        A position counts if a token was wanted there, proposed or not, and all earlier ones were accepted.

        Args:
            slots: slots of the rows.
            wanted: tokens that were requested from the proposer, [rows, rounds].
            accepted: accepted tokens, [rows, rounds].
        """
        drafting = wanted.any(axis=1)
        chosen, wanted, accepted = np.asarray(slots)[drafting], wanted[drafting], accepted[drafting]
        if not len(chosen):
            return
        position = np.arange(self._by_slot.shape[-1])
        offered = (wanted[:, :, None] > position) & (accepted[:, :, None] >= position)
        counts = np.stack([offered, offered & (accepted[:, :, None] > position)]).sum(axis=2)  # [2, rows, K]
        num_rounds = (wanted > 0).sum(axis=1, keepdims=True)
        self.fade(float(np.power(DECAY, num_rounds.mean())))
        self._by_slot[:, chosen] += counts
        self._overall += counts.sum(axis=1) / len(chosen)

    def fade(self, factor: float) -> None:
        """Multiply all counts by a factor below 1."""
        self._by_slot *= factor
        self._overall *= factor

    def chances(self, slots: Sequence[int]) -> NDArray[np.float64]:
        """Return the probability that a token is accepted together with all earlier ones, as [slots, K].

        Args:
            slots: slots of the rows.
        """
        all_offered, all_accepted = self._overall
        prior = (all_accepted + FIRST_GUESS) / (all_offered + 1)
        offered, accepted = self._by_slot[:, slots]
        chances: NDArray[np.float64] = np.cumprod((accepted + PRIOR_ROUNDS * prior) / (offered + PRIOR_ROUNDS), axis=1)
        return chances


@dataclass(slots=True)
class _Probe:
    """A few dispatches of another kind than the best one, to measure its time or acceptance."""

    program: StepShape
    kind: int  # dispatch kind: SINGLE, SEVERAL, or number of drafted tokens
    purpose: str  # PLAIN, DRAFTS or SCOUT: the time credit from which it is paid
    num_left: int  # dispatches not yet chosen
    is_scout: bool = False
    usual_s: float = 0.0  # time of the best kind until every row has one more token
    num_running: int = 0  # dispatches in flight


class Pacer:
    """Chooses drafted tokens and rounds per dispatch. Times are plain numbers, from any clock.

    Args:
        step_time: dispatch times, updated here.
        max_drafts: maximum tokens drafted in a round, K.
        num_slots: slots of the device state.
        adaptive: True to choose by measurements; otherwise always draft K tokens if drafts are possible.
        dispatch_s: maximum total time of a dispatch's rounds soon after a prompt; infinite for the maximum number of
            rounds, with a single kind of plain dispatch.

    Attributes:
        acceptance: counts of drafted and accepted tokens, updated by the caller.
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
        self.acceptance = Acceptance(max_drafts, num_slots)
        # Time credit of probes, by program and probe kind.
        self._credit_s = defaultdict[StepShape, dict[str, float]](lambda: dict.fromkeys(PROBE_FRACTION, MAX_CREDIT_S))
        # program and kind of the dispatch that ended last, and whether it was a scout
        self._last: tuple[StepShape, int, bool] | None = None
        self._now_s = 0.0
        self._quiet_since_s = math.inf  # end of the first dispatch since other work ran, if one has ended
        self._probe: _Probe | None = None
        self._again: tuple[StepShape, int] | None = None  # program and max_steps of a choice that cannot change yet
        self._is_probe = False  # the latest choice is a dispatch of the probe
        self._next_scout = 0  # index among the running rows: first drafting row in the next scout

    def choose(self, program: StepShape, slots: Sequence[int], max_steps: int = 1) -> tuple[NDArray[np.int64], int]:
        """Return the number of tokens to draft for each running slot, and the maximum rounds of the dispatch.

        All zeros mean plain steps.

        Args:
            program: program that holds the rows, with drafts if slots are given.
            slots: slots of the running requests; empty if none may draft.
            max_steps: maximum steps of a plain dispatch with these rows.
        """
        if not slots and (program, max_steps) == self._again:
            return NO_DRAFTS, 1
        self._is_probe = False
        chances = self.acceptance.chances(slots) if len(slots) else None
        kind, is_measured = SINGLE, False
        if chances is not None and not self._adaptive:
            kind, is_measured = self._max_drafts, True
        elif chances is not None or (self._is_timed and max_steps > 1):
            kind, is_measured = self._best(program, chances, max_steps)
        limit_s = self._dispatch_s if is_measured else self._limit_s  # kinds that may be worse lose little
        num_rounds = self._num_rounds(program, kind, max_steps, limit_s)
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
        """Record the dispatch that was planned after the latest choice.

        It may differ from the choice if too few pages are free or a request can join. If the choice was a probe, the
        probe is then cancelled; after a cancelled draft probe, the next one waits until its time credit has recovered.

        Args:
            num_drafts: maximum tokens drafted for a row in a round.
            num_rounds: maximum rounds.

        Returns:
            True if the dispatch is a scout: a probe in which only a few rows draft.
        """
        probe = self._probe
        if probe is None or not self._is_probe:
            return False
        if self._kind(num_drafts, num_rounds) == probe.kind:
            probe.num_left -= 1
            probe.num_running += 1
            return probe.is_scout
        if probe.kind > 0:
            self._credit_s[probe.program][probe.purpose] = -MAX_CREDIT_S
        times = self._step_time.dispatches(probe.program)
        times.kinds[probe.kind].measured_s = self._now_s  # schedule a different kind next
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
        """Record the end of a dispatch in which all rows were decoding, and its time since the previous end.

        Host time is thus included. The first dispatch of a kind is not timed, because a draft model may have had to
        catch up.

        Args:
            program: program that was chosen for this number of rows.
            num_drafts: maximum tokens drafted for a row in a round; 0 in a plain dispatch.
            num_planned: planned rounds or steps.
            num_rounds: executed rounds or steps.
            num_tokens: mean tokens per row; in a scout, per drafting row.
            end_s: end time.
            is_scout: True if `launched` reported a scout.
        """
        kind, last, seconds = self._kind(num_drafts, num_planned), self._last, end_s - self._now_s
        self._last, self._now_s = (program, kind, is_scout), end_s
        times, credit_s, probe = self._step_time.dispatches(program), self._credit_s[program], self._probe
        is_probe = False
        if probe is not None and (probe.program, probe.kind, probe.is_scout) == self._last:
            is_probe = True
            probe.num_running -= 1
            if last is not None:
                credit_s[probe.purpose] -= seconds - (num_rounds if is_scout else num_tokens) * probe.usual_s
            if not (probe.num_running or probe.num_left):
                self._probe = None
                if is_scout and num_tokens * probe.usual_s > num_rounds * times.guess_s(num_drafts):
                    self.acceptance.fade(SURPRISE)
                    self._probe = _Probe(program, probe.kind, SCOUT, PROBES)
        if last is None:
            self._quiet_since_s = end_s
            return
        for purpose, fraction in PROBE_FRACTION.items():
            earned_s = (RARE_FRACTION if purpose == DRAFTS and times.has_scouts else fraction) * seconds
            credit_s[purpose] = min(credit_s[purpose] + earned_s, MAX_CREDIT_S)
        credit_s[PLAIN] = max(credit_s[PLAIN], -MAX_CREDIT_S)  # the machine was slow for a moment, not this kind
        is_timed = last == self._last and num_rounds and not is_scout
        if not is_timed or times.add(kind, num_rounds, seconds, end_s, is_probe=is_probe):
            self._again = None

    def pause(self) -> None:
        """Give up the current probe, and do not time the dispatch that ends next, because other work ran."""
        self._last = self._probe = None
        self._quiet_since_s = math.inf

    @property
    def _limit_s(self) -> float:
        """Maximum total time of the next dispatch's rounds."""
        quiet_s = self._now_s - self._quiet_since_s
        return max(self._dispatch_s, min(QUIET_FRACTION * quiet_s, QUIET_DISPATCH_S))

    def _kind(self, num_drafts: int, num_rounds: int) -> int:
        """Return the kind of a dispatch: its draft length, or for 0 SINGLE or SEVERAL by its number of rounds."""
        return num_drafts or (SEVERAL if self._is_timed and num_rounds > 1 else SINGLE)

    def _best(self, program: StepShape, chances: NDArray[np.float64] | None, max_steps: int) -> tuple[int, bool]:
        """Return the kind of the next dispatch, and whether it must be exactly that kind to be measured.

        Args:
            program: program that holds the rows.
            chances: acceptance probabilities, [slots, K]; None if no row may draft.
            max_steps: maximum steps of a plain dispatch.
        """
        times, drafts = self._step_time.dispatches(program), self._max_drafts if chances is not None else 0
        has_several = self._is_timed and max_steps > 1 and times.step_s <= self._limit_s / 2
        plain = [SINGLE, SEVERAL] if has_several else [SINGLE]
        kinds = dict.fromkeys([*plain, drafts, max(drafts // 2, 1)]) if drafts else plain
        for kind in kinds:
            if not times.is_tried(kind, self._num_rounds(program, kind, max_steps, self._dispatch_s)):
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
        """Return the kind of the next dispatch, a probe's if one is due, and whether it must be exactly that kind.

        Args:
            program: program that holds the rows.
            usual: best kind.
            kinds: kinds to probe.
            usual_s: time of the best kind until every row has one more token.
        """
        if self._probe is not None and (self._probe.program != program or self._probe.kind == usual):
            self._probe = None  # the probed kind became the usual one, or the program changed
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

    def _num_rounds(self, program: StepShape, kind: int, max_steps: int, limit_s: float) -> int:
        """Return the maximum rounds of a dispatch of this kind in `limit_s`; for plain kinds, at most `max_steps`."""
        limit = program.num_rounds if kind > 0 else max_steps
        if not self._is_timed:
            return limit
        if kind == SINGLE:
            return 1
        times = self._step_time.dispatches(program)
        round_s = times.guess_s(kind) if kind > 0 else max(times.step_s, min(times.several_s))
        if math.isinf(round_s):
            return min(limit, FIRST_ROUNDS)
        return min(limit, max(int(limit_s / round_s), 1 if kind > 0 else 2))
