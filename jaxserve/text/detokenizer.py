"""Detokenizer: an output's text while its tokens arrive, up to a stop string."""

from collections.abc import Sequence

from jaxserve.api.outputs import GrowingText
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.text.stop_strings import StopStrings, compile_stop_strings
from jaxserve.text.token_stream import ByteStream, WindowStream
from jaxserve.text.token_texts import hidden_ids, new_stream
from jaxserve.text.tokenizer import Tokenizer


class Detokenizer:
    """Incremental detokenizer and stop string search for one completion.

    Text becomes visible once it is final: incomplete UTF-8 is held back, and so is any text that may begin a stop
    string. The first complete stop string ends the text (the longer one if two end together), wherever token boundaries
    are. A token's cost depends only on its text, not on the earlier text or the number of stop strings.

    Args:
        tokenizer: the model's tokenizer; with None, or with `params.detokenize=False`, there is no text.
        params: sampling parameters; stop, include_stop_str_in_output, min_tokens, skip_special_tokens,
            shown_special_ids and detokenize are used.
        prompt_token_ids: prompt that the text continues, so that the decoder keeps a leading space.

    Attributes:
        visible: final text so far, which only grows.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._stream: ByteStream | WindowStream | None = None
        if tokenizer is not None and params.detokenize:
            self._stream = new_stream(tokenizer, hidden_ids(tokenizer, params), prompt_token_ids)
        self._stops = compile_stop_strings(tuple(params.stop)) if params.stop else None
        self._state = StopStrings.START
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self.visible = GrowingText()
        self._held = ""  # suffix that may begin a stop string
        self._found: str | None = None
        self._finished = False

    def push(self, token_ids: Sequence[int]) -> str | None:
        """Append tokens to the text; return the stop string that ends it, or None so far. Later tokens have no effect.

        Like `stop_token_ids`, stop strings count only after `min_tokens` tokens.
        """
        for token_id in token_ids:
            if self._stream is None or self._finished:
                break
            self._num_tokens += 1
            self._extend(self._stream.push(token_id), self._num_tokens > self._min_tokens)
        return self._found

    def finish(self) -> str | None:
        """End the text, and make the held part visible; return the stop string that ends it, or None."""
        if self._stream is not None and not self._finished:
            self._extend(self._stream.finish(), self._num_tokens > self._min_tokens)
            self.visible.append(self._held)
            self._finished = True
        return self._found

    def _extend(self, piece: str, may_stop: bool) -> None:
        """Append text, and hold back the part that may begin a stop string; stop strings count if `may_stop`."""
        if self._stops is None or not piece:
            self.visible.append(piece)
            return
        self._state, num_read, self._found = self._stops.scan(self._state, piece, may_stop)
        text = self._held + piece[:num_read]
        if self._found is not None:
            self.visible.append(text if self._keep_stop else text.removesuffix(self._found))
            self._held, self._finished = "", True
            return
        split = len(text) - self._stops.num_held(self._state)
        self.visible.append(text[:split])
        self._held = text[split:]
