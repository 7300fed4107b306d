"""Prompts: prompts between two chunks, the tokens and pages they leave to others, and their rows in a plan."""

from __future__ import annotations

from collections.abc import Iterator

from jaxserve.scheduling.ledger import RUNS, Ledger, in_prefill, num_before_decode, num_remaining
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.request import Request, RequestStatus
from jaxserve.scheduling.step_plan import StepPlan, wants_prompt_logprobs


class Prompts:
    """Unfinished prompts, which the current plan continues and starts.

    Args:
        policy: policy that sizes chunks.

    Attributes:
        unfinished: prompts unfinished after the last plan, or already in the current one, by class and age.
    """

    def __init__(self, ledger: Ledger, policy: Policy) -> None:
        self._ledger, self._policy = ledger, policy
        self.unfinished: list[Request] = []
        self._limit = ledger.max_num_batched_tokens  # maximum tokens of the current plan
        self._max_encoded = self._limit  # maximum cost of its encoder runs, in tokens

    # The current plan

    def begin(self, plan: StepPlan, max_tokens: int) -> None:
        """Limit a plan that already has its decoding rows to `max_tokens` prompt tokens; no prompt is in it yet."""
        self._limit = min(plan.num_tokens + max_tokens, self._ledger.max_num_batched_tokens)
        self._max_encoded = self._limit - plan.num_tokens
        self.unfinished = []

    def budget_left(self, plan: StepPlan) -> int:
        """Return the number of tokens that the current plan may still get; an image that is whole may exceed them."""
        return max(self._limit - plan.num_tokens, 0)

    def num_wanted(self, request: Request, start: int, num_tokens: int, plan: StepPlan) -> int:
        """Return the size of a request's next chunk, wanted to have `num_tokens` tokens, given its images.

        Args:
            request: running request, or one that starts.
            start: its first token to compute.
            num_tokens: tokens wanted.
            plan: the current plan.
        """
        left = self._ledger.max_num_batched_tokens - plan.num_tokens
        return self._ledger.encoder.num_computable(request, start, num_tokens, self._max_encoded, left)

    def num_encodable(self, request: Request, start: int, num_tokens: int) -> int:
        """Return how many of a request's next `num_tokens` tokens the current plan can compute, given its images."""
        return self._ledger.encoder.num_computable(request, start, num_tokens, self._max_encoded)

    def settle(self) -> None:
        """Remove the prompts that the plan has finished or preempted from `unfinished`."""
        self.unfinished = [request for request in self.unfinished if request.status in RUNS and in_prefill(request)]

    def add_row(self, request: Request, plan: StepPlan) -> int:
        """Add a row without tokens for a request; return the row's index in the plan."""
        plan.requests.append(request)
        plan.starts.append(request.num_computed_tokens)
        plan.counts.append(0)
        plan.max_new.append(0)
        return plan.num_rows - 1

    def compute(self, row: int, num_tokens: int, plan: StepPlan) -> None:
        """Add the next `num_tokens` tokens of a row's request to the plan, count them as computed, and cache its full
        pages.
        """
        request = plan.requests[row]
        start, num_before = request.num_computed_tokens, num_before_decode(request)
        samples = num_remaining(request) == num_tokens
        plan.encoder_runs += self._ledger.encoder.compute(request, start, start + num_tokens)
        request.num_computed_tokens = start + num_tokens
        self._ledger.num_prefill_tokens -= num_before - num_before_decode(request)
        plan.num_prefill_tokens += num_tokens
        plan.counts[row] += num_tokens
        plan.max_new[row] = int(samples)
        if samples and request.waits_for_tokens:
            request.status = RequestStatus.BLOCKED
        plan.wants_logprobs |= samples and request.params.logprobs is not None
        plan.wants_prompt_logprobs |= wants_prompt_logprobs(request, start)
        self._ledger.store.register_blocks(request, request.num_computed_tokens // self._ledger.page_size)

    # Capacity for others

    @property
    def num_long(self) -> int:
        """Number of unfinished prompts that are long by the policy."""
        return sum(self._policy.is_long(num_remaining(request)) for request in self.unfinished)

    @property
    def num_pages_kept(self) -> int:
        """Free pages that newcomers must leave for running rows."""
        ledger = self._ledger
        running = (request for request in self.unfinished if request.status in RUNS)
        return ledger.num_pages_to_grow + sum(map(ledger.num_prompt_pages_kept, running))

    def next_chunks(self) -> Iterator[tuple[Request, int]]:
        """Yield the unfinished prompts, each with the number of tokens in its first chunk in the next plan."""
        unfinished = [request for request in self.unfinished if request.status in RUNS]
        budget_left = self._ledger.max_num_batched_tokens - (len(self._ledger.running) - len(unfinished))
        for request in unfinished:
            num_left = self._ledger.num_computable(request, request.num_computed_tokens)
            chunk = self._policy.first_chunk(num_left, max(budget_left, 0))
            budget_left -= chunk
            yield request, chunk

    def next_budget_left(self) -> int:
        """Return the number of tokens that the next plan has left for newcomers."""
        num_tokens = self._ledger.max_num_batched_tokens - len(self._ledger.running)
        return num_tokens - sum(chunk - 1 for _, chunk in self.next_chunks()) if self.unfinished else num_tokens
