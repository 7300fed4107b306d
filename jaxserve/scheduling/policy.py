"""Policy: order of requests, and division of each step among prompts.

Plain numbers with pure functions. The configuration, which is above it in the module hierarchy, resolves it as part of
the schedule's sizes.

Long prompts. A prompt with more than `long_threshold` tokens left is long. Only a few long prompts are computed at a
time, and the first chunk of each is half the remaining budget, so that other prompts can start. It then gets the tokens
they leave; while rows decode, its chunk is limited to `long_chunk`, because their next tokens wait for the whole step.
"""

import sys
from dataclasses import dataclass
from operator import attrgetter

from jaxserve.api.config import DEFAULT_LONG_PREFILLS, DEFAULT_PARTIAL_PREFILLS
from jaxserve.scheduling.request import Request

_priority = attrgetter("priority")


def reserved_prefill_tokens(max_num_batched_tokens: int) -> int:
    """Return the tokens per step that are reserved for prompts: an eighth, at least one.

    Prompts thus progress alongside any decoding rows, which lose at most an eighth of their speed.
    """
    return max(1, max_num_batched_tokens // 8)


@dataclass(frozen=True, slots=True)
class Policy:
    """Chunk sizes and victims: short prompts overtake long ones, and the last admitted request is preempted first.

    Attributes:
        reserved_prefill_tokens: tokens per step reserved for prompts, if there are any.
        max_unfinished: maximum prompts between two chunks.
        max_long: maximum long prompts among these.
        long_threshold: remaining tokens above which a prompt is long.
        long_chunk: maximum tokens of a long prompt in a step with decoding rows.
        max_skipped: maximum waiting requests that a plan skips to start later ones.
        max_lookups: maximum cache lookups for skipped requests in a plan; a quarter of it for prompts too long to
            start.
        weights: tenants with weights other than 1.
        targets: class (None for all others), time to first token and inter-token time, in seconds.
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
        """Build the policy from engine options.

        Args:
            max_num_batched_tokens: token budget per step.
            max_num_partial_prefills: maximum prompts between two chunks.
            max_long_partial_prefills: maximum long prompts among these.
            long_prefill_token_threshold: remaining tokens above which a prompt is long, and its chunk size. 0 means the
                token budget as the threshold, and half the budget as chunk size.
            weights: fair-share weights by tenant.
            targets: latency targets by priority class, see `Policy`.
        """
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
        """Return the request to preempt: the last admitted one in the lowest class.

        Args:
            running: running requests in admission order.
        """
        return max(reversed(running.values()), key=_priority)

    def is_long(self, num_left: int) -> bool:
        return num_left > self.long_threshold

    def first_chunk(self, num_left: int, budget_left: int) -> int:
        """Return the size of a prompt's first chunk in this step.

        A long prompt gets at most half the remaining budget, so that short prompts fit beside it.

        Args:
            num_left: uncomputed tokens in the prompt.
            budget_left: remaining token budget of the step.
        """
        if self.is_long(num_left):
            return min(num_left, self.long_chunk, (budget_left + 1) // 2)
        return min(num_left, budget_left)

    def further_chunk(self, num_left: int, num_taken: int, budget_left: int, *, decode_waits: bool) -> int:
        """Return a prompt's further tokens in this step, after other prompts got their first chunks.

        Args:
            num_left: tokens left after its first chunk.
            num_taken: tokens of its first chunk.
            budget_left: unassigned tokens of the step.
            decode_waits: True if decoding rows wait for the step.
        """
        most = min(num_left, budget_left)
        if decode_waits and self.is_long(num_left + num_taken):
            most = min(most, self.long_chunk - num_taken)
        return max(most, 0)

    def max_left_to_start(self, budget_left: int, num_unfinished: int, num_long: int) -> int:
        """Return the maximum uncomputed tokens with which a waiting request may start now.

        Args:
            budget_left: unassigned tokens of the step.
            num_unfinished: prompts between two chunks.
            num_long: long prompts among them.
        """
        if num_unfinished >= self.max_unfinished:  # the request must finish its prompt in this step
            return min(self.long_threshold, budget_left)
        if num_long >= self.max_long:
            return self.long_threshold
        return sys.maxsize
