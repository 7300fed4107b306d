"""llguidance grammars: compiled once per text, and copied for each constrained sample."""

from __future__ import annotations

import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.api.structured_outputs import StructuredOutputsParams
from jaxserve.errors import RequestError, install_extra
from jaxserve.text.structured_output.exact_schema import dumps, has_inexact_numbers
from jaxserve.text.structured_output.lark import schema_rules, whitespace_options
from jaxserve.text.structured_output.trial import Trials, refused

MAX_COMPILED = 64  # maximum number of compiled grammars that are kept
MAX_COMPILED_BYTES = 2**31  # their memory when compiled
_WORD_BITS = 32
_LIMITS: dict[str, Any] = {  # llguidance's limits for compiling a grammar and for each output step
    "max_grammar_size": 500_000,
    "max_items_in_row": 2_000,
    "step_max_items": 50_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 50_000,
}


class CompiledGrammar(NamedTuple):
    """Compiled grammar.

    Attributes:
        matcher: llguidance's matcher before the first token, which only copies advance.
        words: mask of the tokens that may come first, one bit each.
        num_bytes: memory for both.
    """

    matcher: Any
    words: NDArray[np.int32]
    num_bytes: int


class TokenConstraint:
    """Constraint on one output: the tokens that may come next, which depend only on the output.

    Args:
        grammar: grammar that the output must follow.
        allowed: mask of the tokens that the request allows; None allows all.
        stop_ids: ids that end the output.
        min_tokens: number of tokens before `stop_ids` can be sampled.
        takes_forced: True to append tokens immediately if no other token is possible.

    Attributes:
        num_bytes: memory for the compiled grammar.
        words: mask of the tokens that may come next, one bit each; read-only.
        forced: tokens that the last `advance` appended; they belong to the output.
        error: reason why an unfinished output cannot continue; empty otherwise.
        has_ended: True if no further token may follow.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        *,
        allowed: NDArray[np.int32] | None,
        stop_ids: frozenset[int],
        min_tokens: int,
        takes_forced: bool,
    ) -> None:
        self._grammar, self._matcher = grammar, grammar.matcher.deep_copy()
        self.num_bytes, self.words = grammar.num_bytes, grammar.words
        self._allowed, self._stop_ids, self._min_tokens = allowed, stop_ids, min_tokens
        self._takes_forced, self._num_accepted = takes_forced, 0
        self.forced: list[int] = []
        self.error = ""
        self.has_ended = False
        self._restrict()

    def again(self) -> TokenConstraint:
        """Return the same constraint for an output without tokens."""
        return TokenConstraint(
            self._grammar,
            allowed=self._allowed,
            stop_ids=self._stop_ids,
            min_tokens=self._min_tokens,
            takes_forced=self._takes_forced,
        )

    def advance(self, output_token_ids: Sequence[int]) -> None:
        """Update `words` and the other attributes for an output with new tokens at its end."""
        new, self.forced = output_token_ids[self._num_accepted :], []
        if not new or self.has_ended:
            return
        self._num_accepted += len(new)
        if self._matcher.consume_tokens(new):
            if self._takes_forced:
                self._force()
            self.words = token_mask(self._matcher, len(self._grammar.words))
        if self._matcher.is_error():
            self.error, self.has_ended = self._matcher.get_error(), True
        else:
            self._restrict()

    def _force(self) -> None:
        """Append tokens to `forced` while only one is possible, up to one that is not allowed or ends the output."""
        for token_id in self._matcher.compute_ff_tokens():
            is_allowed = self._allowed is None or self._allowed[token_id // _WORD_BITS] >> token_id % _WORD_BITS & 1
            if not is_allowed or token_id in self._stop_ids or not self._matcher.consume_tokens([token_id]):
                break
            self.forced.append(token_id)
        self._num_accepted += len(self.forced)

    def _restrict(self) -> None:
        """Remove tokens that the request forbids from `words`; if none remains, the output ends."""
        if self._allowed is not None:
            self.words = self.words & self._allowed
        rest = self.words
        if self._num_accepted < self._min_tokens:
            rest = rest.copy()
            for token_id in self._stop_ids:
                rest[token_id // _WORD_BITS] &= ~np.uint32(1 << token_id % _WORD_BITS).view(np.int32)
        if not rest.any():
            self.has_ended = True
            if not self._matcher.is_accepting():
                self.error = "the grammar, allowed_token_ids and min_tokens together allow no token"


def token_mask(matcher: Any, num_words: int) -> NDArray[np.int32]:
    """Return the mask of the tokens that a matcher accepts next, one bit each, in `num_words` 32-bit words."""
    words = np.zeros(num_words, np.int32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    return words


class GrammarCompiler:
    """Grammar compiler for one tokenizer. Thread-safe.

    Args:
        tokenizer_json: text of `tokenizer.json`.
        vocab_size: number of model tokens.
        eos_ids: tokens that end an output.

    Raises:
        RequestError: llguidance is not installed, or cannot use the tokenizer.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: frozenset[int]) -> None:
        try:
            import llguidance  # noqa: PLC0415 - an extra
        except ImportError as error:
            message = f"structured_outputs need llguidance, but: {error}; {install_extra('structured')}"
            raise RequestError(message) from error
        self._llguidance = llguidance
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(eos_ids))
        except Exception as error:
            raise RequestError(f"structured_outputs need a tokenizer that llguidance can use, got: {error}") from None
        self._num_words = -(-vocab_size // _WORD_BITS)
        self._limits = llguidance.LLParserLimits(**_LIMITS)
        self._trials = Trials(tokenizer_json, vocab_size, sorted(eos_ids), _LIMITS)
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._turns: dict[tuple[str, str], threading.Lock] = {}  # (tenant, grammar) being compiled
        self._num_waiting: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()  # guards the tables, and copying compiled grammars

    def constraint(
        self,
        form: StructuredOutputsParams,
        *,
        allowed_token_ids: Sequence[int] | None,
        stop_ids: frozenset[int],
        min_tokens: int,
        tenant: str = "",
        tried_bytes: int | None = None,
    ) -> TokenConstraint:
        """Return a constraint for one output, and compile its grammar unless it is cached.

        Args:
            form: structure of the output.
            allowed_token_ids: tokens that the request allows; None allows all.
            stop_ids: ids that end the output.
            min_tokens: number of tokens before `stop_ids` can be sampled.
            tenant: client's tenant; all tenants use the same compiling processes.
            tried_bytes: memory for the grammar if a trial compilation has shown it; None to try it first.

        Raises:
            RequestError: llguidance refuses the grammar, or it allows no first token.
        """
        found = self._find(form)
        if found is None:
            with self._one_at_a_time((tenant, form.key)):  # another request of the tenant may have compiled it
                found = self._find(form) or self._keep(form, self._compile(form, tenant, tried_bytes))
        allowed = None
        if allowed_token_ids is not None:
            bits = np.zeros(self._num_words * _WORD_BITS, bool)
            bits[list(allowed_token_ids)] = True
            allowed = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
        with self._lock:
            constraint = TokenConstraint(
                found,
                allowed=allowed,
                stop_ids=stop_ids,
                min_tokens=min_tokens,
                takes_forced=form.append_forced_tokens,
            )
        if constraint.has_ended:
            raise RequestError(
                f"structured_outputs must allow a first token: {constraint.error or 'the grammar is empty'}"
            )
        return constraint

    def _find(self, form: StructuredOutputsParams) -> CompiledGrammar | None:
        """Return the cached grammar for a structure; None if there is none."""
        with self._lock:
            found = self._compiled.get(form.key)
            if found is not None:
                self._compiled.move_to_end(form.key)
            return found

    def _keep(self, form: StructuredOutputsParams, new: CompiledGrammar) -> CompiledGrammar:
        """Cache the compiled grammar for a structure, and return it; the oldest ones are dropped beyond the limits."""
        with self._lock:
            self._compiled[form.key] = new
            while len(self._compiled) > MAX_COMPILED or (
                len(self._compiled) > 1 and sum(c.num_bytes for c in self._compiled.values()) > MAX_COMPILED_BYTES
            ):
                self._compiled.popitem(last=False)
        return new

    @contextmanager
    def _one_at_a_time(self, key: tuple[str, str]) -> Iterator[None]:
        """Context that blocks other threads with the same (tenant, grammar) key."""
        with self._lock:
            turn = self._turns.setdefault(key, threading.Lock())
            self._num_waiting[key] += 1
        try:
            with turn:
                yield
        finally:
            with self._lock:
                self._num_waiting[key] -= 1
                if not self._num_waiting[key]:
                    del self._turns[key], self._num_waiting[key]

    def _compile(self, form: StructuredOutputsParams, tenant: str, tried_bytes: int | None) -> CompiledGrammar:
        """Compile the grammar for a structure; arguments as in `constraint`.

        Raises:
            RequestError: llguidance refuses the grammar, or its trial exceeds the limits.
        """
        try:
            grammar = self._grammar_text(form)
        except RequestError:
            raise
        except Exception as error:
            raise refused(str(error) or repr(error)) from None
        num_bytes = self._trials.run(grammar, tenant).num_bytes if tried_bytes is None else tried_bytes
        matcher = self._llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        words = token_mask(matcher, self._num_words)
        if matcher.is_error():
            raise refused(matcher.get_error())
        return CompiledGrammar(matcher, words, max(num_bytes, len(grammar)))

    def _grammar_text(self, form: StructuredOutputsParams) -> str:
        """Return the grammar for a structure in llguidance's JSON format."""
        make: Any = self._llguidance.LLMatcher
        if form.regex is not None:
            return make.grammar_from_regex(form.regex)
        if form.grammar is not None:
            return make.grammar_from_lark(form.grammar)
        if form.choice is not None:
            return make.grammar_from_regex("|".join(f"({_escaped(text)})" for text in form.choice))
        options = whitespace_options(form)
        if has_inexact_numbers(form.schema):
            rules = ["%llguidance {}", *schema_rules("start", form.schema, options), ""]
            return make.grammar_from_lark("\n".join(rules))
        return make.grammar_from_json_schema(dumps(form.schema), None, options)


def _escaped(text: str) -> str:
    """Return a regex that matches a text, in Rust's syntax."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~/]", r"\\\g<0>", text)
