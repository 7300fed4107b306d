"""Sparsity: the keys and values that output tokens see, if not all.

Prompt tokens see all earlier tokens, so prompts' keys and values are shared as usual. Output tokens' keys and values
depend on the prompt's length, too, and are not shared. An output token's view depends only on its sequence, not on the
division into steps: a preempted request computes the same keys and values again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jaxserve.api.sparsity_config import COMPACTING, NUM_DENSE_LAYERS
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.api.sparsity_config import EvictionConfig

AHEAD = 4  # maximum tokens by which plans in flight run ahead of tokens known to be computed
MIN_CHOSEN_PAGES = 3  # the first, the latest, and one by its keys
OBSERVED_TOKENS = 64  # latest prompt tokens by whose attention SnapKV chooses, as in the paper
LONGEST = 1 << 30  # more tokens than any sequence has
Index = Any  # index in a sequence: an int on the host, an array with one per row of a step on the device


@dataclass(frozen=True)
class Sparsity(ABC):
    """Rule for groups with full attention.

    Attributes:
        page_size: tokens per page.
        budget: maximum tokens that an output token sees.
        num_sink_pages: leading pages that are never hidden.
        hides_pages: False if every page may be seen by a later token.
        num_dense_layers: first layers in which output tokens see all earlier tokens.
    """

    page_size: int
    budget: int
    num_sink_pages: int = 0
    hides_pages: ClassVar[bool] = True
    num_dense_layers: ClassVar[int] = 0

    @property
    def num_pages(self) -> int:
        """Number of pages in the budget."""
        return self.budget // self.page_size

    @abstractmethod
    def num_hidden(self, index: Index, num_prompt: Index) -> Index:
        """Return the number of pages after the sinks that no output token sees from the one at `index` on.

        Args:
            index: index in the sequence, after the prompt.
            num_prompt: number of prompt tokens.
        """

    @abstractmethod
    def row_end(self, start: Index) -> Index:
        """Return the index at which a row must end if it begins with the output token at `start`."""

    def num_seen(self, num_tokens: Index) -> Index:
        """Return how many tokens are seen by the last one in a sequence, in a layer that is not dense."""
        return num_tokens - self.num_hidden(num_tokens - 1, num_tokens - 1) * self.page_size

    def num_read(self, num_tokens: Index) -> Index:
        """Return the bytes that this token reads, counted in tokens."""
        return self.num_seen(num_tokens)

    def held_pages(self, num_tokens: int, num_prompt: int) -> int:
        """Return the maximum pages that a sequence with `num_tokens` tokens holds simultaneously."""
        return -(-num_tokens // self.page_size)

    def num_copied(self, num_prompt: int) -> int:
        """Return the number of pages that receive copies of a prompt's tokens before the first output token."""
        return 0


@dataclass(frozen=True)
class Window(Sparsity):
    """StreamingLLM: an output token sees the sinks and the last pages; the pages between them are released.

    Which ones depends only on the page that the token is in.
    """

    def num_hidden(self, index: Index, num_prompt: Index) -> Index:
        """Return the number of pages between the sinks and the last pages."""
        num_more = index // self.page_size + 1 - self.num_pages
        return num_more * (num_more > 0)

    def row_end(self, start: Index) -> Index:
        """Return the end of this token's page."""
        return (start // self.page_size + 1) * self.page_size

    def held_pages(self, num_tokens: int, num_prompt: int) -> int:
        """Return the number of pages in the prompt, or in the budget and the next tokens."""
        num_prompt_pages = -(-num_prompt // self.page_size)
        return min(-(-num_tokens // self.page_size), max(num_prompt_pages, self.num_pages - -AHEAD // self.page_size))


@dataclass(frozen=True)
class Choice(Sparsity):
    """Quest: an output token chooses its pages in each layer, by its query."""

    hides_pages = False
    num_dense_layers = NUM_DENSE_LAYERS

    def num_hidden(self, index: Index, num_prompt: Index) -> Index:
        """Return 0: a later token may choose any page."""
        return 0 * index

    def num_seen(self, num_tokens: Index) -> Index:
        """Return the number of tokens in the chosen pages."""
        last_page = (num_tokens - 1) % self.page_size + 1
        num_most = (self.num_pages - 1) * self.page_size + last_page
        return num_tokens - (num_tokens - num_most) * (num_tokens > num_most)

    def num_read(self, num_tokens: Index) -> Index:
        """Return the tokens in the chosen pages, and one per page: its bounds have the size of a key and a value."""
        return self.num_seen(num_tokens) + num_tokens // self.page_size

    def row_end(self, start: Index) -> Index:
        """Return the next index, because a row's tokens have one list of pages."""
        return start + 1


@dataclass(frozen=True)
class Compaction(Sparsity):
    """SnapKV and H2O: after the prompt, its best tokens are copied to fresh pages, and its pages are released.

    Output tokens see the copies and all output tokens. The copies take the places of the prompt's last pages.

    Attributes:
        block: prompt tokens whose attention is observed together.
        observes_all: True if all prompt tokens are observed, False for the last `block`.
        window: latest prompt tokens that are always kept; None for half of the kept ones.
    """

    block: int = 64
    observes_all: bool = False
    window: int | None = None

    def num_hidden(self, index: Index, num_prompt: Index) -> Index:
        """Return the number of pages by which the prompt exceeds the budget."""
        return (num_prompt > self.budget) * -((self.budget - num_prompt) // self.page_size)

    def row_end(self, start: Index) -> Index:
        """Return an index after all tokens: output tokens see all output tokens."""
        return start + LONGEST

    def num_seen(self, num_tokens: Index) -> Index:
        """Return the budget, as if nearly all tokens were in the prompt."""
        return num_tokens - (num_tokens - self.budget) * (num_tokens > self.budget)

    def num_recent(self, num_kept: Index) -> Index:
        """Return how many of the latest prompt tokens are among the `num_kept` that are kept, whatever their scores."""
        return num_kept // 2 if self.window is None else self.window

    def num_copied(self, num_prompt: int) -> int:
        """Return the number of pages for the kept tokens; 0 for a prompt within the budget."""
        num_hidden = self.num_hidden(num_prompt, num_prompt)
        return -(-num_prompt // self.page_size) - num_hidden if num_hidden else 0

    def held_pages(self, num_tokens: int, num_prompt: int) -> int:
        """Return the number of pages in the prompt and its copy, or after copying."""
        num_pages, num_prompt_pages = (-(-count // self.page_size) for count in (num_tokens, num_prompt))
        num_after = num_pages - self.num_hidden(num_prompt, num_prompt)
        return max(num_prompt_pages + self.num_copied(num_prompt), num_after)


def resolve_eviction(eviction: EvictionConfig, page_size: int, max_model_len: int) -> Sparsity | None:
    """Return the rule for a user's options; None if no sequence exceeds the budget.

    Args:
        eviction: options.
        page_size: tokens per page.
        max_model_len: maximum sequence length.

    Raises:
        ConfigError: the budget is too small for the pages.
    """
    if eviction.method in COMPACTING:
        return _resolve_compaction(eviction, page_size, max_model_len)
    num_sink_pages = -(-eviction.sink_tokens // page_size)
    least = (num_sink_pages + 2) * page_size
    if eviction.budget < least:
        raise ConfigError(
            f"the budget of kv_eviction must be at least {least} tokens, {num_sink_pages} pages with the first "
            f"{eviction.sink_tokens} tokens and 2 with the latest ones, got {eviction.budget}; raise it, or lower "
            f"page_size, which is {page_size}"
        )
    return None if eviction.budget >= max_model_len else Window(page_size, eviction.budget, num_sink_pages)


def _resolve_compaction(eviction: EvictionConfig, page_size: int, max_model_len: int) -> Compaction | None:
    """Return the rule for SnapKV or H2O; see `resolve_eviction`."""
    window = eviction.window_tokens
    observes_all = eviction.method == "h2o"
    if window is None and not observes_all:
        window = OBSERVED_TOKENS
    least = (window or 1) + page_size
    if eviction.budget < least:
        raise ConfigError(
            f"the budget of kv_eviction must be at least {least} tokens, window_tokens and a page of {page_size}, got "
            f"{eviction.budget}; raise it, or lower window_tokens or page_size"
        )
    if eviction.budget >= max_model_len:
        return None
    block = OBSERVED_TOKENS if observes_all or window is None else window
    return Compaction(page_size, eviction.budget, block=block, observes_all=observes_all, window=window)


def resolve_choice(budget: int, page_size: int, max_model_len: int) -> Sparsity | None:
    """Return the rule for the budget of `sparse_attention`, as `resolve_eviction` does for its options."""
    least = MIN_CHOSEN_PAGES * page_size
    if budget < least:
        raise ConfigError(
            f"the budget of sparse_attention must be at least {least} tokens, {MIN_CHOSEN_PAGES} pages, got "
            f"{budget}; raise it, or lower page_size, which is {page_size}"
        )
    return None if budget >= max_model_len else Choice(page_size, budget)
