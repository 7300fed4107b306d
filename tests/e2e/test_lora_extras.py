"""Adapters with more than factors in layers: embeddings, whole matrices, biases and DoRA, in one engine, as in PEFT."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file
from scipy.special import log_softmax

from jaxserve import LLM, LoRARequest, RequestError, SamplingParams
from jaxserve.api.lora_request import LORA_EXTRAS
from jaxserve.api.outputs import RequestOutput
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.execution.program_store import compile_counter
from tests.adapters import ATTENTION, MLP, greedy_ids, separate_logits, write_adapters
from tests.e2e.workloads import TOLERANCE, tokens

pytest.importorskip("peft")

Start = Callable[..., DrivenEngine]

LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "lora_extras": LORA_EXTRAS}
CONFIGS: dict[str, dict[str, Any]] = {
    "embeddings": {"r": 16, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "whole": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "biases": {"target_modules": ["k_proj", "o_proj", "up_proj", "down_proj", "lm_head"], "lora_bias": True},
    "dora": {"target_modules": [*ATTENTION, *MLP, "lm_head"], "use_dora": True},
}
BASE = "__base__"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=4, prompt_logprobs=2)
NAMES = [*CONFIGS, BASE]
PROMPTS = [tokens(count, f"extras {count}") for count in (5, 9, 13, 8, 7)]


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder of adapters, and a PEFT model for each: one model cannot have all of them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype="float32", attn_implementation="eager")
    directory = tmp_path_factory.mktemp("extras")
    pefts = {name: write_adapters(copy.deepcopy(model), directory, {name: CONFIGS[name]}) for name in CONFIGS}
    return directory, pefts | {BASE: pefts["biases"]}


def generate(llm: LLM, directory: Path, params: SamplingParams = GREEDY) -> list[RequestOutput]:
    requests = [None if name == BASE else LoRARequest(name, 1, str(directory / name)) for name in NAMES]
    given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return llm.generate(given, params, use_tqdm=False, lora_request=requests)


@pytest.mark.parametrize("backend", ["auto", "xla"])
def test_a_mixed_batch_has_the_outputs_of_peft(start: Start, adapters, backend):
    (directory, pefts), llm = adapters, LLM.over(start(**LORA, linear_backend=backend))
    for name, prompt, output in zip(NAMES, PROMPTS, generate(llm, directory), strict=True):
        expected = log_softmax(separate_logits(pefts[name], prompt, name), axis=-1)
        for position, table in enumerate(output.prompt_logprobs or ()):
            for token_id, entry in (table or {}).items():
                assert abs(entry.logprob - expected[position - 1, token_id]) < TOLERANCE, name
        [completion] = output.outputs
        for token_id, entry in (completion.logprobs or [{}])[0].items():
            assert abs(entry.logprob - expected[-1, token_id]) < TOLERANCE, name
        assert completion.token_ids == greedy_ids(pefts[name], prompt, name, 6), name


def test_drafts_are_verified_with_the_adapters_heads(start: Start, adapters):
    directory, _ = adapters
    drafts = SpeculationConfig("ngram", num_speculative_tokens=3)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain, drafted = (
        generate(LLM.over(start(**LORA | options)), directory, params)
        for options in ({}, {"speculative_config": drafts})
    )
    assert [output.outputs[0].token_ids for output in plain] == [output.outputs[0].token_ids for output in drafted]


def test_base_rows_have_the_bits_of_an_engine_without_extras(start: Start, adapters):
    directory, _ = adapters
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=4)
    llm = LLM.over(start(**LORA))
    compiled = compile_counter.count
    *_, mixed = generate(llm, directory, params)
    assert compile_counter.count == compiled
    plain = LLM.over(start(**LORA | {"lora_extras": ()}))
    [expected] = plain.generate([{"prompt_token_ids": PROMPTS[-1]}], params, use_tqdm=False)
    assert mixed.outputs[0].token_ids == expected.outputs[0].token_ids
    pairs = zip(mixed.outputs[0].logprobs or (), expected.outputs[0].logprobs or (), strict=True)
    assert all({k: v.logprob for k, v in a.items()} == {k: v.logprob for k, v in b.items()} for a, b in pairs)


@pytest.mark.parametrize(("name", "extra"), [*zip(CONFIGS, LORA_EXTRAS, strict=False)])
def test_extras_that_the_engine_lacks_are_named(start: Start, adapters, name, extra):
    directory, _ = adapters
    llm = LLM.over(start(**LORA | {"lora_extras": ()}))
    with pytest.raises(RequestError, match=f"lora_extras.*({extra}|embeddings)"):
        llm.load_lora(LoRARequest(name, 1, str(directory / name)))


def test_another_vocabulary_is_refused_with_numbers(start: Start):
    llm = LLM.over(start(**LORA))
    size = llm.engine.arch.hidden_size
    tensors = {"base_model.model.lm_head.weight": np.ones((7, size), np.float32)}
    with pytest.raises(RequestError, match=rf"must have the model's shape, \[.*, {size}\], got \[7, {size}\]"):
        llm.update_lora("vocabulary", tensors, {})


def test_norms_are_those_of_new_weights(start: Start, llama: Path):
    """DoRA's magnitudes replace the norms of rows: without B, weights twice as large leave all outputs as they are."""
    llm, rng, tensors = LLM.over(start(**LORA)), np.random.default_rng(0), {}
    stored = load_file(llama / "model.safetensors")
    queries = {name: array for name, array in stored.items() if name.endswith("q_proj.weight")}
    for name, array in queries.items():
        prefix, (num_rows, size) = f"base_model.model.{name.removesuffix('.weight')}", array.shape
        factors = {"A.weight": rng.normal(size=(2, size)), "B.weight": np.zeros((num_rows, 2))}
        tensors |= {f"{prefix}.lora_{key}": factor.astype(np.float32) for key, factor in factors.items()}
        tensors[f"{prefix}.lora_magnitude_vector"] = np.abs(rng.normal(size=num_rows)).astype(np.float32)
    llm.update_lora("norms", tensors, {"r": 2, "lora_alpha": 2, "use_dora": True})
    prompt = [{"prompt_token_ids": tokens(9, "norms")}]

    def outputs() -> Any:
        [output] = llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=LoRARequest("norms"))
        return output.outputs[0].token_ids, output.outputs[0].logprobs

    (ids, tables), plain = outputs(), llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    llm.update_weights(stored | {name: 2 * array for name, array in queries.items()})
    try:
        assert outputs() == (ids, tables)
        assert ids != plain
    finally:
        llm.update_weights(str(llama))
        llm.unload_lora("norms")
