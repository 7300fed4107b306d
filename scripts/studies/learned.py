"""Learned policies against the best fixed value in hindsight, and against the engine's cost models.

    python scripts/study.py learned --seconds 60 --json scripts/results/learned.json

- `drafts`: how many tokens to draft per round. Verification of k drafts shows the result of every smaller number, and
  of a larger one too unless all were accepted. `hedge` uses this full information, by multiplicative weights that
  keep a little for every number; `bandit` uses only the number that it tried; `engine` is the engine's pacer.
- `share`: how many prompt tokens a step may have alongside decoding rows. `bandit` keeps a value for `WINDOW_S` and
  learns how often requests met both targets; `engine` are the engine's deadlines with measured step
  times.
- `loads`: whether to load a cached prefix from a tier, or to compute it. Only the chosen way's time is seen. `bandit`
  learns for each prefix size; `engine` compares measured times, as `Transfers.pays` does; a fixed value is the
  block count from which to load.

Bandits are UCB with discounted samples. `of_best` is the result relative to the best fixed value, and more is better.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Protocol

import numpy as np

from jaxserve.scheduling.kv_cache.transfers import START_S
from jaxserve.scheduling.pacer import Pacer
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_plan import StepChoice, StepShape, Timing
from jaxserve.scheduling.step_time import StepTime
from jaxserve.tools.simulator.replica import UntilFirstEnd
from jaxserve.tools.simulator.simulation import Simulation
from jaxserve.tools.simulator.traces import TracedRequest
from studies.fleet import TIMES, Figure, parse


class Bandit:
    """UCB with discounted samples, for rewards in about [0, 1].

    Args:
        count: number of arms.
        discount: weight of earlier samples when another one comes.
        width: factor on the confidence bound.
    """

    def __init__(self, count: int, discount: float = 0.99, width: float = 0.3) -> None:
        self._discount, self._width = discount, width
        self._nums, self._sums = [0.0] * count, [0.0] * count

    def choose(self) -> int:
        """Return the arm to try."""
        total = max(sum(self._nums), 1.0)

        def bound(arm: int) -> float:
            if not self._nums[arm]:
                return math.inf
            return self._sums[arm] / self._nums[arm] + self._width * math.sqrt(math.log(total + 1) / self._nums[arm])

        return max(range(len(self._nums)), key=bound)

    def add(self, arm: int, reward: float) -> None:
        """Note an arm's reward."""
        self._nums = [self._discount * each for each in self._nums]
        self._sums = [self._discount * each for each in self._sums]
        self._nums[arm] += 1
        self._sums[arm] += reward


# Drafts

MAX_DRAFTS = 6
TEXT_S = 10.0
TEXTS = {"steady": (0.7,), "changing": (0.9, 0.15, 0.6)}  # chances that a drafted token is accepted, each for `TEXT_S`


def round_s(num_rows: int, num_drafts: int) -> float:
    """Return a round's time: a plain step without drafts, otherwise drafts and their verification."""
    if not num_drafts:
        return 0.010 + 0.0001 * num_rows
    return 0.011 + 0.0004 * num_rows + num_drafts * (0.001 + 0.00002 * num_rows)


class DraftPolicy(Protocol):
    """Policy that chooses how many tokens are drafted for each row."""

    def choose(self) -> int:
        """Return the number of tokens to draft in the next round."""

    def ended(self, num_drafts: int, accepted: Sequence[int], seconds: float) -> int:
        """Note a round: drafted tokens, those accepted by row, and its time. Return how many the rows had drafted."""


class FixedDrafts:
    """The same number in every round."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def choose(self) -> int:
        return self._num_drafts

    def ended(self, num_drafts: int, accepted: Sequence[int], seconds: float) -> int:
        return sum(accepted)


class HedgeDrafts:
    """Multiplicative weights over all numbers, from full information; each keeps a part of the weight."""

    _RATE, _SHARE, _KEPT = 0.1, 1e-3, 0.98

    def __init__(self, num_rows: int) -> None:
        self._num_rows, self._draw = num_rows, Random(7)
        self._weights = [1.0] * (MAX_DRAFTS + 1)
        self._chance = [2.0, 1.0]  # decayed counts of drafted and of accepted tokens
        self._tokens, self._seconds = 1e-3 * num_rows / round_s(num_rows, 0), 1e-3

    def choose(self) -> int:
        return self._draw.choices(range(MAX_DRAFTS + 1), self._weights)[0]

    def ended(self, num_drafts: int, accepted: Sequence[int], seconds: float) -> int:
        offered = sum(min(each + 1, num_drafts) for each in accepted)
        self._chance = [self._KEPT * self._chance[0] + offered, self._KEPT * self._chance[1] + sum(accepted)]
        self._tokens = self._KEPT * self._tokens + sum(accepted) + len(accepted)
        self._seconds = self._KEPT * self._seconds + seconds
        rate, p, whole = self._tokens / self._seconds, self._chance[1] / self._chance[0], accepted.count(num_drafts)
        for number in range(MAX_DRAFTS + 1):
            tokens = len(accepted) + sum(min(each, number) for each in accepted)
            tokens += whole * sum(p**more for more in range(1, number - num_drafts + 1))  # unseen, thus expected
            gain = (tokens - rate * round_s(self._num_rows, number)) / len(accepted)
            self._weights[number] *= math.exp(self._RATE * gain)
        whole_weight = sum(self._weights)
        self._weights = [(1 - self._SHARE) * w / whole_weight + self._SHARE / len(self._weights) for w in self._weights]
        return sum(accepted)


class BanditDrafts:
    """The bandit, whose reward is the token rate."""

    def __init__(self, num_rows: int) -> None:
        self._bandit, self._best = Bandit(MAX_DRAFTS + 1, 0.998), 4 * num_rows / round_s(num_rows, MAX_DRAFTS)

    def choose(self) -> int:
        return self._bandit.choose()

    def ended(self, num_drafts: int, accepted: Sequence[int], seconds: float) -> int:
        self._bandit.add(num_drafts, (sum(accepted) + len(accepted)) / seconds / self._best)
        return sum(accepted)


class EngineDrafts:
    """The engine's pacer."""

    def __init__(self, num_rows: int) -> None:
        self._pacer, self._slots = Pacer(StepTime(), MAX_DRAFTS, num_rows), list(range(num_rows))
        self._program, self._now_s = StepShape(num_rows, 1, has_drafts=True), 0.0
        self._wanted, self._is_scout = np.zeros(0, np.int64), False

    def choose(self) -> int:
        self._wanted, num_rounds = self._pacer.choose(self._program, self._slots)
        num_drafts = int(self._wanted.max(initial=0))
        self._is_scout = self._pacer.launched(num_drafts, num_rounds)
        return num_drafts

    def ended(self, num_drafts: int, accepted: Sequence[int], seconds: float) -> int:
        self._now_s += seconds
        got = np.minimum(np.array(accepted, np.int32), self._wanted)[:, None].astype(np.int32)
        if num_drafts:
            self._pacer.acceptance.add(self._slots, self._wanted[:, None].astype(np.int32), got)
        mean = float(got[self._wanted > 0].mean()) + 1 if num_drafts else 1.0
        self._pacer.ended(self._program, num_drafts, 1, 1, mean, self._now_s, is_scout=self._is_scout)
        return int(got.sum())  # some rows draft fewer tokens than others


def decode(policy: DraftPolicy, text: str, num_rows: int, seconds: float, seed: int) -> list[int]:
    """Return the tokens decoded after each quarter of the time."""
    draw, now_s, tokens, quarters = Random(seed), 0.0, 0, []
    while len(quarters) < 4:
        chance, num_drafts = TEXTS[text][int(now_s / TEXT_S) % len(TEXTS[text])], policy.choose()
        runs = [min(int(math.log(1 - draw.random()) / math.log(chance)), num_drafts) for _ in range(num_rows)]
        took_s = round_s(num_rows, num_drafts) * (1 + 0.05 * draw.expovariate(1))
        tokens += policy.ended(num_drafts, runs, took_s) + num_rows
        now_s += took_s
        if now_s >= seconds / 4 * (len(quarters) + 1):
            quarters.append(tokens)
    return quarters


def compare_drafts(figure: Figure, seconds: int) -> None:
    """Compare all policies on each text, with one row and with many."""
    for text in TEXTS:
        for num_rows in (1, 32):
            policies: dict[str, Callable[[], DraftPolicy]] = {
                str(number): partial(FixedDrafts, number) for number in range(MAX_DRAFTS + 1)
            }
            best = max(
                (decode(new(), text, num_rows, seconds, 1) for new in policies.values()), key=lambda each: each[-1]
            )
            policies |= {kind.__name__: partial(kind, num_rows) for kind in (HedgeDrafts, BanditDrafts, EngineDrafts)}
            for name, new in policies.items():
                tokens = decode(new(), text, num_rows, seconds, 1)
                figure.add(
                    part="drafts",
                    load=f"{text}, {num_rows} row{'s' if num_rows > 1 else ''}",
                    policy=name.removesuffix("Drafts").lower(),
                    result=tokens[-1] / seconds,
                    of_best=tokens[-1] / best[-1],
                    regret_by_quarter=[mine - theirs for mine, theirs in zip(best, tokens, strict=True)],
                )


# Prefill share

SHARES = (32, 64, 128, 256, 512, 1024)
TTFT_S, ITL_S, WINDOW_S, PHASE_S = 1.5, 0.022, 2.0, 40.0
SIZES = ScheduleConfig(48, 1072, 4096, page_size=16, num_pages=6000)


def mixed(seed: int, seconds: float, kinds: Sequence[tuple[float, int, int]]) -> list[TracedRequest]:
    """Return requests whose kind changes every `PHASE_S`: arrivals per second, longest prompt and output."""
    draw, now_s, trace = Random(seed), 0.0, []
    while now_s < seconds:
        rate, prompt_len, output_len = kinds[int(now_s / PHASE_S) % len(kinds)]
        now_s += draw.expovariate(rate)
        trace.append(TracedRequest(now_s, draw.randrange(prompt_len // 4, prompt_len), draw.randrange(8, output_len)))
    return trace


class FixedShare:
    """The same maximum of prompt tokens in every step with decoding rows."""

    def __init__(self, share: int) -> None:
        self.share, self._steps = share, UntilFirstEnd()

    def choose(self, scheduler: Scheduler, now_s: float) -> StepChoice:
        """Return the limits of the next plan."""
        return self._steps.choose(scheduler, now_s)._replace(max_prefill_tokens=self.share)

    def ended(self, is_good: bool) -> None:
        """Learn nothing."""


class BanditShare(FixedShare):
    """The bandit, whose reward is the fraction of the requests that ended in a window and met both targets."""

    def __init__(self) -> None:
        super().__init__(SHARES[0])
        self._bandit, self._arm, self._until_s = Bandit(len(SHARES), 0.97), 0, 0.0
        self._num_ended = self._num_good = 0

    def choose(self, scheduler: Scheduler, now_s: float) -> StepChoice:
        if now_s >= self._until_s:
            if self._num_ended:
                self._bandit.add(self._arm, self._num_good / self._num_ended)
            self._arm, self._until_s = self._bandit.choose(), now_s + WINDOW_S
            self._num_ended = self._num_good = 0
            self.share = SHARES[self._arm]
        return super().choose(scheduler, now_s)

    def ended(self, is_good: bool) -> None:
        self._num_ended += 1
        self._num_good += is_good


class EngineShare(FixedShare):
    """The engine's deadlines, with step times as measured."""

    def __init__(self) -> None:
        super().__init__(0)

    def choose(self, scheduler: Scheduler, now_s: float) -> StepChoice:
        rates = TIMES.rates
        timing = Timing(now_s, rates.prefill_step_s, rates.prefill_token_s, rates.decode_token_s)
        return self._steps.choose(scheduler, now_s)._replace(timing=timing)


def goodput(chooser: FixedShare, trace: Sequence[TracedRequest]) -> float:
    """Return the fraction of requests that met both targets."""
    num_good = 0

    def ended(number: int, first_s: float, last_s: float) -> None:
        nonlocal num_good
        request = trace[number]
        itl_s = (last_s - first_s) / max(request.output_len - 1, 1)
        is_good = first_s - request.arrival_s <= TTFT_S and itl_s <= ITL_S
        num_good += is_good
        chooser.ended(is_good)

    targets = ((None, TTFT_S, ITL_S),) if isinstance(chooser, EngineShare) else ()
    Simulation(replace(SIZES, targets=targets), TIMES, chooser=chooser, step_ahead=False).run(trace, on_end=ended)
    return num_good / len(trace)


LOADS: dict[str, tuple[tuple[float, int, int], ...]] = {
    "chats": ((12.0, 400, 200),),
    "documents": ((4.5, 3000, 60),),
    "alternating": ((12.0, 400, 200), (4.5, 3000, 60)),
}


def compare_shares(figure: Figure, seconds: int) -> None:
    """Compare all policies on chats, on documents, and on both in turn."""
    for load, kinds in LOADS.items():
        trace = mixed(3, seconds, kinds)
        found = {str(share): goodput(FixedShare(share), trace) for share in SHARES}
        best = max(found.values())
        found |= {"bandit": goodput(BanditShare(), trace), "engine": goodput(EngineShare(), trace)}
        for name, value in found.items():
            figure.add(part="share", load=load, policy=name, result=value, of_best=value / best)


# Load or compute

BLOCK_S = 16 * TIMES.rates.prefill_token_s  # computing a block of 16 tokens
DISKS: dict[str, tuple[float, ...]] = {  # times to read a block's page, as multiples of computing it, by phase
    "fast": (0.2,),
    "changing": (0.2, 2.0),
    "alike": (0.8, 1.2),
}
READS_PER_S, THRESHOLDS = 20.0, (1, 4, 16, 64, 10**6)
NEW_FRACTION, HALF_LIFE_S = 1 / 16, 20.0  # as `page_media` measures reads


class FixedLoads:
    """Loads from a number of blocks on."""

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold

    def loads(self, num_blocks: int, now_s: float) -> bool:
        """Return whether to load a prefix."""
        return num_blocks >= self._threshold

    def ended(self, num_blocks: int, has_loaded: bool, seconds: float, now_s: float) -> None:
        """Learn nothing."""


class BanditLoads(FixedLoads):
    """A bandit for each size of prefix, up to a factor of two; less time is more reward."""

    def __init__(self) -> None:
        self._bandits = [Bandit(2, 0.98) for _ in range(9)]

    def loads(self, num_blocks: int, now_s: float) -> bool:
        return bool(self._bandits[num_blocks.bit_length() - 1].choose())

    def ended(self, num_blocks: int, has_loaded: bool, seconds: float, now_s: float) -> None:
        reward = max(1 - seconds / (2 * BLOCK_S * num_blocks + START_S), 0.0)
        self._bandits[num_blocks.bit_length() - 1].add(int(has_loaded), reward)


class EngineLoads(FixedLoads):
    """The engine's comparison of measured times; the time of reads decays, so that a slow disk is tried again."""

    def __init__(self) -> None:
        self._block_s, self._page_s, self._read_at_s = BLOCK_S, 0.0, 0.0

    def loads(self, num_blocks: int, now_s: float) -> bool:
        page_s = self._page_s * 0.5 ** ((now_s - self._read_at_s) / HALF_LIFE_S)
        return num_blocks * (self._block_s - page_s) >= START_S

    def ended(self, num_blocks: int, has_loaded: bool, seconds: float, now_s: float) -> None:
        if has_loaded:
            page_s = max(seconds - START_S, 0.0) / num_blocks
            self._page_s += (page_s - self._page_s) * (NEW_FRACTION if self._page_s else 1)
            self._read_at_s = now_s
        else:
            self._block_s += NEW_FRACTION * (seconds / num_blocks - self._block_s)


def mean_s(policy: FixedLoads, disk: str, seconds: float, seed: int) -> float:
    """Return the mean time until a prefix is there."""
    draw, now_s, total_s, count = Random(seed), 0.0, 0.0, 0
    while now_s < seconds:
        now_s += draw.expovariate(READS_PER_S)
        num_blocks = int(2 ** (8 * draw.random()))
        slowness = DISKS[disk][int(now_s / PHASE_S) % len(DISKS[disk])]
        noise = draw.lognormvariate(0, 0.3), draw.lognormvariate(0, 0.1)  # the same for all policies
        load_s, compute_s = START_S + num_blocks * BLOCK_S * slowness * noise[0], num_blocks * BLOCK_S * noise[1]
        has_loaded = policy.loads(num_blocks, now_s)
        took_s = load_s if has_loaded else compute_s
        policy.ended(num_blocks, has_loaded, took_s, now_s)
        total_s += took_s
        count += 1
    return total_s / count


def compare_loads(figure: Figure, seconds: int) -> None:
    """Compare all policies on each disk."""
    for disk in DISKS:
        found = {
            str(each) if each < 10**6 else "never": mean_s(FixedLoads(each), disk, seconds, 1) for each in THRESHOLDS
        }
        best = min(found.values())
        found |= {"bandit": mean_s(BanditLoads(), disk, seconds, 1), "engine": mean_s(EngineLoads(), disk, seconds, 1)}
        for name, value in found.items():
            figure.add(part="loads", load=f"{disk} disk", policy=name, result=value, of_best=best / value)


def main(argv: Sequence[str]) -> None:
    """Compare all parts."""
    args = parse(argv, __doc__, seconds=400)
    figure = Figure(args.json)
    for compare in (compare_drafts, compare_shares, compare_loads):
        compare(figure, args.seconds)
    figure.write(study="learned", seconds=args.seconds, targets_s=[TTFT_S, ITL_S], window_s=WINDOW_S)
