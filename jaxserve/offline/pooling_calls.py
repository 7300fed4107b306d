"""PoolingCalls: the calls of an LLM that return vectors, labels and scores."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jaxserve.api.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
    pooling_output,
)
from jaxserve.api.pooling_params import CLASSIFY, EMBED, PoolingParams
from jaxserve.api.vllm_options import GENERATE_ARGUMENTS, check_arguments
from jaxserve.assembly.engine import Engine
from jaxserve.core.prompt import Prompt
from jaxserve.errors import ConfigError, RequestError
from jaxserve.offline import scoring
from jaxserve.offline.offline_calls import Adapters, Calls, ProgressBar, as_list, lora_requests, per_prompt
from jaxserve.text.tokenizer import Tokenizer


class PoolingCalls:
    """Calls of an LLM whose engine pools, or generates with a head that scores.

    Attributes:
        engine: the engine.
    """

    engine: Engine
    _calls: Calls

    def encode(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: PoolingParams | Iterable[PoolingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | ProgressBar = True,
        pooling_task: str | None = None,
        lora_request: Adapters = None,
        **vllm_arguments: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return one vector per prompt, in order: the result of `embed` or `classify`, as an array.

        Args:
            prompts: see `generate`.
            pooling_params: one for all, or one per prompt.
            truncate_prompt_tokens: number of tokens to keep per prompt, as in PoolingParams, whose own value must not
                differ.
            use_tqdm: see `generate`.
            pooling_task: "embed" or "classify", as in PoolingParams; None for the model's own.
            lora_request: see `generate`.
            vllm_arguments: see `generate`.

        Raises:
            RequestError: the engine generates text, or a prompt or its parameters cannot be served.
        """
        check_arguments(vllm_arguments, GENERATE_ARGUMENTS)
        many = as_list(prompts)
        given = PoolingParams() if pooling_params is None else pooling_params
        params = per_prompt(given, PoolingParams, "pooling_params", len(many))
        common: dict[str, Any] = {"task": pooling_task, "truncate_prompt_tokens": truncate_prompt_tokens}
        common = {name: value for name, value in common.items() if value is not None}
        for name, value in common.items():
            if others := [own for p in params if (own := getattr(p, name)) not in (None, value)]:
                raise RequestError(f"{name} of pooling_params must be None or the call's, {value!r}, got {others[0]!r}")
        params = [dataclasses.replace(p, **common) for p in params]
        outputs = self._calls.run(many, params, use_tqdm, (), lora_requests(lora_request, len(many)))
        return [pooling_output(output) for output in outputs]

    def embed(self, prompts: Prompt | Iterable[Prompt], **options: Any) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt; see `encode` for the options."""
        return [
            output.converted(EmbeddingRequestOutput, EmbeddingOutput(output.outputs.data.tolist()))
            for output in self.encode(prompts, pooling_task=EMBED, **options)
        ]

    def classify(self, prompts: Prompt | Iterable[Prompt], **options: Any) -> list[ClassificationRequestOutput]:
        """Return the label probabilities of each prompt; see `encode` for the options."""
        return [
            output.converted(ClassificationRequestOutput, ClassificationOutput(output.outputs.data.tolist()))
            for output in self.encode(prompts, pooling_task=CLASSIFY, **options)
        ]

    def reward(self, prompts: Prompt | Iterable[Prompt], **options: Any) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the output of the head `score` for each prompt's last token, without an activation.

        `options` as in `encode`, without `pooling_params`. Heads that reward every token are not supported.
        """
        params = PoolingParams(use_activation=False)
        return self.encode(prompts, params, pooling_task=CLASSIFY, **options)

    def score(
        self, data_1: Prompt | Iterable[Prompt], data_2: Prompt | Iterable[Prompt], **options: Any
    ) -> list[ScoringRequestOutput]:
        """Return the similarity of the two prompts in each pair.

        It is the cosine of their embeddings; with a one-label classification head, it is the head's output for both as
        one prompt, joined as the tokenizer joins a text pair.

        Args:
            data_1: one prompt for all, or as many as in `data_2`.
            data_2: second prompts.
            options: see `encode`.

        Raises:
            RequestError: the numbers do not match, or the engine cannot score.
        """
        pairs = scoring.pairs(as_list(data_1), as_list(data_2))
        pooler = self.engine.arch.pooler
        if pooler is not None and pooler.num_labels:
            prompts = scoring.joined(pairs, pooler, require_tokenizer(self.engine))
            return scoring.head_scores(self.encode(prompts, pooling_task=CLASSIFY, **options))
        both = self.encode([prompt for pair in pairs for prompt in pair], pooling_task=EMBED, **options)
        return scoring.embedding_scores(both)


def require_tokenizer(engine: Engine) -> Tokenizer:
    """Return the engine's tokenizer; ConfigError if it has none."""
    if engine.tokenizer is None:
        raise ConfigError("there is no tokenizer; drop skip_tokenizer_init")
    return engine.tokenizer
