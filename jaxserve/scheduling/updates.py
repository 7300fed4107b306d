"""RequestUpdater: appends the sampled tokens of a plan, and ends requests that have sampled their last token.

Upper bounds. The device may compute less than planned: it stops a row at its last token and continues the others.
`num_computed_tokens` counts planned tokens, and an update takes back the uncomputed ones. A plan made meanwhile needs
no special case: a stopped row computes nothing in it, and other rows stay within the planned positions, which have
pages. All planned prompt tokens are computed. All output tokens except the last known one are certainly computed,
because each token is sampled from the previous one; only their pages are registered.

Quiet tokens. Nearly every token only extends its request's output list, and an update appends it without examining the
row. That holds up to a length of `quiet_outputs`: a longer output, or a stop id, triggers a review, which may end the
request, registers its full pages, and sets the next review.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.scheduling.ledger import RUNS, Ledger, num_before_decode
from jaxserve.scheduling.request import FinishReason, Request, RequestStatus
from jaxserve.scheduling.starts import StartPlanner
from jaxserve.scheduling.step_plan import StepPlan


class RequestUpdater:
    """Appends sampled tokens to requests, and ends requests that have sampled their last token.

    Plans arrive in order, once each. A request may have been preempted or have ended since.

    Args:
        starts: starter of waiting requests, notified when an update ends one.

    Attributes:
        num_wasted_tokens: tokens sampled for requests that had ended.
    """

    def __init__(self, ledger: Ledger, starts: StartPlanner) -> None:
        self._ledger, self._starts = ledger, starts
        self.num_wasted_tokens = 0

    def take(self, plan: StepPlan, sampled: Sequence[list[int]]) -> list[Request]:
        """Append the token ids sampled by each row of a plan; return the requests that they ended.

        Ids after a request's end are deleted from its list, as are all ids of a request that had already ended.
        """
        ended: list[Request] = []
        running = RequestStatus.RUNNING
        for request, max_new, token_ids in zip(plan.requests, plan.max_new, sampled, strict=True):
            output = request.output_token_ids
            if max_new == len(token_ids) == 1:
                token_id, is_quiet = token_ids[0], len(output) < request.quiet_outputs
                if is_quiet and token_id not in request.stop_ids:  # nearly always: the fast path
                    output.append(token_id)
                    continue
                if request.status is running:
                    output.append(token_id)
                    self._review(request)
                    if request.status is not running:
                        ended.append(request)
                    continue
            num_sampled = len(token_ids)
            assert num_sampled <= max_new, f"a row that may sample {max_new} tokens cannot have sampled {num_sampled}"
            if request.status is RequestStatus.FINISHED:
                self.num_wasted_tokens += num_sampled
                token_ids.clear()
                continue
            if max_new > num_sampled:
                self._take_back(request, max_new - num_sampled)
            if request.status is RequestStatus.BLOCKED and request.num_pending_tokens == num_sampled:
                request.status = RequestStatus.RUNNING
            del token_ids[self._append(request, token_ids) :]
            self._ledger.store.settle(request)
            if request.status is RequestStatus.FINISHED:
                ended.append(request)
        return ended

    def extend(self, request: Request, token_ids: Sequence[int]) -> list[int]:
        """Append unsampled tokens to a request without samples in flight, up to a token that ends it.

        They are computed like prompt tokens. Returns the appended tokens.
        """
        assert not request.num_pending_tokens, "samples in flight come first"
        output, ledger = request.output_token_ids, self._ledger
        for num_taken, token_id in enumerate(token_ids, start=1):
            if request.status in RUNS:
                ledger.num_prefill_tokens -= num_before_decode(request)
                output.append(token_id)
                ledger.num_prefill_tokens += num_before_decode(request)
            else:
                ledger.count(request, -1)
                output.append(token_id)
                ledger.count(request)
            if token_id in request.stop_ids or len(output) > request.quiet_outputs:
                self._review(request)
                if request.status is RequestStatus.FINISHED:
                    return list(token_ids[:num_taken])
        return list(token_ids)

    def end(self, request: Request, reason: FinishReason) -> None:
        """End an unfinished request in any state; its tokens in flight will be dropped."""
        if request.status in RUNS:
            self._ledger.stop(request)
        else:
            self._ledger.dequeue(request)
            self._starts.forget(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.num_tokens_when_preempted = request.quiet_outputs = 0

    def _take_back(self, request: Request, num_tokens: int) -> None:
        """Subtract `num_tokens` planned tokens, which the device did not compute, from a request's computed tokens."""
        if request.status in RUNS:
            request.num_computed_tokens -= num_tokens
            request.quiet_until = 0
        else:
            self._ledger.count(request, -1)
            request.num_tokens_when_preempted -= num_tokens
            if request.tail is not None:
                request.num_kept_tokens -= num_tokens
            self._ledger.count(request)

    def _append(self, request: Request, token_ids: Sequence[int]) -> int:
        """Append sampled tokens to a request's output until one ends it; return the number of appended tokens."""
        output = request.output_token_ids
        for num_taken, token_id in enumerate(token_ids, start=1):
            output.append(token_id)
            if token_id in request.stop_ids or len(output) > request.quiet_outputs:
                self._review(request)
                if request.status is RequestStatus.FINISHED:
                    self.num_wasted_tokens += len(token_ids) - num_taken
                    return num_taken
        return len(token_ids)

    def _review(self, request: Request) -> None:
        """Review a request after a new token.

        Full pages are registered, several at a time. The request ends if this token is a stop token or the last one
        allowed. Unless it waits for each token, `quiet_outputs` is set: the output length up to which only stop tokens
        need another review.
        """
        output, num_prompt, page_size = request.output_token_ids, request.num_prompt_tokens, self._ledger.page_size
        num_known, max_total = num_prompt + len(output), request.max_total_tokens
        interval = self._ledger.store.blocks_at_once
        shift = request.slot % interval  # rows that started together take turns
        num_full = ((num_known - 1) // page_size + shift) // interval * interval - shift
        if num_full * page_size == num_known - 1 <= request.num_computed_tokens:
            self._ledger.store.register_blocks(request, num_full)
        if not request.waits_for_tokens and request.tail is None:
            next_review = (num_full + interval) * page_size + 1
            request.quiet_outputs = (next_review if next_review < max_total else max_total) - num_prompt - 1
        # The device masks stop ids for the first min_tokens tokens.
        if output[-1] in request.stop_ids and len(output) > request.params.min_tokens:
            self.end(request, FinishReason.STOP)
        elif num_known == max_total:
            self.end(request, FinishReason.LENGTH)
