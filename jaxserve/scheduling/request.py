"""Request: a sequence to generate, as seen by the scheduler. Host values only, without jax."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, Protocol, TypeVar, get_type_hints, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from jaxserve.api.cached_tokens import NO_CACHED_TOKENS, CachedTokens
from jaxserve.api.reuse_hint import ReuseHint
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.token_ids import TokenIds
from jaxserve.images.prepared import ImageSpan


class FinishReason(enum.StrEnum):
    """Reason why a completion ended."""

    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"


class RequestStatus(enum.Enum):
    """Scheduling state of a request."""

    WAITING = enum.auto()  # new or preempted: no pages, no slot
    LOADING = enum.auto()  # waiting, with pages that are being written from a lower tier
    RUNNING = enum.auto()
    BLOCKED = enum.auto()  # running, but not sampling until a plan is updated
    FINISHED = enum.auto()


@runtime_checkable
class Constraint(Protocol):
    """Tokens that may continue an output; they depend only on the output.

    Attributes:
        forced: tokens that the last `advance` appended to the output by itself.
        error: reason why an unfinished output cannot continue; otherwise empty.
        has_ended: True if no further token may follow.
    """

    forced: list[int]
    error: str
    has_ended: bool

    @property
    def words(self) -> NDArray[np.int32]:
        """Bit mask of the allowed next tokens; read-only."""

    def advance(self, output_token_ids: Sequence[int]) -> None:
        """Read the tokens that were appended to the output since the last call; set `forced`, `error` and `has_ended`.

        Args:
            output_token_ids: all tokens of the output.
        """

    def again(self) -> Constraint:
        """Return a new constraint of the same kind, for an empty output."""


class Tail(NamedTuple):
    """Last computed part of a request that was swapped out, until all its tokens are known.

    Attributes:
        first_block: index of its first block.
        pages: its pages, block by block.
        state: page that gets the state of recurrent layers; None without one.
    """

    first_block: int
    pages: Sequence[int] = ()
    state: int | None = None


T = TypeVar("T")
Given = Annotated[T, "given"]  # set when a request is created: kept by `Request.again` and event logs
Moved = Annotated[T, "moved"]  # state that a preempted request carries to another replica: kept by event logs


@dataclass(slots=True, eq=False)
class Request:
    """Sequence being generated. The scheduler owns every field that is not given.

    Prefill and decode are not distinguished: the pool holds keys and values for `num_computed_tokens` out of
    `num_tokens` tokens. Each step computes more until both are equal, which samples one further token.
    """

    request_id: Given[str]
    prompt_token_ids: Given[TokenIds]
    params: Given[SamplingParams]
    seed: Given[int]  # resolved, never None
    max_total_tokens: Given[int]  # prompt + output limit
    bad_sequences: Given[tuple[tuple[int, ...], ...]] = ()  # token id sequences that the output must not contain
    salt: Given[bytes] = b""  # prefix-cache namespace: requests share pages only if their salts are equal
    adapter: Given[str] = ""  # digest of its LoRA adapter; empty for the base model
    adapter_start: Given[int] = 0  # first token with the adapter
    images: Given[tuple[ImageSpan, ...]] = ()  # images in the prompt, in order
    axes: Given[NDArray[np.int32] | None] = None  # positions [3, prompt tokens] for M-RoPE; None if they count tokens
    read_prefix_cache: Given[bool] = True  # False if every prompt position must be computed (prompt_logprobs)
    # True if its last page is cached although not full, for others to copy (beams)
    shares_last_page: Given[bool] = False
    # True if its prompt's last page is cached without the last token, for an engine that computes only this one
    sends_prompt: Given[bool] = False
    takes_prompt: Given[bool] = False  # True if another engine may have cached such a page for it
    reuse: Given[ReuseHint | None] = None  # expected next use of its pages
    waits_for_tokens: Given[bool] = False  # True if each token must be read before the next is sampled
    may_be_extended: Given[bool] = False  # True if tokens may be appended: each token is read before it is computed
    constraint: Constraint | None = None  # allowed next tokens, for a request that waits for tokens
    key: int = 0  # unique number given by the frontend
    arrival: Given[int] = 0  # position in arrival order
    arrival_s: Given[float] = 0.0  # arrival time; 0 if it is unknown
    priority: Given[int] = 0  # class: lower numbers go first
    tenant: Given[str] = ""  # tenants get equal parts of a class's service, and of the cache
    image_rows: dict[int, NDArray[np.int32]] = field(default_factory=dict)  # image in use -> its embeddings' rows
    num_shared_tokens: int = 0  # prompt tokens that the router expects to be cached when the request starts

    # Steps read these for every row, so they are adjacent in memory.
    stop_ids: Given[frozenset[int]] = frozenset()  # any of these ends the output
    output_token_ids: Moved[TokenIds] = field(default_factory=list)  # ids read from the device so far
    quiet_outputs: int = 0  # output length up to which a token that is no stop id needs no review
    num_computed_tokens: int = 0  # tokens in plans made so far; 0 unless running
    quiet_until: int = 0  # num_computed_tokens below which a decode step changes only that number
    slot: int = -1  # device state slot; -1 while not running
    adapter_slot: int = 0  # slot of its adapter; 0 for the base model, or while not running
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    num_tokens_when_preempted: int = 0  # includes tokens that were then on the device
    cached_tokens: CachedTokens = NO_CACHED_TOKENS  # prompt tokens found in the prefix cache at first admission
    num_preemptions: Moved[int] = 0
    energy_j: float = 0.0  # energy distributed to it so far, if there is a meter
    first_due_s: Moved[float] = 0.0  # due or actual time of its first token, the later one; 0 before
    pages: list[int] = field(default_factory=list)  # page ids of all KV groups, by block; append-only while running
    num_released_blocks: int = 0  # leading blocks whose pages in sliding groups were released
    num_hidden_blocks: int = 0  # blocks after the sinks whose pages in full groups were released, for a budget
    num_registered_blocks: int = 0  # leading blocks whose pages were registered in the prefix cache
    page_hashes: list[bytes] = field(default_factory=list)  # hashes of full pages with known tokens
    num_transfers: int = 0  # page moves that it waits for; 0 unless loading
    has_failed: bool = False  # True if it waits after a page failed to load
    loaded_blocks: dict[int, str] = field(
        default_factory=dict
    )  # tier of each block loaded for it; empty unless waiting
    num_kept_tokens: int = 0  # tokens computed when it was swapped out; 0 unless waiting since
    tail: Tail | None = None  # pages that it keeps after it was swapped out; None unless waiting since
    branch_tokens: int = 0  # length of the prefix shared with others that has no state snapshot yet; otherwise 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens found in the prefix cache at first admission, in any tier."""
        return self.cached_tokens.total

    @property
    def num_known_tokens(self) -> int:
        """Number of prompt and output tokens whose ids the host has."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_last_tokens(self) -> int:
        """Number of tokens up to which a waiting request's partly filled page may be cached."""
        return self.num_kept_tokens or self.num_known_tokens - 1

    @property
    def num_tokens(self) -> int:
        """Number of known tokens and tokens still on the device: computing n tokens samples one more."""
        num_known = len(self.prompt_token_ids) + len(self.output_token_ids)
        return max(num_known, self.num_computed_tokens + 1, self.num_tokens_when_preempted)

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens sampled on the device but not yet read (step-ahead)."""
        return self.num_tokens - self.num_known_tokens

    @property
    def position_offset(self) -> int:
        """Position of a token after the prompt, minus the number of tokens before it."""
        return 0 if self.axes is None else int(self.axes.max()) + 1 - self.num_prompt_tokens

    @property
    def min_position(self) -> int:
        """First position at which a token may end the output."""
        min_tokens = self.params.min_tokens
        return min(self.num_prompt_tokens + min_tokens, self.max_total_tokens) if min_tokens else 0

    @property
    def changes_logits(self) -> bool:
        """True if logits are biased or masked."""
        return self.constraint is not None or self.params.changes_logits

    @property
    def bias_kind(self) -> int:
        """1 if logits of some ids are biased or forbidden, 2 if only some ids are allowed, otherwise 0."""
        if self.params.logit_bias or self.bad_sequences:
            return 1
        return 2 if self.changes_logits else 0

    @property
    def seed_words(self) -> tuple[int, int]:
        """Low and high words of the 64-bit seed."""
        return self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF

    def by_tier(self, num_tokens: int, page_size: int) -> CachedTokens:
        """Return which tiers the first `num_tokens` tokens of a waiting request, all cached, came from."""
        if not self.loaded_blocks:
            return CachedTokens(num_tokens)
        loaded: Counter[str] = Counter()
        for block, tier in self.loaded_blocks.items():
            loaded[tier] += max(min(num_tokens - block * page_size, page_size), 0)
        return CachedTokens(num_tokens - loaded.total(), **loaded)

    def again(self) -> Request:
        """Return a fresh copy of the request, as if nothing was computed yet."""
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
