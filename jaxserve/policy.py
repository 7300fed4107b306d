"""Policy: which request goes before which, and how a step's tokens are shared among prompts.

It is a value of plain numbers with pure functions. The scheduler asks it and does the rest. It lies beside the router,
below the configuration that resolves it, so that whoever has the sizes of a schedule has the policy as well.

Long prompts. A prompt with more tokens left than `long_threshold` is long. Few long ones are computed at a time, and
the first share of one is half of what is left of the step, so that others start beside it. It gets what these leave.
While rows decode, that is so much that its chunk is `long_chunk` at most: their next tokens wait for the whole step.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

DEFAULT_PARTIAL_PREFILLS = 2  # a long prompt, and the one short prompt that the end of a step's budget cuts
DEFAULT_LONG_PREFILLS = 1

Job = TypeVar("Job")


def prefill_share(max_num_batched_tokens: int) -> int:
    """Tokens of a step that rows in decode leave to prompts while there are any to compute: an eighth, at least one.

    So prompts go on however many rows are in decode, and these lose at most an eighth of their speed to the share.
    """
    return max(1, max_num_batched_tokens // 8)


@dataclass(frozen=True, slots=True)
class Policy:
    """First come, first served, but for long prompts, beside which shorter ones start; the last admitted gives way.

    Attributes:
        prefill_share: tokens of a step that rows in decode leave to prompts while there are any to compute.
        most_unfinished: prompts that may be between two chunks at a time.
        most_long: of these, long ones.
        long_threshold: tokens left to compute of which no prompt is long yet.
        long_chunk: most tokens of a long prompt in a step in which rows decode.
        most_passed_over: most waiting requests that a plan passes over to start those behind them.
        most_looks: most of these whose cached pages the plan looks up; a quarter of that for prompts too long to start.
    """

    prefill_share: int
    most_unfinished: int
    most_long: int
    long_threshold: int
    long_chunk: int
    most_passed_over: int = 4096
    most_looks: int = 512

    @classmethod
    def of(
        cls,
        max_num_batched_tokens: int,
        max_num_partial_prefills: int = DEFAULT_PARTIAL_PREFILLS,
        max_long_partial_prefills: int = DEFAULT_LONG_PREFILLS,
        long_prefill_token_threshold: int = 0,
    ) -> "Policy":
        """Resolve the options of the configuration; a threshold of 0 is the budget, with chunks of half of it."""
        return cls(
            prefill_share(max_num_batched_tokens),
            max_num_partial_prefills,
            max_long_partial_prefills,
            long_prefill_token_threshold or max_num_batched_tokens,
            long_prefill_token_threshold or max(max_num_batched_tokens // 2, 1),
        )

    def in_order(self, waiting: Mapping[str, Job]) -> Iterable[Job]:
        """Return the waiting requests, kept in the order of their arrival, in the order in which they may start."""
        return waiting.values()

    def victim(self, running: dict[str, Job]) -> Job:
        """Choose who of the running requests, kept in the order of their admission, gives way to a row in decode."""
        return running[next(reversed(running))]

    def is_long(self, num_left: int) -> bool:
        """Whether a prompt is long that has so many tokens left to compute."""
        return num_left > self.long_threshold

    def first_share(self, num_left: int, budget_left: int) -> int:
        """Tokens of a prompt with `num_left` to compute, before others have their share of `budget_left`."""
        if self.is_long(num_left):
            return min(num_left, self.long_chunk, (budget_left + 1) // 2)
        return min(num_left, budget_left)

    def further_share(self, num_left: int, num_taken: int, budget_left: int, *, beside_decode: bool) -> int:
        """Tokens of a prompt beyond its first share, once others have had theirs.

        Args:
            num_left: tokens that it has to compute beyond its first share.
            num_taken: tokens of that share.
            budget_left: tokens of the step that nobody has.
            beside_decode: whether rows in decode wait for the step.
        """
        most = min(num_left, budget_left)
        if beside_decode and self.is_long(num_left + num_taken):
            most = min(most, self.long_chunk - num_taken)
        return max(most, 0)

    def most_left_to_start(self, budget_left: int, num_unfinished: int, num_long: int) -> int:
        """Tokens that a waiting request may have to compute for it to start now.

        Args:
            budget_left: tokens of the step that nobody has.
            num_unfinished: prompts between two chunks.
            num_long: long ones among them.
        """
        if num_unfinished >= self.most_unfinished:  # it must not become one more
            return min(self.long_threshold, budget_left)
        if num_long >= self.most_long:
            return self.long_threshold
        return sys.maxsize
