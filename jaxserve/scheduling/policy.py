"""Policy: order of requests, and division of a step's tokens among prompts.

It is a value of plain numbers with pure functions, used by the scheduler. It is below the configuration in the module
hierarchy, which resolves it, so that it is available together with the sizes of a schedule.

Long prompts. A prompt with more tokens left than `long_threshold` is long. Few long prompts are computed at a time, and
the first share of each is half of the remaining step, so that other prompts can start. It then gets what these leave;
while rows decode, its chunk is at most `long_chunk`, because their next tokens wait for the whole step.
"""

import sys
from dataclasses import dataclass
from operator import attrgetter

from jaxserve.api.config import DEFAULT_LONG_PREFILLS, DEFAULT_PARTIAL_PREFILLS
from jaxserve.scheduling.request import Request

_priority = attrgetter("priority")


def reserved_prefill_tokens(max_num_batched_tokens: int) -> int:
    """Return the tokens of a step that are reserved for prompts while there are any: an eighth, at least one.

    Prompts thus progress whatever the number of rows in decode, which lose at most an eighth of their speed.
    """
    return max(1, max_num_batched_tokens // 8)


@dataclass(frozen=True, slots=True)
class Policy:
    """Shares of prompts, and the victim: shorter prompts overtake long ones, the last admitted is preempted.

    Attributes:
        reserved_prefill_tokens: tokens of a step that are reserved for prompts while there are any to compute.
        max_unfinished: most prompts between two chunks at a time.
        max_long: most long prompts among these.
        long_threshold: tokens left to compute above which a prompt is long.
        long_chunk: most tokens of a long prompt in a step with rows in decode.
        max_skipped: most waiting requests that a plan skips to start later ones.
        max_lookups: most of these whose cached pages the plan looks up; a quarter of it for prompts too long to start.
        weights: tenants and their weights, where these are not 1.
        targets: class (None for any other), time to first token and time between tokens, in seconds.
    """

    reserved_prefill_tokens: int
    max_unfinished: int
    max_long: int
    long_threshold: int
    long_chunk: int
    max_skipped: int = 4096
    max_lookups: int = 512
    weights: tuple[tuple[str, float], ...] = ()
    targets: tuple[tuple[int | None, float, float], ...] = ()

    @classmethod
    def from_options(
        cls,
        max_num_batched_tokens: int,
        max_num_partial_prefills: int = DEFAULT_PARTIAL_PREFILLS,
        max_long_partial_prefills: int = DEFAULT_LONG_PREFILLS,
        long_prefill_token_threshold: int = 0,
        weights: tuple[tuple[str, float], ...] = (),
        targets: tuple[tuple[int | None, float, float], ...] = (),
    ) -> "Policy":
        """Resolve the configured options; a threshold of 0 means the token budget, with chunks of half of it."""
        return cls(
            reserved_prefill_tokens(max_num_batched_tokens),
            max_num_partial_prefills,
            max_long_partial_prefills,
            long_prefill_token_threshold or max_num_batched_tokens,
            long_prefill_token_threshold or max(max_num_batched_tokens // 2, 1),
            weights=weights,
            targets=targets,
        )

    def victim(self, running: dict[str, Request]) -> Request:
        """Return the running request to preempt: the last admitted of the lowest class.

        Args:
            running: running requests in the order of admission.
        """
        return max(reversed(running.values()), key=_priority)

    def is_long(self, num_left: int) -> bool:
        """Return whether a prompt with `num_left` tokens left to compute is long."""
        return num_left > self.long_threshold

    def first_chunk(self, num_left: int, budget_left: int) -> int:
        """Return the tokens of a prompt with `num_left` to compute, before others get a share of `budget_left`."""
        if self.is_long(num_left):
            return min(num_left, self.long_chunk, (budget_left + 1) // 2)
        return min(num_left, budget_left)

    def further_chunk(self, num_left: int, num_taken: int, budget_left: int, *, decode_waits: bool) -> int:
        """Return the further tokens of a prompt after others got their shares.

        Args:
            num_left: tokens left to compute beyond its first share.
            num_taken: tokens of its first share.
            budget_left: tokens of the step that are not assigned yet.
            decode_waits: True if rows in decode wait for the step.
        """
        most = min(num_left, budget_left)
        if decode_waits and self.is_long(num_left + num_taken):
            most = min(most, self.long_chunk - num_taken)
        return max(most, 0)

    def max_left_to_start(self, budget_left: int, num_unfinished: int, num_long: int) -> int:
        """Return the most tokens left to compute with which a waiting request may start now.

        Args:
            budget_left: tokens of the step that are not assigned yet.
            num_unfinished: prompts between two chunks.
            num_long: long prompts among them.
        """
        if num_unfinished >= self.max_unfinished:  # the request must not become a further unfinished one
            return min(self.long_threshold, budget_left)
        if num_long >= self.max_long:
            return self.long_threshold
        return sys.maxsize
