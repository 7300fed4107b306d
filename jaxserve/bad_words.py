"""Bad words as sequences of token ids. Host only."""

from collections.abc import Callable, Sequence

from jaxserve.errors import RequestError
from jaxserve.request import MAX_BAD_SEQUENCE_TOKENS, MAX_BAD_SEQUENCES, TokenIds, brief


def encode_bad_words(words: Sequence[str], encode: Callable[[str], TokenIds]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids that each word is at the beginning of a text and, as vLLM has it, behind a space.

    The latter where they are as many and begin with another: where the space is a token by itself, or vanishes, the
    word is found by the first.

    Args:
        words: texts that are not blank.
        encode: text -> its token ids, without special ones around it.

    Raises:
        RequestError: a word is too long, or they are too many.
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
