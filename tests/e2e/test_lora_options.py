"""LoRA adapters with everything else: drafts, several steps, sleep, other weights, quantised ones, and a process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, LoRARequest, RequestError, SamplingParams
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.models.adapted_specs import adapted_specs
from tests.e2e.sizes import SIZES
from tests.e2e.workloads import tokens

Start = Callable[..., DrivenEngine]

LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [tokens(count, f"options {count}") for count in (5, 9, 7, 11)]
NAMES = ["a", "b", None, "a"]


def tensors(llm: LLM, seed: int) -> dict[str, np.ndarray]:
    """Return random factors for all matrices, by PEFT's names."""
    rng, arch, found = np.random.default_rng(seed), llm.engine.arch, {}
    for each in adapted_specs(arch, arch, ()):
        for part in each.parts:
            for name, shape in {"A": (4, each.spec.shape[1]), "B": (each.num_rows(part), 4)}.items():
                key = f"base_model.model.{part.module}.lora_{name}.weight"
                found[key] = (0.2 * rng.normal(size=shape)).astype(np.float32)
    return found


def with_adapters(llm: LLM) -> LLM:
    for seed, name in enumerate("ab"):
        llm.update_lora(name, tensors(llm, seed), {"r": 4, "lora_alpha": 4})
    return llm


def generate(llm: LLM, names: list[str | None] = NAMES, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    requests = [None if name is None else LoRARequest(name) for name in names]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, PARAMS, use_tqdm=False, lora_request=requests)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def expected(start: Start) -> list[list[int]]:
    found = generate(with_adapters(LLM.over(start(**LORA))))
    assert len({tuple(ids) for ids in found}) == len(found)
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"multi_step": 4}, id="several steps", marks=pytest.mark.long),
        pytest.param(
            {"speculative_config": SpeculationConfig("ngram", num_speculative_tokens=3)},
            id="drafts",
            marks=pytest.mark.long,
        ),
        pytest.param({"max_loras": 1}, id="one slot", marks=pytest.mark.long),
    ],
)
def test_tokens_are_those_of_plain_steps(start: Start, expected, options: dict[str, Any]):
    assert generate(with_adapters(LLM.over(start(**(LORA | options))))) == expected


def test_a_quantised_base_has_adapters_of_its_own(start: Start):
    llm = with_adapters(LLM.over(start(**LORA, quantization="int8")))
    mixed = generate(llm)
    assert mixed[0] != generate(llm, [None], PROMPTS[:1])[0]
    for name, prompt, found in zip(NAMES, PROMPTS, mixed, strict=True):
        llm.reset_prefix_cache()
        assert generate(llm, [name], [prompt]) == [found]


def test_adapters_survive_sleep_and_other_weights(start: Start, expected, llama: Path):
    llm = with_adapters(LLM.over(start(**LORA)))
    llm.sleep()
    llm.wake_up()
    assert generate(llm) == expected
    llm.update_weights(str(llama))
    assert generate(llm) == expected


def test_preempted_rows_have_their_adapters_again(start: Start):
    llm = with_adapters(LLM.over(start(**LORA)))
    long = [tokens(20, f"long {index}") for index in range(4)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    requests = [LoRARequest(name) for name in "abab"]
    given = [{"prompt_token_ids": prompt} for prompt in long]
    together = llm.generate(given, params, use_tqdm=False, lora_request=requests)
    assert any(output.metrics.num_preemptions for output in together)
    for prompt, request, output in zip(given, requests, together, strict=True):
        [alone] = llm.generate([prompt], params, use_tqdm=False, lora_request=request)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_all_calls_take_adapters(start: Start, expected):
    llm = with_adapters(LLM.over(start(**LORA)))
    prompt, request = {"prompt_token_ids": PROMPTS[0]}, LoRARequest("a")
    increments = llm.stream(prompt, PARAMS, lora_request=request)
    streamed = [token_id for output in increments for token_id in output.outputs[0].token_ids]
    assert streamed == expected[0]
    with pytest.raises(RequestError, match="a list with one for each of 1"):
        llm.generate([prompt], PARAMS, use_tqdm=False, lora_request=[request, None])


@pytest.mark.long
def test_a_core_in_another_process_has_adapters(llama: Path, expected):
    options = {"engine_process": True, "lora_extras": ["embeddings"], **SIZES, **LORA}
    with LLM(str(llama), skip_tokenizer_init=True, **options) as llm:
        assert generate(with_adapters(llm)) == expected
        with pytest.raises(RequestError, match="must be in the model"):
            llm.update_lora("bad", {"x.lora_A.weight": np.ones((4, 8)), "x.lora_B.weight": np.ones((8, 4))}, {})
        llm.unload_lora("a")
        assert llm.list_loras() == ["b"]
