"""Texts and offsets of tokens: each token's contribution to the text.

A token decoded by itself loses its context: incomplete characters become U+FFFD, and SentencePiece decoders strip the
space before a word. Here a token that leaves a character incomplete adds no text, and the token that completes the
character adds all of it, as in vLLM. So the visible tokens' texts add up to the whole text.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxserve.text.token_stream import ByteStream, WindowStream
from jaxserve.text.tokenizer import kept_parts

if TYPE_CHECKING:
    from jaxserve.api.sampling_params import SamplingParams
    from jaxserve.text.tokenizer import Tokenizer

REPLAYED = 8  # tokens after which a stream no longer depends on the tokens before them
CONTEXT = 4  # visible tokens that give a decoder context


def hidden_ids(tokenizer: Tokenizer, params: SamplingParams) -> frozenset[int]:
    """Return the ids that add no text to an output with these sampling parameters: special tokens that are skipped."""
    hidden: frozenset[int] = tokenizer.special_ids if params.skip_special_tokens else frozenset()
    return hidden - frozenset(params.shown_special_ids) if params.shown_special_ids else hidden


def new_stream(tokenizer: Tokenizer, hidden: frozenset[int], before: Sequence[int] = ()) -> ByteStream | WindowStream:
    """Return an incremental detokenizer for the text after the tokens `before`; `hidden` ids add no text."""
    visible = (i for i in reversed(before) if i not in hidden)
    context = list(itertools.islice(visible, CONTEXT))[::-1]
    if tokenizer.byte_table is not None:
        return ByteStream(tokenizer.byte_table, hidden, context)
    skips = hidden >= tokenizer.special_ids
    return WindowStream(lambda ids: tokenizer.decode(ids, skips), hidden, context)


class TokenTexts:
    """Function from tokens, and the tokens before them, to the text that each would add.

    Args:
        tokenizer: the model's tokenizer.
        hidden: ids that add no text. They still have a text, which log probabilities show.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer, self._hidden = tokenizer, hidden

    def __call__(
        self, prompt: Sequence[int], before: Sequence[int], token_ids: Sequence[int], *, is_end: bool = False
    ) -> list[str]:
        """Return the text that each of `token_ids` adds at the same position.

        Args:
            prompt: tokens before the text.
            before: the text's tokens before the position.
            token_ids: alternatives for the next token.
            is_end: True if the text ends with the first of them; its text then includes an incomplete character.
        """
        tokenizer = self._tokenizer
        if len(before) > REPLAYED:
            prompt, before = [*prompt[-REPLAYED:], *before[:-REPLAYED]], before[-REPLAYED:]
        stream = new_stream(tokenizer, self._hidden, prompt)
        for token_id in before:
            stream.push(token_id)
        texts = [tokenizer.token_text(i) if i in self._hidden else stream.peek(i) for i in token_ids]
        if is_end and token_ids[0] not in self._hidden:
            texts[0] = stream.push(token_ids[0]) + stream.finish()
        return texts


def text_offsets(tokenizer: Tokenizer, text: str, token_ids: Sequence[int], *, keeps_first: bool = False) -> list[int]:
    """Return the index in a text at which each token begins.

    Args:
        tokenizer: the model's tokenizer.
        text: text that was tokenised, or that the tokens were decoded to.
        token_ids: its tokens, including special ones around them; only some of them if it was truncated.
        keeps_first: True if a longer text keeps its first tokens, see `Tokenizer.encode`.
    """
    plain = tokenizer.encode(text, add_special_tokens=False)
    starts = range(len(token_ids) - len(plain) + 1)
    start = next((i for i in starts if list(token_ids[i : i + len(plain)]) == plain), 0)
    added = frozenset(range(len(token_ids))) - frozenset(range(start, start + len(plain)))
    special = frozenset(i for i, token_id in enumerate(token_ids) if token_id in tokenizer.special_ids)
    for hidden in (frozenset[int](), added, special):
        pieces = _pieces(tokenizer, token_ids, hidden)
        if text == "".join(pieces):
            return _begins(pieces)
    known = tokenizer.encode(text)
    if len(token_ids) < len(known):
        offsets = text_offsets(tokenizer, text, known)
        first, last = kept_parts(known, plain, len(token_ids), keeps_first=keeps_first)
        kept = [*offsets[first], *offsets[last]]
        if keeps_first:  # special tokens are at the ends of the kept text
            return [min(offset, offsets[first.stop]) for offset in kept]
        return [max(offset, offsets[last.start]) for offset in kept]
    known, spans = tokenizer.spans(text)
    if known[-1:] == list(token_ids[-1:]):  # a tokenizer that changes texts, such as to lower case
        return _last(token_ids, known, list(itertools.accumulate((begin for begin, _ in spans), max)))
    return [min(begin, len(text)) for begin in _begins(_pieces(tokenizer, token_ids, added))]


def _begins(pieces: Sequence[str]) -> list[int]:
    """Return the index at which each piece begins in the joined text, except the last one, which is no token's."""
    return list(itertools.accumulate(map(len, pieces[:-1]), initial=0))[:-1]


def _last(token_ids: Sequence[int], known: Sequence[int], offsets: Sequence[int]) -> list[int]:
    """Return offsets for `token_ids`, which end with the tokens `known`, whose `offsets` are given.

    Tokens before those get the first offset.
    """
    num_same = 0
    while num_same < min(len(known), len(token_ids)) and known[-1 - num_same] == token_ids[-1 - num_same]:
        num_same += 1
    found = list(offsets[len(offsets) - num_same :]) or [0]
    return [found[0]] * (len(token_ids) - len(found)) + found[-len(token_ids) :]


def _pieces(tokenizer: Tokenizer, token_ids: Sequence[int], hidden: frozenset[int]) -> list[str]:
    """Return the text that each token adds, none for the indices in `hidden`, and finally the remaining text."""
    stream = new_stream(tokenizer, frozenset())
    pieces = ["" if i in hidden else stream.push(token_id) for i, token_id in enumerate(token_ids)]
    return [*pieces, stream.finish()]
