"""Policy: order of requests, and division of each step among prompts.

Plain numbers with pure functions. `ScheduleConfig.policy` resolves it from the engine's options.

Long prompts. A prompt with more than `long_threshold` tokens left is long. Only a few long prompts are computed at a
time, and the first chunk of each is half the remaining budget, so that other prompts can start. It then gets the tokens
they leave; while rows decode, its chunk is limited to `long_chunk`, because their next tokens wait for the whole step.
"""

import sys
from dataclasses import dataclass
from operator import attrgetter

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

    def victim(self, running: dict[str, Request]) -> Request:
        """Return the request to preempt: the last admitted one in the lowest class.

        Args:
            running: running requests in admission order.
        """
        return max(reversed(running.values()), key=_priority)

    def is_long(self, num_left: int) -> bool:
        """Return whether a prompt with `num_left` uncomputed tokens is long."""
        return num_left > self.long_threshold

    def first_chunk(self, num_left: int, budget_left: int) -> int:
        """Return the number of tokens in a prompt's first chunk in this step.

        A long prompt gets at most half the remaining budget, so that short prompts fit as well.

        Args:
            num_left: uncomputed tokens in the prompt.
            budget_left: remaining token budget of the step.
        """
        if self.is_long(num_left):
            return min(num_left, self.long_chunk, (budget_left + 1) // 2)
        return min(num_left, budget_left)

    def further_chunk(self, num_left: int, num_taken: int, budget_left: int, *, decode_waits: bool) -> int:
        """Return the number of further tokens that a prompt gets in this step, after all prompts got a first chunk.

        Args:
            num_left: tokens left after its first chunk.
            num_taken: tokens of its first chunk.
            budget_left: unassigned tokens of the step.
            decode_waits: True if decoding rows wait for the step.
        """
        num_tokens = min(num_left, budget_left)
        if decode_waits and self.is_long(num_left + num_taken):
            num_tokens = min(num_tokens, self.long_chunk - num_taken)
        return max(num_tokens, 0)

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
