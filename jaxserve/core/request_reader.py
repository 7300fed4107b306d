"""RequestReader: checks user requests and converts them into scheduler requests."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jaxserve.api.config import EngineConfig
from jaxserve.api.lora_request import LoRARequest
from jaxserve.api.pooling_params import PoolingParams
from jaxserve.api.reuse_hint import ReuseHint
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.token_ids import TokenIds
from jaxserve.core.adapter_names import AdapterNames
from jaxserve.core.grammars import Grammars
from jaxserve.core.growing_outputs import RequestGroup
from jaxserve.core.prompt import (
    USER_SALT,
    Prompt,
    check_bound,
    check_len,
    outside_vocabulary,
    prompt_limit,
    read_prompt,
)
from jaxserve.errors import RequestError, brief
from jaxserve.images.inputs import ImageInputs
from jaxserve.images.positions import axis_positions
from jaxserve.images.prepared import ExpandedPrompt, ImageSpan
from jaxserve.images.reader import ImageReader
from jaxserve.scheduling.request import Request
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.text.bad_words import encode_bad_words
from jaxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxserve.models.arch import ArchConfig

logger = logging.getLogger(__name__)

LARGEST_PRIORITY = 2**31 - 1


class RequestReader:
    """Checks requests, and prepares their prompts, seeds and constraints; callable from any thread.

    Args:
        config: model and options.
        schedule: resolved sizes of steps and page pool.
        tokenizer: None if prompts must be token ids.
        arch: sizes of the model.
        eos_ids: ids that end an output.
        check_fits: raises RequestError for a request that could not finish even by itself.
        is_lock_step: True if other processes run the same steps.
        adapters: LoRA adapters by name.
        images: reader of images in prompts; None if prompts can have none.

    Attributes:
        grammars: constraints for structured outputs.
        images: reader of images in prompts; None if prompts can have none.
    """

    def __init__(
        self,
        config: EngineConfig,
        schedule: ScheduleConfig,
        tokenizer: Tokenizer | None,
        arch: ArchConfig,
        *,
        eos_ids: frozenset[int],
        check_fits: Callable[[Request], None],
        is_lock_step: bool,
        adapters: AdapterNames,
        images: ImageReader | None = None,
    ) -> None:
        self._config, self._schedule, self._tokenizer, self._arch = config, schedule, tokenizer, arch
        self.eos_ids, self._check_fits, self._pooler = eos_ids, check_fits, arch.pooler
        self.grammars = Grammars(lambda: tokenizer, arch.vocab_size, eos_ids, is_lock_step=is_lock_step)
        self._adapters, self.images = adapters, images
        self._seeds = random.Random(config.seed)
        self._arrivals = itertools.count()
        self._has_warned_of_length = False

    def read(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        cache_salt: str | None = None,
        tenant: str = "",
        priority: int = 0,
        *,
        lora_request: LoRARequest | None = None,
        shares_last_page: bool = False,
        sends_prompt: bool = False,
        takes_prompt: bool = False,
        reuse: ReuseHint | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> RequestGroup:
        """Check the parameters and read the prompt of a request, without queueing it.

        Args:
            request_id: id of the request.
            params: parameters of the type that the model needs.
            cache_salt: only requests with the same salt share cached pages.
            tenant: name of the tenant; tenants get equal service.
            priority: class; lower numbers go first.
            lora_request: LoRA adapter; None for the base model.
            shares_last_page: see `Request`.
            sends_prompt: see `Request`.
            takes_prompt: see `Request`.
            reuse: when the client expects to use the prompt again.
            images: prepared images of a prompt whose token ids are expanded.

        Raises:
            RequestError: the request cannot be served.
        """
        params, pooling = self._read_params(params)
        limit = prompt_limit(params, self._schedule.max_model_len, self._schedule.max_total_tokens)
        if limit is None:
            self.check_text(prompt.get("prompt") if isinstance(prompt, Mapping) else prompt)
        keeps_first = params.truncation_side == "right"
        inputs = self._image_inputs(prompt)
        if limit is not None and (inputs.images or images):
            raise _no_truncation(limit)
        rewrite = self.images.placeholders.in_text if self.images is not None and inputs.images else None
        text, token_ids, salt = read_prompt(
            prompt, cache_salt, self._tokenizer, limit, keeps_first=keeps_first, rewrite=rewrite
        )
        token_ids, spans = self._expanded(token_ids, inputs, salt, tuple(images))
        if spans and limit is not None:
            raise _no_truncation(limit)
        self._check(token_ids, params)
        self._check_priority(priority)
        hint = ReuseHint.check(prompt.get("reuse", reuse) if isinstance(prompt, Mapping) else reuse)
        axes = self._axes(len(token_ids), spans)
        requests = self._expand(request_id, token_ids, params, salt, tenant, priority)
        adapter, start = self._adapters.resolve(lora_request, token_ids)
        for request in requests:
            request.shares_last_page = shares_last_page
            request.sends_prompt, request.takes_prompt = sends_prompt, takes_prompt
            request.adapter, request.adapter_start = adapter, start
            request.reuse = hint
            request.images, request.axes = spans, axes
        self._check_images(spans)
        _check_some_allowed(requests[0])
        self._check_fits(requests[0])  # its siblings then fit as well, on any replica
        group = RequestGroup(request_id, text, requests, self._tokenizer, time.monotonic, pooling)
        self._adapters.hold(adapter, group)
        return group

    def _image_inputs(self, prompt: Prompt) -> ImageInputs:
        """Return a prompt's images as they were given; RequestError if the engine takes none."""
        inputs = ImageInputs.from_prompt(prompt)
        if inputs.images and self.images is None:
            raise RequestError(
                f"a prompt with multi_modal_data needs a model that takes images, got {self._arch.architecture}, a "
                "preprocessor_config.json, and a limit_mm_per_prompt that allows them; drop it"
            )
        return inputs

    def _expanded(
        self, token_ids: TokenIds, inputs: ImageInputs, salt: str | None, images: tuple[ImageSpan, ...]
    ) -> tuple[TokenIds, tuple[ImageSpan, ...]]:
        """Return a prompt with all tokens of its images, and these; `images` are those of one that has them already."""
        if isinstance(token_ids, ExpandedPrompt):
            return [*token_ids], token_ids.images  # whoever keeps the ids must not keep the images
        if images or self.images is None:
            return token_ids, images
        return self.images.expand(token_ids, inputs, salt or "", self.check_len)

    def _axes(self, num_tokens: int, spans: Sequence[ImageSpan]) -> NDArray[np.int32] | None:
        """Return a prompt's positions for M-RoPE; None if they only count its tokens."""
        has_axes = self._arch.images is not None and self._arch.images.has_axes
        return axis_positions(num_tokens, spans)[0] if has_axes and spans else None

    def _read_params(self, params: SamplingParams | PoolingParams) -> tuple[SamplingParams, PoolingParams | None]:
        """Check the parameters again, since the caller may have changed them.

        Returns:
            A copy as sampling parameters; and a copy as pooling parameters, None unless the model pools.
        """
        if isinstance(params, PoolingParams):
            if self._pooler is None:
                raise RequestError(
                    "this engine generates text, and a vector was asked for; "
                    "start one with runner='pooling', which makes embeddings of any model"
                )
            params = dataclasses.replace(params)
            self._pooler.check(params, self._arch.hidden_size)
            return params.sampling_params(), params
        if self._pooler is not None:
            raise RequestError(
                f"this engine pools ({self._pooler.task}), and text was asked for; use its {self._pooler.task}, "
                "or start one with runner='generate' for a model with a matrix of logits"
            )
        return params.clone(), None

    def _check(self, token_ids: TokenIds, params: SamplingParams) -> None:
        """Raise RequestError unless prompt length, ids and parameters suit the model and the engine's options."""
        vocab = self._arch.vocab_size
        if not token_ids:
            raise RequestError("a prompt must have at least 1 token, got 0; begin it with any text or token")
        self.check_len(len(token_ids))
        named = {
            "prompt": token_ids,
            "stop_token_ids": params.stop_token_ids or (),
            "logit_bias": params.logit_bias or (),
            "allowed_token_ids": params.allowed_token_ids or (),
        }
        for name, ids in named.items():
            if ids and not 0 <= min(ids) <= max(ids) < vocab:
                raise RequestError(outside_vocabulary(name, ids, vocab))
        self._check_logprobs(params)
        if params.bad_words and self._tokenizer is None:
            raise RequestError("bad_words need a tokenizer; use logit_bias, or drop skip_tokenizer_init")
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids, or drop skip_tokenizer_init")

    def check_text(self, prompt: object) -> None:
        """Raise RequestError if `prompt` is a text whose length already proves that it has too many tokens.

        Long texts are thus refused without being encoded.
        """
        if self._tokenizer is not None and isinstance(prompt, str):
            check_bound(prompt, self._tokenizer, self._schedule, self._advice_on_length())

    def check_len(self, num_tokens: int) -> None:
        """Raise RequestError for a prompt with too many tokens."""
        check_len(num_tokens, self._schedule, self._advice_on_length())

    def _check_logprobs(self, params: SamplingParams) -> None:
        """Raise RequestError if more log probabilities are requested than the engine's max_logprobs; -1 means all."""
        limit, vocab = self._config.max_logprobs, self._arch.vocab_size
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name) or 0
            if (vocab if wanted == -1 else wanted) > (vocab if limit == -1 else limit):
                raise RequestError(
                    f"{name} must be at most max_logprobs of the engine, or the size of the vocabulary, got {wanted} "
                    f"with max_logprobs {limit} and {vocab} tokens; start the engine with max_logprobs={wanted}"
                )

    def _check_images(self, images: Sequence[ImageSpan]) -> None:
        """Raise RequestError if a prompt has images that the model cannot take."""
        if not images:
            return
        if self._arch.images is None:
            raise RequestError(f"this engine takes text only, got {len(images)} images; drop multi_modal_data")
        for span in images:
            if (reason := self._arch.images.tower.misfit(span.image)) is not None:
                raise RequestError(reason)

    def _check_priority(self, priority: object) -> None:
        """Raise RequestError for a priority that is no 32-bit integer, or that the engine's policy ignores."""
        if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > LARGEST_PRIORITY:
            raise RequestError(
                f"priority must be an integer of at most {LARGEST_PRIORITY} either way, got {priority!r}"
            )
        if priority and self._config.scheduling_policy != "priority":
            raise RequestError(
                f"priority needs an engine with scheduling_policy='priority', got {priority} with "
                f"{self._config.scheduling_policy!r}; start it with that, or drop priority"
            )

    def _advice_on_length(self) -> str:
        """Return the advice to raise max_model_len, as the end of a clause; empty if the model allows no more."""
        limit = self._arch.max_position
        return f" or raise max_model_len, {limit} at most" if self._schedule.max_model_len < limit else ""

    def _expand(
        self,
        request_id: str,
        token_ids: TokenIds,
        params: SamplingParams,
        salt: str | None,
        tenant: str,
        priority: int,
    ) -> list[Request]:
        """Return the `n` scheduler requests for a user request; all but the first find the prompt's pages cached."""
        seed, arrival = params.seed if params.seed is not None else self._seeds.getrandbits(63), next(self._arrivals)
        limit = self._schedule.max_total_tokens
        if params.max_tokens is not None:
            wanted = len(token_ids) + params.max_tokens
            if wanted > limit and self._pooler is None:
                self._log_length_limit(len(token_ids), params.max_tokens)
            limit = min(limit, wanted)
        else:  # as many tokens as fit; the last one is never computed, and needs no page
            num_fitting = self._schedule.kv_groups.max_tokens(self._schedule.num_shard_pages)
            limit = limit if num_fitting is None else min(limit, num_fitting + 1)
        structure = params.structured_outputs
        eos = frozenset() if params.ignore_eos and structure is None else self.eos_ids
        stop_ids = eos | frozenset(params.stop_token_ids or ())
        bad_sequences: tuple[tuple[int, ...], ...] = ()
        if params.bad_words and self._tokenizer:
            encode = partial(self._tokenizer.encode, add_special_tokens=False)
            bad_sequences = encode_bad_words(params.bad_words, encode, self._tokenizer.bound)
        reads_cache = self._pooler is None or self._pooler.reads_prefix_cache
        namespace = f"{USER_SALT}{salt or ''}" if self._config.enable_prefix_caching else f"private:{arrival}"
        return [
            Request(
                request_id=f"{request_id}#{index}",
                prompt_token_ids=token_ids,
                params=params,
                seed=seed + index,
                max_total_tokens=limit,
                stop_ids=stop_ids,
                bad_sequences=bad_sequences,
                salt=namespace.encode(errors="surrogatepass"),
                tenant=tenant,
                priority=priority,
                arrival_s=time.monotonic(),
                read_prefix_cache=reads_cache and (index > 0 or params.prompt_logprobs is None),
                waits_for_tokens=structure is not None,
                may_be_extended=structure is not None and structure.append_forced_tokens,
                constraint=self.grammars.constraint(params, stop_ids, tenant),
                arrival=arrival,
            )
            for index in range(params.n)
        ]

    def _log_length_limit(self, prompt_len: int, max_tokens: int) -> None:
        """Log that an output may end at max_model_len; only the first time as a warning.

        Args:
            prompt_len: tokens in the prompt.
            max_tokens: requested maximum of output tokens, which the limit exceeds.
        """
        limit, is_first = self._schedule.max_model_len, not self._has_warned_of_length
        self._has_warned_of_length = True
        logger.log(
            logging.WARNING if is_first else logging.INFO,
            "a prompt of %d tokens and max_tokens=%d exceed max_model_len=%d: the output ends after %d tokens at most, "
            "with finish_reason 'length'%s",
            *(prompt_len, max_tokens, limit, limit - prompt_len),
            f"; lower max_tokens{self._advice_on_length()}. Further requests are not warned of" if is_first else "",
        )


def _no_truncation(limit: int) -> RequestError:
    """Return the error for a prompt with images that is to be cut to `limit` tokens."""
    return RequestError(f"truncate_prompt_tokens must be None for a prompt with images, got a limit of {limit}")


def _check_some_allowed(request: Request) -> None:
    """Raise RequestError if stop ids and bad words can forbid all of a request's `allowed_token_ids` together."""
    p = request.params
    if p.allowed_token_ids is None:
        return
    forbidden = {sequence[-1] for sequence in request.bad_sequences} | (request.stop_ids if p.min_tokens else set())
    if forbidden.issuperset(p.allowed_token_ids):
        raise RequestError(
            "allowed_token_ids must have an id that neither ends the output, where min_tokens forbids that, nor a bad "
            f"word, got {brief(p.allowed_token_ids)}; allow more"
        )
