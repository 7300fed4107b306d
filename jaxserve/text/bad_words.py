"""Bad words as sequences of token ids. Host only."""

from collections.abc import Callable, Sequence

from jaxserve.api.sampling_params import MAX_BAD_SEQUENCE_TOKENS, MAX_BAD_SEQUENCES
from jaxserve.api.token_ids import TokenIds
from jaxserve.errors import RequestError, brief
from jaxserve.text.token_bound import NO_BOUND, TokenBound

MAX_CHARS = 4096  # maximum characters per word, for tokenizers without a bound


def encode_bad_words(
    words: Sequence[str], encode: Callable[[str], TokenIds], bound: TokenBound = NO_BOUND
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, at the start of a text and, as in vLLM, after a space.

    The second sequence is dropped if it differs in length or has the same first token: if the space is a token by
    itself, or disappears, the first sequence matches already.

    Args:
        words: non-blank texts.
        encode: function from a text to its token ids without special tokens.
        bound: lower bound on the number of tokens in a text, by which long words are refused before they are encoded.

    Raises:
        RequestError: a word is too long, or there are too many words.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        num_tokens = bound.num_tokens(word.lstrip())
        if num_tokens > MAX_BAD_SEQUENCE_TOKENS:
            raise _wrong_length(word, f"at least {num_tokens}")
        if len(word) > MAX_CHARS:
            raise RequestError(f"a bad word must be at most {MAX_CHARS} characters, got {len(word)}; give a part of it")
        plain, spaced = (tuple(encode(prefix + word.lstrip())) for prefix in ("", " "))
        if not 0 < len(plain) <= MAX_BAD_SEQUENCE_TOKENS:
            raise _wrong_length(word, str(len(plain)))
        sequences[plain] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences[spaced] = None
    if len(sequences) > MAX_BAD_SEQUENCES:
        raise RequestError(
            f"bad_words must be at most {MAX_BAD_SEQUENCES} sequences of tokens, got {len(sequences)} from "
            f"{len(words)} words, with and without a space before them; keep those that matter"
        )
    return tuple(sequences)


def _wrong_length(word: str, num_tokens: str) -> RequestError:
    """Return the error for a word with the wrong number of tokens."""
    return RequestError(
        f"a bad word must be 1 to {MAX_BAD_SEQUENCE_TOKENS} tokens, got {brief(word)} of {num_tokens}; "
        "give a part of it that does not occur elsewhere"
    )
