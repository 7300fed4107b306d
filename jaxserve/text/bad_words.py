"""Bad words as sequences of token ids. Host only."""

from collections.abc import Callable, Sequence

from jaxserve.errors import RequestError, brief
from jaxserve.request import TokenIds
from jaxserve.sampling_params import MAX_BAD_SEQUENCE_TOKENS, MAX_BAD_SEQUENCES


def encode_bad_words(words: Sequence[str], encode: Callable[[str], TokenIds]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word at the start of a text and, as in vLLM, after a space.

    The second sequence is dropped if it differs in length or has the same first token: if the space is a token by
    itself, or disappears, the first sequence matches already.

    Args:
        words: texts that are not blank.
        encode: function from a text to its token ids without special tokens.

    Raises:
        RequestError: a word is too long, or there are too many words.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, spaced = (tuple(encode(prefix + word.lstrip())) for prefix in ("", " "))
        if not 0 < len(plain) <= MAX_BAD_SEQUENCE_TOKENS:
            raise RequestError(
                f"a bad word must be 1 to {MAX_BAD_SEQUENCE_TOKENS} tokens, got {brief(word)} of {len(plain)}; "
                f"give a part of it that does not occur elsewhere"
            )
        sequences[plain] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences[spaced] = None
    if len(sequences) > MAX_BAD_SEQUENCES:
        raise RequestError(
            f"bad_words must be at most {MAX_BAD_SEQUENCES} sequences of tokens, got {len(sequences)} from "
            f"{len(words)} words, with and without a space before them; keep those that matter"
        )
    return tuple(sequences)
