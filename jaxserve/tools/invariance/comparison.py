"""Comparison of outputs: bitwise, by token ids, and the first token that differs."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.api.outputs import CompletionOutput, Logprob, RequestOutput
from jaxserve.tools.invariance.workload import Job


@dataclass(frozen=True, slots=True)
class Counterexample:
    """First token at which a request differs from the same request run alone.

    Attributes:
        request: index of the request.
        is_greedy: True if it takes the most likely tokens.
        position: index in the output.
        expected: token id in the run alone.
        found: token id in the other run.
        expected_logprob: log probability of `expected` in the run alone.
        found_logprob: log probability of `found` in the run alone; None if it is not among the most likely tokens.
    """

    request: int
    is_greedy: bool
    position: int
    expected: int
    found: int
    expected_logprob: float
    found_logprob: float | None


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of requests' outputs with the outputs of the same requests when each runs alone.

    Attributes:
        num_requests: number of compared requests.
        num_bitwise: number of requests with the same ids and bitwise the same log probabilities.
        num_equal: number of requests with the same ids.
        max_logprob_difference: largest difference in log probabilities before the first id that differs, over sampled
            tokens and the likely tokens that both outputs list.
        counterexample: first token that differs in the first request with one; None if all ids are the same.
    """

    num_requests: int
    num_bitwise: int
    num_equal: int
    max_logprob_difference: float
    counterexample: Counterexample | None

    @property
    def grade(self) -> str:
        """Result in a word: "bitwise", "ids" or "differs"."""
        if self.num_bitwise == self.num_requests:
            return "bitwise"
        return "ids" if self.num_equal == self.num_requests else "differs"


def compare(jobs: Sequence[Job], found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> Agreement:
    """Compare the outputs `found` for some jobs with the `expected` ones, from runs alone."""
    num_bitwise = num_equal = 0
    largest = 0.0
    first: Counterexample | None = None
    for index, (job, a, b) in enumerate(zip(jobs, found, expected, strict=True)):
        (ours,), (alone,) = a.outputs, b.outputs
        num_same = _num_same(ours.token_ids, alone.token_ids)
        difference = _largest_difference(ours, alone, num_same)
        largest = max(largest, difference)
        is_equal = list(ours.token_ids) == list(alone.token_ids)
        num_equal += is_equal
        num_bitwise += is_equal and _logprobs(ours) == _logprobs(alone)
        if not is_equal and first is None:
            first = _counterexample(index, job, ours, alone, num_same)
    return Agreement(len(jobs), num_bitwise, num_equal, largest, first)


def _num_same(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length that two token sequences have in common at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _logprobs(output: CompletionOutput) -> Sequence[dict[int, Logprob]]:
    """Return an output's log probabilities by position and token id."""
    assert output.logprobs is not None, "the workload asks for them"
    return output.logprobs


def _largest_difference(a: CompletionOutput, b: CompletionOutput, num_same: int) -> float:
    """Return the largest log-probability difference, over the first `num_same` positions and tokens in both."""
    pairs = zip(_logprobs(a)[:num_same], _logprobs(b)[:num_same], strict=True)
    return max((abs(p[i].logprob - q[i].logprob) for p, q in pairs for i in p.keys() & q.keys()), default=0.0)


def _counterexample(
    index: int, job: Job, found: CompletionOutput, expected: CompletionOutput, position: int
) -> Counterexample:
    """Describe the first differing token, at `position`, of the request with this `index`, which `job` submitted."""
    logprobs = _logprobs(expected)[position]
    expected_id, found_id = expected.token_ids[position], found.token_ids[position]
    other = logprobs.get(found_id)
    return Counterexample(
        index,
        job.is_greedy,
        position,
        expected_id,
        found_id,
        logprobs[expected_id].logprob,
        None if other is None else other.logprob,
    )
