"""Request: a sequence to generate, as the scheduler knows it. Host values only, without jax."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Protocol, TypeVar, get_type_hints, runtime_checkable

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.token_ids import TokenIds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class FinishReason(enum.StrEnum):
    """Reason for the end of a completion."""

    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"


class RequestStatus(enum.Enum):
    """State of a request."""

    WAITING = enum.auto()  # has no pages and no slot; new or preempted
    LOADING = enum.auto()  # waits, and has pages that are written with the content of a lower tier
    RUNNING = enum.auto()
    BLOCKED = enum.auto()  # runs, but samples nothing until the update of a plan
    FINISHED = enum.auto()


@runtime_checkable
class Constraint(Protocol):
    """Tokens that an output may go on with, which depend on the output alone.

    Attributes:
        forced: tokens by which the last call of `advance` has gone on beyond the output; they belong to it.
        error: reason why the output cannot go on, although it is unfinished; empty unless that is so.
        has_ended: True if no further token may follow.
    """

    forced: list[int]
    error: str
    has_ended: bool

    @property
    def words(self) -> NDArray[np.int32]:
        """Mask of the tokens that may come next, a bit for each; not to be changed."""

    def advance(self, output_token_ids: Sequence[int]) -> None:
        """Take the tokens of the output that are new to it."""

    def again(self) -> Constraint:
        """Return the constraint before the first token."""


T = TypeVar("T")
Given = Annotated[T, "given"]  # by whoever makes a request: `Request.again` and event logs have it
Moved = Annotated[T, "moved"]  # state that a preempted request takes along to another replica: event logs have it


@dataclass(slots=True, eq=False)
class Request:
    """Sequence that is generated. The scheduler owns every field that is not given.

    Prefill and decode are not distinguished: `num_computed_tokens` of the `num_tokens` have keys and values in the
    pool; each step computes more until the numbers are equal, which samples one further token.
    """

    request_id: Given[str]
    prompt_token_ids: Given[TokenIds]
    params: Given[SamplingParams]
    seed: Given[int]  # resolved, never None
    max_total_tokens: Given[int]  # prompt + output limit
    bad_sequences: Given[tuple[tuple[int, ...], ...]] = ()  # sequences of token ids that the output must not contain
    salt: Given[bytes] = b""  # prefix-cache namespace: requests share pages only if their salts are equal
    read_prefix_cache: Given[bool] = True  # False if every prompt position must be computed (prompt_logprobs)
    shares_last_page: Given[bool] = False  # True if its last page is cached though not full, and others copy it (beams)
    waits_for_tokens: Given[bool] = False  # True if each token must be read before the next is sampled
    may_be_extended: Given[bool] = False  # True if tokens may be appended: each token is read before it is computed
    constraint: Constraint | None = None  # tokens that may come next, of a request that waits for tokens
    key: int = 0  # number that the frontend has given it, and no other
    arrival: Given[int] = 0  # index of the request in order of arrival
    arrival_s: Given[float] = 0.0  # time of arrival, where classes have targets
    priority: Given[int] = 0  # class: requests of a lower number go first
    tenant: Given[str] = ""  # name of whom it is for: tenants share the service of a class, and the cache, equally
    num_shared_tokens: int = 0  # prompt tokens that the router expects to be cached when the request starts

    # Steps read these of every row, which are side by side in memory.
    stop_ids: Given[frozenset[int]] = frozenset()  # any of these ends the output
    output_token_ids: Moved[TokenIds] = field(default_factory=list)  # ids read from the device so far
    quiet_outputs: int = 0  # limit of output tokens up to which one that does not stop it changes only their list
    num_computed_tokens: int = 0  # tokens in plans made so far; 0 unless running
    quiet_until: int = 0  # limit of num_computed_tokens below which a decode step changes only that number
    slot: int = -1  # row of the per-request device state; -1 while not running
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    num_tokens_when_preempted: int = 0  # includes tokens that were then on the device
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: Moved[int] = 0
    first_due_s: Moved[float] = 0.0  # time at which its first token was due, or came if that was later; 0 before
    pages: list[int] = field(default_factory=list)  # ids of all KV groups, by block; append-only while running
    num_released_blocks: int = 0  # leading blocks whose pages in sliding groups were released
    num_registered_blocks: int = 0  # leading blocks whose pages were registered in the prefix cache
    page_hashes: list[bytes] = field(default_factory=list)  # hashes of the full pages of known tokens
    num_transfers: int = 0  # moves of pages that it waits for; 0 unless loading
    has_failed: bool = False  # True if it waits, and a page of it could not be loaded
    num_kept_tokens: int = 0  # tokens that were computed when it was swapped out; 0 unless it waits since
    branch_tokens: int = 0  # tokens up to which others begin alike, though no snapshot of a state is there; else 0

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Number of prompt and output tokens whose ids the host has."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of known tokens and of those still on the device: computing n tokens samples one more."""
        num_known = len(self.prompt_token_ids) + len(self.output_token_ids)
        return max(num_known, self.num_computed_tokens + 1, self.num_tokens_when_preempted)

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens sampled on the device and not yet read (step-ahead)."""
        return self.num_tokens - self.num_known_tokens

    @property
    def min_position(self) -> int:
        """First position at which a token may end the output."""
        min_tokens = self.params.min_tokens
        return min(self.num_prompt_tokens + min_tokens, self.max_total_tokens) if min_tokens else 0

    @property
    def changes_logits(self) -> bool:
        """True if ids are biased, forbidden or restricted."""
        return self.constraint is not None or self.params.changes_logits

    @property
    def bias_kind(self) -> int:
        """1 if ids are biased or forbidden, 2 if they are only restricted to some, as by most constraints, else 0."""
        if self.params.logit_bias or self.bad_sequences:
            return 1
        return 2 if self.changes_logits else 0

    @property
    def seed_words(self) -> tuple[int, int]:
        """Low and high word of the 64-bit seed."""
        return self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF

    def again(self) -> Request:
        """Return the same request with nothing done for it yet."""
        given = {name: getattr(self, name) for name in _GIVEN_FIELDS}
        return Request(**given, constraint=None if self.constraint is None else self.constraint.again())

    def tokens(self, start: int, stop: int) -> TokenIds:
        """Return the known token ids in [start, stop)."""
        split = len(self.prompt_token_ids)
        if stop <= split:
            return self.prompt_token_ids[start:stop]
        if start >= split:
            return self.output_token_ids[start - split : stop - split]
        return self.prompt_token_ids[start:split] + self.output_token_ids[: stop - split]


_HINTS = get_type_hints(Request, include_extras=True)
_MARKS = {name: getattr(hint, "__metadata__", ()) for name, hint in _HINTS.items()}
_GIVEN_FIELDS = [name for name, marks in _MARKS.items() if "given" in marks]
LOGGED_FIELDS = [name for name, marks in _MARKS.items() if marks]
