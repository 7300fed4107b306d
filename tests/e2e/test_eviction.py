"""Budgets for keys and values: output tokens see the first and the latest pages, as transformers computes them."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers

from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.sparsity_config import EvictionConfig
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.errors import ConfigError, RequestError
from jaxserve.offline import beam_search
from jaxserve.offline.llm import LLM
from jaxserve.scheduling.kv_cache.sparsity import Compaction, Sparsity, Window
from tests import oracles
from tests.e2e.sizes import SIZES
from tests.e2e.workloads import assert_same, generate, tokens
from tests.oracles import has_torch, torch

Start = Callable[..., DrivenEngine]

PAGE_SIZE, NUM_OUTPUT = SIZES["page_size"], 22
STREAMING = EvictionConfig("streaming_llm", 4 * PAGE_SIZE, sink_tokens=2)
WHOLE, SUFFICIENT = (EvictionConfig("streaming_llm", budget) for budget in (SIZES["max_model_len"], 56))
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=0)
PREFIX = tokens(20, "prefix")
PROMPTS = [PREFIX + tokens(count, count) for count in (1, 4, 13)] + [tokens(7, "short")]


def kept_of_prompt(model: transformers.PreTrainedModel, prompt: Sequence[int], sparsity: Compaction) -> list[int]:
    """Return the prompt tokens that SnapKV or H2O keep, by the mean of transformers' weights over layers and heads."""
    num_tokens = len(prompt)
    num_kept = num_tokens - PAGE_SIZE * sparsity.num_hidden(num_tokens, num_tokens)
    with torch.no_grad():
        layers = model(torch.tensor([prompt]), output_attentions=True).attentions
    weights = np.mean([layer[0].double().numpy() for layer in layers], axis=(0, 1))
    num_recent = num_kept // 2
    if sparsity.observes_all:
        scores = weights.sum(0) / np.arange(num_tokens, 0, -1)
    else:
        num_recent = sparsity.window
        scores = weights[-num_recent:].mean(0)
        scores[-num_recent:] = 0
        scores = np.convolve(scores, np.full(5, 0.2), "same")
    scores[-num_recent:] = np.inf
    return sorted(np.argsort(-scores, kind="stable")[:num_kept].tolist())


def expected_after(model: transformers.PreTrainedModel, prompt: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Return greedy tokens by transformers, which sees all of the prompt while it computes it, then the kept tokens."""
    name, cache = oracles.cache_argument(model), transformers.DynamicCache(config=model.config)
    new, outputs = list(prompt), []
    with torch.no_grad():
        while len(outputs) < NUM_OUTPUT:
            start = len(prompt) + len(outputs) - 1 if outputs else 0
            positions = torch.arange(start, start + len(new))[None]
            logits = model(torch.tensor([new]), position_ids=positions, **{name: cache}).logits[0, -1]
            if not outputs:
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
            new = [int(logits.argmax())]
            outputs += new
    return outputs


def expected(model: transformers.PreTrainedModel, prompt: Sequence[int], sparsity: Sparsity) -> list[int]:
    """Return greedy tokens by transformers, which sees the keys and values of certain tokens in each step."""
    if not has_torch:
        oracles.skip()
    name, cache = oracles.cache_argument(model), transformers.DynamicCache(config=model.config)
    new, outputs = list(prompt), []
    with torch.no_grad():
        while len(outputs) < NUM_OUTPUT:
            start = cache.get_seq_length()
            page, sinks = start // PAGE_SIZE, sparsity.num_sink_pages
            first = max(page + 1 - (sparsity.num_pages - sinks), sinks)
            kept = [i for i in range(start) if not sinks <= i // PAGE_SIZE < first]
            seen = copy.deepcopy(cache)
            for layer in seen.layers if start else ():
                layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
            positions = torch.arange(start, start + len(new))[None]
            logits = model(torch.tensor([new]), position_ids=positions, **{name: seen}).logits[0, -1]
            for index, layer in enumerate(seen.layers):
                cache.update(layer.keys[:, :, len(kept) :], layer.values[:, :, len(kept) :], index)
            new = [int(logits.argmax())]
            outputs += new
    return outputs


OPTIONS: dict[str, dict[str, Any]] = {
    "chunks": {},
    "multi-step": {"multi_step": 7},
    "drafts": {"multi_step": 8, "speculative_config": SpeculationConfig("ngram", prompt_lookup_min=1)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_streaming_llm(start: Start, oracle: transformers.PreTrainedModel, name: str) -> None:
    engine = start(kv_eviction=STREAMING, **OPTIONS[name])
    sparsity = engine.schedule.sparsity
    assert sparsity == Window(PAGE_SIZE, 4 * PAGE_SIZE, 1)
    for _ in range(2):  # the second time with cached prompts
        outputs = generate(engine, PROMPTS, PARAMS)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert output.outputs[0].token_ids == expected(oracle, prompt, sparsity), len(prompt)
    assert outputs[2].num_cached_tokens >= len(PREFIX)
    if name == "drafts":
        assert engine.stats.num_drafted_tokens


SNAPKV = EvictionConfig("snapkv", 3 * PAGE_SIZE + 1, window_tokens=5)
H2O = EvictionConfig("h2o", 3 * PAGE_SIZE + 1)


@pytest.mark.parametrize("name", ["chunks", "drafts", "multi-step", "preemption"])
@pytest.mark.parametrize("eviction", [SNAPKV, H2O], ids=lambda eviction: eviction.method)
def test_compaction(start: Start, llama: Path, eviction: EvictionConfig, name: str) -> None:
    if not has_torch:
        oracles.skip()
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager").eval()
    options = OPTIONS.get(name, {"num_pages": 15})
    engine = start(kv_eviction=eviction, **options)
    sparsity = engine.schedule.sparsity
    for _ in range(2):  # the second time with cached prompts
        outputs = generate(engine, PROMPTS, PARAMS)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            kept = kept_of_prompt(model, prompt, sparsity)
            assert len(kept) == min(len(prompt), eviction.budget - (eviction.budget - len(prompt)) % PAGE_SIZE)
            assert output.outputs[0].token_ids == expected_after(model, prompt, kept), len(prompt)
    if name == "preemption":
        assert engine.stats.num_preemptions


@pytest.mark.long
def test_a_core_in_a_process_keeps_the_same_tokens(start: Start, llama: Path) -> None:
    expected = generate(start(kv_eviction=SNAPKV), PROMPTS[:1], PARAMS)[0].outputs[0].token_ids
    sizes = SIZES | {"max_num_seqs": 1, "max_num_batched_tokens": 1}
    with LLM(str(llama), skip_tokenizer_init=True, engine_process=True, kv_eviction=SNAPKV, **sizes) as llm:
        [output] = llm.generate({"prompt_token_ids": PROMPTS[0]}, PARAMS, use_tqdm=False)
    assert output.outputs[0].token_ids == expected


@pytest.mark.long
def test_preempted_requests_see_the_same_pages(start: Start) -> None:
    eviction, params = EvictionConfig("streaming_llm", 6 * PAGE_SIZE), PARAMS.clone({"max_tokens": 40})
    prompts = [tokens(count, count) for count in (5, 6, 7, 8)]
    engine, few_pages = (start(kv_eviction=eviction, num_pages=num_pages) for num_pages in (28, 14))
    for wanted, output in zip(*(generate(each, prompts, params) for each in (engine, few_pages)), strict=True):
        assert_same(output, wanted)
    assert few_pages.stats.num_preemptions


def test_a_sufficient_budget_changes_nothing(start: Start) -> None:
    """Also if longer sequences would exceed it: outputs have the same bits."""
    engines = [start(seed=1, kv_eviction=each) for each in (None, WHOLE, SUFFICIENT)]
    assert [engine.schedule.sparsity is None for engine in engines] == [True, True, False]
    dense, *others = ([each.outputs[0].logprobs for each in generate(engine, PROMPTS, PARAMS)] for engine in engines)
    assert others == [dense, dense]


def test_pages_between_sinks_and_window_serve_others(start: Start) -> None:
    """A pool that holds one long sequence serves two that end as long."""
    engine = start(kv_eviction=STREAMING, num_pages=12)
    outputs = generate(
        engine, [tokens(17, 1), tokens(18, 2)], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    )
    assert not any(output.metrics.num_preemptions for output in outputs)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculative_config": {"method": "draft_model"}}, "must be in .*'medusa'.* with kv_eviction"),
        ({"kv_offloading_path": "/tmp"}, "kv_offloading_path must be None with kv_eviction"),
    ],
)
def test_options_that_contradict_it(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(kv_eviction=STREAMING, **options)


def test_beams_are_refused() -> None:
    """Their steps would compute output tokens as prompts, which see all."""
    engine: Any = SimpleNamespace(config=EngineConfig(kv_eviction=STREAMING))
    with pytest.raises(RequestError, match="beam_search cannot be combined with kv_eviction"):
        beam_search.search(engine, None, [], beam_search.BeamSearchParams(2, 4))
