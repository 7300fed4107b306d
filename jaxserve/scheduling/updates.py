"""Updates: takes what has become of a plan: appends the tokens sampled, and ends requests whose last one has come.

Upper bounds. What the device computes may be less than was planned: it stops a row with its last token, and goes on
with the others. `num_computed_tokens` counts what plans allow for, and an update takes back what did not happen. A plan
made meanwhile needs no condition: a row that has stopped computes nothing in it, and one that goes on is where the plan
has it at most, for which its pages were allocated. Of a prompt, all that was planned is computed. Of an output, all but
the last known token are computed for certain, because each token is sampled from the one before; only pages of these
are registered.

Quiet tokens. Nearly all tokens of a row change only the list of its output, and an update appends them without looking
at the row. `quiet_outputs` is the length up to which that is so: a token beyond it, or one of the stop ids, has the
request reviewed, which may end it, registers its full pages, and says when the next review is due.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.scheduling.ledger import RUNS, Ledger
from jaxserve.scheduling.request import FinishReason, Request, RequestStatus
from jaxserve.scheduling.starts import Starts
from jaxserve.scheduling.step_plan import StepPlan


class Updates:
    """Changes of requests as their tokens become known.

    Plans come in the order in which they were made, once each. A request may have been preempted since, or have ended.

    Args:
        ledger: ledger of all requests.
        starts: start of requests, which knows waiting ones that an update may end.

    Attributes:
        num_wasted_tokens: tokens that were sampled for requests that had ended.
    """

    def __init__(self, ledger: Ledger, starts: Starts) -> None:
        self._ledger, self._starts = ledger, starts
        self.num_wasted_tokens = 0

    def take(self, plan: StepPlan, sampled: Sequence[list[int]]) -> list[Request]:
        """Take the token ids that each row of a plan has sampled; return the requests that they ended.

        Ids behind the one that ended a request are deleted from its list, as are all of a request that had ended.
        """
        ended: list[Request] = []
        running = RequestStatus.RUNNING
        for request, most, token_ids in zip(plan.requests, plan.max_new, sampled, strict=True):
            output = request.output_token_ids
            if most == len(token_ids) == 1:
                token_id, is_quiet = token_ids[0], len(output) < request.quiet_outputs
                if is_quiet and token_id not in request.stop_ids:  # nearly always: the shortest way
                    output.append(token_id)
                    continue
                if request.status is running:
                    output.append(token_id)
                    self._review(request)
                    if request.status is not running:
                        ended.append(request)
                    continue
            assert len(token_ids) <= most, f"a row that may sample {most} tokens cannot have sampled {len(token_ids)}"
            if request.status is RequestStatus.FINISHED:
                self.num_wasted_tokens += len(token_ids)
                token_ids.clear()
                continue
            if most > len(token_ids):
                self._take_back(request, most - len(token_ids))
            if request.status is RequestStatus.BLOCKED and request.num_pending_tokens == len(token_ids):
                request.status = RequestStatus.RUNNING
            del token_ids[self._append(request, token_ids) :]
            if request.status is RequestStatus.FINISHED:
                ended.append(request)
        return ended

    def extend(self, request: Request, token_ids: Sequence[int]) -> list[int]:
        """Append tokens that no plan has sampled to a request without samples in flight, up to one that ends it.

        They are computed like those of a prompt. Returns those appended.
        """
        assert not request.num_pending_tokens, "samples in flight come first"
        output, ledger = request.output_token_ids, self._ledger
        for num_taken, token_id in enumerate(token_ids, start=1):
            if request.status in RUNS:
                output.append(token_id)
                ledger.num_prefill_tokens += 1
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
        """End an unfinished request in whatever state it is; the tokens it has in flight will be dropped."""
        if request.status in RUNS:
            self._ledger.stop(request)
        else:
            self._ledger.dequeue(request)
            self._starts.forget(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.num_tokens_when_preempted = request.quiet_outputs = 0

    def _take_back(self, request: Request, num_tokens: int) -> None:
        """Count tokens that the device did not come to as not computed."""
        if request.status in RUNS:
            request.num_computed_tokens -= num_tokens
            request.quiet_until = 0
        else:
            self._ledger.count(request, -1)
            request.num_tokens_when_preempted -= num_tokens
            self._ledger.count(request)

    def _append(self, request: Request, token_ids: Sequence[int]) -> int:
        """Append tokens until one ends the request; returns how many those are."""
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
        """Look at a request whose last token may end it or come behind full pages that are registered together."""
        output, num_prompt, page_size = request.output_token_ids, request.num_prompt_tokens, self._ledger.page_size
        num_known, max_total, interval = (
            num_prompt + len(output),
            request.max_total_tokens,
            self._ledger.store.blocks_at_once,
        )
        shift = request.slot % interval  # rows that began together take turns
        num_full = ((num_known - 1) // page_size + shift) // interval * interval - shift
        if num_full * page_size == num_known - 1 <= request.num_computed_tokens:
            self._ledger.store.register_blocks(request, num_full)
        if not request.waits_for_tokens:
            next_review = (num_full + interval) * page_size + 1
            request.quiet_outputs = (next_review if next_review < max_total else max_total) - num_prompt - 1
        if output[-1] in request.stop_ids and _may_stop(request):
            self.end(request, FinishReason.STOP)
        elif num_known == max_total:
            self.end(request, FinishReason.LENGTH)


def _may_stop(request: Request) -> bool:
    """Return whether the token just appended may end the request."""
    # The device masks stop ids for the first min_tokens tokens, so that the first that may end a request follows those.
    return len(request.output_token_ids) > request.params.min_tokens
