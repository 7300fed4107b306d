"""Beam search, with vLLM's names and transformers' beams.

Each step serves every beam as a one-token request with log probabilities for the most likely tokens. A beam's request
finds all its parent's tokens in the pool: whole pages are shared, and the partly filled last page is copied when the
request starts (`Request.shares_last_page`). A step thus computes one token per beam.

The beams are those of transformers' `generate(num_beams=beam_width, do_sample=False, early_stopping=False)`. A step
considers the best (1 + number of end-of-sequence ids) * beam_width continuations among all running beams, at least
twice beam_width. If a continuation among the first beam_width ends, it is finished with the score

    sum of log probabilities / generated tokens ** length_penalty

including the end-of-sequence token; the best unfinished ones keep running. The search ends after `max_tokens`, which
ends all beams, or when beam_width have finished and the best running beam, scored as if it ended now, is no better than
the worst of them. vLLM itself finishes all beams that end, includes the prompt in scores, and always continues to
`max_tokens`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, no_type_check

from jaxserve.api.lora_request import LoRARequest
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.schema import SWITCH, Schema, integer, number, one_of
from jaxserve.errors import RequestError, brief
from jaxserve.images.prepared import ExpandedPrompt
from jaxserve.offline.offline_calls import as_loaded, progress_bar

if TYPE_CHECKING:
    from jaxserve.api.outputs import Logprob, RequestOutput
    from jaxserve.api.token_ids import TokenIds
    from jaxserve.assembly.engine import Engine
    from jaxserve.core.prompt import Prompt
    from jaxserve.offline.offline_calls import Calls, ProgressBar

MAX_BEAM_WIDTH = 256
MAX_LENGTH_PENALTY = 32  # the power of any length is a finite float


@no_type_check  # tests pass wrong types, which __post_init__ must reject with a RequestError
@dataclass
class BeamSearchParams:
    """Beam search parameters, with vLLM's names.

    Attributes:
        beam_width: number of beams and returned sequences.
        max_tokens: maximum tokens to generate.
        ignore_eos: continue after the end-of-sequence token.
        temperature: must be 0: beams are never sampled.
        length_penalty: scores are divided by the length to this power, from -32 to 32; values above 0 favour longer
            sequences.

    Raises:
        RequestError: a value is out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        _SCHEMA.check(self)


_SCHEMA = Schema(
    RequestError,
    BeamSearchParams,
    {
        "beam_width": integer(1, MAX_BEAM_WIDTH),
        "max_tokens": integer(1, 2**31 - 1),
        "ignore_eos": SWITCH,
        "temperature": one_of((0,), words="0, as beams are not sampled"),
        "length_penalty": number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    },
)
_CONCURRENCY_LIMIT = integer(1, words="a positive integer or None").optional()


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam.

    Attributes:
        orig_prompt: the prompt.
        tokens: prompt and generated token ids.
        logprobs: for each generated token, log probabilities for the tokens considered.
        cum_logprob: total log probability over generated tokens.
        text: decoded tokens; None without a tokenizer, and before the end.
        finish_reason: "stop" or "length" after its end.
        stop_reason: end-of-sequence token that ended it.
    """

    orig_prompt: Prompt
    tokens: TokenIds
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """Beam search result.

    Attributes:
        sequences: the best `beam_width` beams, the best first.
    """

    sequences: list[BeamSearchSequence]


class _Search:
    """Beam search for one prompt's continuations.

    Args:
        prompt: the prompt, as given.
        token_ids: prompt tokens.
        params: search parameters.
        eos_ids: token ids that end a beam.
        max_steps: maximum tokens that fit after the prompt.
        lora_request: LoRA adapter of the prompt; None for the base model.

    Attributes:
        running: unfinished beams, the best first; empty after the search.
        finished: finished beams with their scores, the best first.
        cache_salt: the prompt's cache salt.
        lora_request: the prompt's LoRA adapter.
        images: the prompt's images.
    """

    def __init__(
        self,
        prompt: Prompt,
        token_ids: ExpandedPrompt,
        params: BeamSearchParams,
        eos_ids: frozenset[int],
        max_steps: int,
        lora_request: LoRARequest | None = None,
    ) -> None:
        self.lora_request, self.images = lora_request, token_ids.images
        self.running = [BeamSearchSequence(prompt, list(token_ids))]
        self.cache_salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        self.finished: list[tuple[float, BeamSearchSequence]] = []
        self._width, self._length_penalty = params.beam_width, params.length_penalty
        self._eos_ids, self._max_steps = eos_ids, min(params.max_tokens, max_steps)
        self._num_steps = 0

    def advance(self, tables: Sequence[dict[int, Logprob]]) -> None:
        """Extend every running beam by one token, and finish some; `tables` has each beam's next log probabilities."""
        self._num_steps += 1
        is_last = self._num_steps == self._max_steps
        candidates = [
            (beam.cum_logprob + entry.logprob, index, token_id)
            for index, (beam, table) in enumerate(zip(self.running, tables, strict=True))
            for token_id, entry in table.items()
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        continuing: list[BeamSearchSequence] = []
        for rank, (cum_logprob, index, token_id) in enumerate(candidates[: num_candidates(self._width, self._eos_ids)]):
            parent, has_stopped = self.running[index], token_id in self._eos_ids
            if has_stopped or is_last:
                if rank >= self._width:
                    continue
            elif len(continuing) == self._width:
                continue
            beam = BeamSearchSequence(
                parent.orig_prompt, [*parent.tokens, token_id], [*parent.logprobs, tables[index]], cum_logprob
            )
            if has_stopped or is_last:
                beam.finish_reason = "stop" if has_stopped else "length"
                beam.stop_reason = token_id if has_stopped else None
                self.finished.append((self._score(beam), beam))
            else:
                continuing.append(beam)
        self.finished.sort(key=lambda scored: -scored[0])
        del self.finished[self._width :]
        is_full = len(self.finished) == self._width
        is_over = is_last or not continuing or (is_full and self._score(continuing[0]) <= self.finished[-1][0])
        self.running = [] if is_over else continuing

    def _score(self, beam: BeamSearchSequence) -> float:
        """Return the score that a beam has if it ends at the current step."""
        score: float = beam.cum_logprob / self._num_steps**self._length_penalty
        return score


def num_candidates(beam_width: int, eos_ids: frozenset[int]) -> int:
    """Return the number of best continuations that a step considers: enough for `beam_width` unfinished ones."""
    return max(2, 1 + len(eos_ids)) * beam_width


def search(
    engine: Engine,
    calls: Calls,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    concurrency_limit: int | None = None,
    use_tqdm: bool | ProgressBar = False,
    adapters: Sequence[LoRARequest | None] = (),
) -> list[BeamSearchOutput]:
    """Return the best continuations for each prompt; see `LLM.beam_search` for the arguments.

    Raises:
        RequestError: a prompt or the parameters cannot be served; no prompt is started.
    """
    if not isinstance(params, BeamSearchParams):
        raise RequestError(f"params must be BeamSearchParams(...), got {brief(params)}")
    for name in ("kv_eviction", "sparse_attention"):
        if getattr(engine.config, name) is not None:
            raise RequestError(
                f"beam_search cannot be combined with {name}: each step computes a beam's tokens as a prompt, which "
                f"sees all keys and values; drop {name}, or call generate"
            )
    _CONCURRENCY_LIMIT.read("concurrency_limit", concurrency_limit, RequestError)
    params = dataclasses.replace(params)  # rechecked, because the caller may have changed them
    eos_ids = frozenset[int]() if params.ignore_eos else engine.reader.eos_ids
    num_logprobs, most = num_candidates(params.beam_width, eos_ids), engine.config.max_logprobs
    if 0 <= most < num_logprobs:
        raise RequestError(
            f"beam_width {params.beam_width} needs {num_logprobs} log probabilities per token, with "
            f"{len(eos_ids)} end-of-sequence ids, got max_logprobs {most}; start the engine with "
            f"max_logprobs={num_logprobs}, or lower beam_width"
        )
    num_logprobs = min(num_logprobs, engine.arch.vocab_size)
    one_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=num_logprobs, detokenize=False)
    whole = one_token.clone({"max_tokens": params.max_tokens})  # a beam needs the pages that such a request gets
    searches = []
    groups = calls.prepare(prompts, [whole] * len(prompts), (), adapters)
    for prompt, group, adapter in zip(prompts, groups, adapters or [None] * len(prompts), strict=True):
        request = group.requests[0]
        max_steps = request.max_total_tokens - request.num_prompt_tokens
        prompt_ids = ExpandedPrompt(request.prompt_token_ids, request.images)
        searches.append(_Search(prompt, prompt_ids, params, eos_ids, max_steps, as_loaded(adapter)))
    some = concurrency_limit or max(len(searches), 1)
    with progress_bar(use_tqdm, total=len(searches), desc="Beam search", unit="prompt") as bar:
        for first in range(0, len(searches), some):
            _run(calls, searches[first : first + some], one_token, bar.update)
    return [BeamSearchOutput([_with_text(engine, beam) for _, beam in each.finished]) for each in searches]


def _run(calls: Calls, searches: Sequence[_Search], one_token: SamplingParams, ended: Callable[[int], Any]) -> None:
    """Run several searches to their ends, simultaneously; call `ended` after each step with the number that ended."""
    while running := [each for each in searches if each.running]:
        beams: list[Prompt] = [
            {"prompt_token_ids": ExpandedPrompt(beam.tokens, each.images), "cache_salt": each.cache_salt}
            for each in running
            for beam in each.running
        ]
        adapters = [each.lora_request for each in running for _ in each.running]
        params = [one_token] * len(beams)
        outputs = iter(calls.run(beams, params, False, (), adapters, shares_last_page=True))
        for each in running:
            each.advance([_next_logprobs(next(outputs)) for _ in each.running])
        ended(sum(not each.running for each in running))


def _next_logprobs(output: RequestOutput) -> dict[int, Logprob]:
    """Return the log probabilities, by token id, for the token after a beam."""
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None, "a beam asks for log probabilities"
    return logprobs[0]


def _with_text(engine: Engine, beam: BeamSearchSequence) -> BeamSearchSequence:
    """Set a beam's decoded text, if the engine has a tokenizer, and return the beam."""
    if engine.tokenizer is not None:
        beam.text = engine.tokenizer.decode(beam.tokens)
    return beam
