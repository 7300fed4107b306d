"""Grammars: constraints for requests with structured outputs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from jaxserve.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxserve.api.sampling_params import SamplingParams
    from jaxserve.text.structured_output.grammar import GrammarCompiler, TokenConstraint
    from jaxserve.text.tokenizer import Tokenizer


class Grammars:
    """Creates constraints; callable from any thread.

    Args:
        tokenizer: returns the tokenizer, or None if there is none; called for the first constraint.
        vocab_size: vocabulary size of the model.
        eos_ids: tokens that end an output.
        is_lock_step: True if other processes run the same steps; constraints are then rejected.
    """

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer | None],
        vocab_size: int,
        eos_ids: frozenset[int],
        *,
        is_lock_step: bool = False,
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._is_lock_step = is_lock_step
        self._compiler: GrammarCompiler | None = None  # created for the first request that needs it
        self._lock = threading.Lock()

    def constraint(
        self, params: SamplingParams, stop_ids: frozenset[int], tenant: str = "", tried_bytes: int | None = None
    ) -> TokenConstraint | None:
        """Return the constraint of a sample; None if it needs none.

        Args:
            params: sampling parameters.
            stop_ids: ids that end the output.
            tenant: name of the tenant.
            tried_bytes: memory that compiling the grammar took in another process.

        Raises:
            RequestError: the grammar is rejected.
        """
        structure = params.structured_outputs
        if structure is None:
            return None
        if structure.append_forced_tokens and (params.logprobs is not None or params.has_penalties or params.bad_words):
            raise RequestError(
                "append_forced_tokens cannot be combined with logprobs, penalties or bad_words; drop one"
            )
        with self._lock:
            if self._compiler is None:
                self._compiler = self._new_compiler()
        return self._compiler.constraint(
            structure,
            allowed_token_ids=params.allowed_token_ids,
            stop_ids=stop_ids,
            min_tokens=params.min_tokens,
            tenant=tenant,
            tried_bytes=tried_bytes,
        )

    def _new_compiler(self) -> GrammarCompiler:
        """Return a compiler for the model's vocabulary; RequestError if the engine cannot have structured outputs."""
        if self._is_lock_step:
            raise RequestError(
                "structured_outputs need an engine of one process, got one of several in lock-step; drop them, or "
                "serve the model from one process"
            )
        tokenizer = self._tokenizer()
        if tokenizer is None or tokenizer.json_text is None:
            raise RequestError(
                "structured_outputs need a tokenizer with a tokenizer.json, got none; convert the tokenizer, or drop "
                "skip_tokenizer_init"
            )
        if not self._eos_ids:
            raise RequestError(
                "structured_outputs need a model with an end-of-sequence id, got none; give its files one"
            )
        from jaxserve.text.structured_output.grammar import GrammarCompiler  # noqa: PLC0415 - few engines need it

        return GrammarCompiler(tokenizer.json_text(), self._vocab_size, self._eos_ids)
