"""Tenants' service under overload, by the real scheduler in virtual time: the VTC suites (arXiv 2401.00588).

    python scripts/service_suites.py                # all suites, 360 s of arrivals each: JSON lines, then a table
    python scripts/service_suites.py --suite shift --seconds 60

The device is modelled: a step takes a fixed time, plus a time per prompt token and per decoding row; by default about
an A10G's with a 7B model. The page pool holds 10,000 tokens, as in the paper. Service counts one unit per computed
prompt token and two per output token, divided by the tenant's weight. The gap is the largest change in the difference
between two tenants over any time in which both always have requests waiting; VTC's bound is 2 * max(longest prompt, 2 *
10,000).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.scheduling.request import Request, RequestStatus
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_plan import StepChoice, StepPlan, Timing
from jaxserve.scheduling.step_time import Rates
from jaxserve.scheduling.waiting import OUTPUT_COST, PROMPT_COST

A10G = Rates(prefill_step_s=0.030, decode_step_s=0.030, prefill_token_s=0.00025, decode_token_s=0.0003)
POOL_TOKENS, PAGE_SIZE = 10_000, 16
PARAMS = SamplingParams(max_tokens=None)


@dataclass(frozen=True)
class Client:
    """A tenant's requests.

    Attributes:
        rate: requests per second.
        prompt: tokens per prompt.
        output: tokens per output.
        weight: weight of the tenant.
        on_s: length of periods with requests.
        off_s: length of periods without requests.
        starts_at: fraction of the run before its first request.
        is_poisson: True for exponential times between requests.
        ends_at: fraction of the run after its last request.
    """

    rate: float
    prompt: int = 256
    output: int = 256
    weight: float = 1.0
    on_s: float = 1.0
    off_s: float = 0.0
    starts_at: float = 0.0
    ends_at: float = 1.0
    is_poisson: bool = False

    def arrivals(self, seconds: float, rng: random.Random) -> Iterator[float]:
        """Yield request times."""
        now_s = self.starts_at * seconds
        while True:
            now_s += rng.expovariate(self.rate) if self.is_poisson else 1 / self.rate
            if now_s >= self.ends_at * seconds:
                return
            if now_s % (self.on_s + self.off_s) < self.on_s:
                yield now_s


SUITES: Mapping[str, Sequence[Client]] = {
    "overload": [Client(1.5), Client(3.0)],
    "overload-multi": [Client(0.5 + 0.25 * index) for index in range(8)],
    "weighted": [Client(3.0, weight=weight) for weight in (1.0, 2.0, 3.0)],
    "on-off": [Client(1.5, on_s=60, off_s=60), Client(3.0)],
    "short-long": [Client(8.0, 32, 512, is_poisson=True), Client(1.5, 512, 32, is_poisson=True)],
    "shift": [
        Client(3.0, ends_at=1 / 3),
        Client(1.5, 512, 64),
        Client(4.0, 64, 256, starts_at=1 / 3, is_poisson=True),
    ],
}
POLICIES = ("fcfs", "vtc", "deadlines", "deadlines+vtc")
TARGETS = ((None, 2.0, 0.1),)  # seconds to the first token, and between tokens


@dataclass
class Outcome:
    """Figures of a run.

    Attributes:
        suite: suite name.
        policy: policy name.
        max_gap: largest service gap between two tenants that both had requests waiting.
        bound: VTC's bound.
        tokens_per_s: prompt and output tokens computed per second.
        ttft_s: mean time to first token, by tenant.
        service: service by tenant, divided by its weight.
        p99_itl_ms: 99th percentile of the time between two tokens.
    """

    suite: str
    policy: str
    max_gap: float = 0.0
    bound: float = 0.0
    tokens_per_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    service: list[float] = field(default_factory=list)
    p99_itl_ms: float = 0.0


class Gaps:
    """Largest change in two tenants' service difference while both are backlogged."""

    def __init__(self, num_tenants: int) -> None:
        self._pairs = list(itertools.combinations(range(num_tenants), 2))
        self._spans: dict[tuple[int, int], tuple[float, float]] = {}  # minimum and maximum difference
        self.largest = 0.0

    def note(self, service: Sequence[float], is_backlogged: Sequence[bool]) -> None:
        """Record the service so far, and the tenants with requests waiting since the last call."""
        for pair in self._pairs:
            if not (is_backlogged[pair[0]] and is_backlogged[pair[1]]):
                self._spans.pop(pair, None)
                continue
            difference = service[pair[0]] - service[pair[1]]
            least, most = self._spans.get(pair, (difference, difference))
            self._spans[pair] = min(least, difference), max(most, difference)
            self.largest = max(self.largest, max(most, difference) - min(least, difference))


class Run:
    """A suite in virtual time.

    Args:
        clients: tenants.
        policy: policy name.
        seconds: arrival period; the run ends with it.
        rates: step times.
        pool_tokens: page pool capacity in tokens.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        policy: str,
        seconds: float,
        rates: Rates = A10G,
        pool_tokens: int = POOL_TOKENS,
    ) -> None:
        self._clients, self._seconds, self._rates = clients, seconds, rates
        self._is_fair, self._has_targets = "vtc" in policy, "deadlines" in policy
        weights = tuple((str(i), client.weight) for i, client in enumerate(clients))
        most = max(client.prompt + client.output for client in clients)
        sizes = (64, 512, most, PAGE_SIZE, pool_tokens // PAGE_SIZE)
        targets = TARGETS if self._has_targets else ()
        self.scheduler = Scheduler(ScheduleConfig(*sizes, tenant_weights=weights, targets=targets))
        self._client_of: dict[str, int] = {}
        self._arrived_s: dict[str, float] = {}
        self._num_waiting = [0] * len(clients)
        self.service = [0.0] * len(clients)
        self.first_token_s: list[list[float]] = [[] for _ in clients]
        self.itl_s: list[float] = []
        self._last_s: dict[str, float] = {}
        self.num_tokens = 0
        self.now_s = 0.0
        self.gaps = Gaps(len(clients))

    def run(self) -> Run:
        """Serve all requests that arrive in time."""
        rng = random.Random(0)
        arrivals = sorted(
            (at_s, index) for index, client in enumerate(self._clients) for at_s in client.arrivals(self._seconds, rng)
        )
        next_arrival = 0
        while self.now_s < self._seconds:
            while next_arrival < len(arrivals) and arrivals[next_arrival][0] <= self.now_s:
                self._add(next_arrival, *arrivals[next_arrival])
                next_arrival += 1
            plan = self.scheduler.schedule(StepChoice(timing=self._timing()))
            if plan is None:
                if next_arrival == len(arrivals):
                    break
                self.now_s = arrivals[next_arrival][0]
                continue
            self._serve(plan)
        return self

    def _timing(self) -> Timing | None:
        """Return the step times for a scheduler with latency targets; None without targets."""
        rates = self._rates
        if not self._has_targets:
            return None
        return Timing(self.now_s, rates.prefill_step_s, rates.prefill_token_s, rates.decode_token_s)

    def _add(self, number: int, at_s: float, index: int) -> None:
        """Add request `number` of the client at `index`, which arrives at `at_s`."""
        client = self._clients[index]
        request = Request(
            request_id=str(number),
            prompt_token_ids=[index, number, *[0] * (client.prompt - 2)],
            params=PARAMS,
            seed=0,
            max_total_tokens=client.prompt + client.output,
            salt=str(number).encode(),
            tenant=str(index) if self._is_fair else "",
            arrival=number,
            arrival_s=at_s,
        )
        self._client_of[request.request_id] = index
        self._arrived_s[request.request_id] = at_s
        self._num_waiting[index] += 1
        self.scheduler.add(request)

    def _serve(self, plan: StepPlan) -> None:
        """Advance time by a step, and credit its tokens to their clients."""
        for request in plan.preempted:
            self._num_waiting[self._client_of[request.request_id]] += 1
        for request in plan.admitted:
            self._num_waiting[self._client_of[request.request_id]] -= 1
        self.now_s += self._rates.step_s(plan.num_prefill_tokens, plan.num_decode_tokens)
        self.num_tokens += plan.num_tokens
        for request, start, count, most in zip(plan.requests, plan.starts, plan.counts, plan.max_new, strict=True):
            index = self._client_of[request.request_id]
            weight = self._clients[index].weight
            num_prompt = max(min(start + count, request.num_prompt_tokens) - start, 0)
            # Tokens that a preempted request recomputes are no service.
            num_prompt = 0 if request.num_preemptions else num_prompt
            self.service[index] += (PROMPT_COST * num_prompt + OUTPUT_COST * most) / weight
            if most and not request.output_token_ids:
                self.first_token_s[index].append(self.now_s - self._arrived_s[request.request_id])
            elif most:
                self.itl_s.append(self.now_s - self._last_s[request.request_id])
            if most:
                self._last_s[request.request_id] = self.now_s
        self.gaps.note(self.service, [count > 0 for count in self._num_waiting])
        ended = self.scheduler.update(plan, [[0] * most for most in plan.max_new])
        assert all(request.status is RequestStatus.FINISHED for request in ended)


def bound(clients: Sequence[Client], pool_tokens: int = POOL_TOKENS) -> float:
    """Return VTC's bound for two tenants' gap, for the smaller weights."""
    longest = max(client.prompt for client in clients)
    return 2 * max(PROMPT_COST * longest, OUTPUT_COST * pool_tokens) / min(client.weight for client in clients)


def outcome(suite: str, policy: str, seconds: float) -> Outcome:
    """Run a suite with a policy."""
    clients = SUITES[suite]
    run = Run(clients, policy, seconds).run()
    return Outcome(
        suite,
        policy,
        round(run.gaps.largest),
        round(bound(clients)),
        round(run.num_tokens / run.now_s, 1),
        [round(sum(times) / max(len(times), 1), 2) for times in run.first_token_s],
        [round(service) for service in run.service],
        round(1e3 * sorted(run.itl_s)[int(0.99 * len(run.itl_s))], 1),
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """Return gaps and token rates as a Markdown table."""
    policies = list(dict.fromkeys(each.policy for each in outcomes))
    lines = [f"| suite | bound | {' | '.join(f'{p}: gap, tok/s, p99 ITL ms' for p in policies)} |"]
    lines.append("| --- " * (2 + len(policies)) + "|")
    for suite, group in itertools.groupby(outcomes, key=lambda each: each.suite):
        row = list(group)
        cells = [f"{each.max_gap:,.0f}, {each.tokens_per_s:.0f}, {each.p99_itl_ms:.0f}" for each in row]
        lines.append(f"| {suite} | {row[0].bound:,.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the suites named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", default=list(SUITES), choices=list(SUITES))
    parser.add_argument("--policy", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--seconds", type=float, default=360.0)
    args = parser.parse_args()
    outcomes = []
    for suite, policy in itertools.product(args.suite, args.policy):
        outcomes.append(outcome(suite, policy, args.seconds))
        print(json.dumps({"bench": "service", "seconds": args.seconds, **vars(outcomes[-1])}), flush=True)
    print(table(outcomes))


if __name__ == "__main__":
    main()
