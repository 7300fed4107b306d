"""LoRA adapters over several devices: the tokens of one device, for every matrix that adapters change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, LoRARequest, SamplingParams
from jaxserve.api.config import EngineConfig
from jaxserve.api.lora_request import EXPERTS, LATENTS, LORA_EXTRAS
from jaxserve.api.outputs import RequestOutput
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.models.adapted_specs import adapted_specs, embeddings
from tests.e2e.workloads import TOLERANCE, tokens
from tests.parameters import mainly
from tests.sharded.devices.sizes import SHARD_SIZES

Start = Callable[..., DrivenEngine]
Mixture = Callable[[str], tuple[Path, DrivenEngine]]

EXTRAS = tuple(extra for extra in LORA_EXTRAS if extra != EXPERTS)
LORA = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 4, "lora_extras": EXTRAS}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
PROMPTS: list[Any] = [{"prompt_token_ids": tokens(count, count)} for count in (9, 5, 7, 11)]
REQUESTS = [LoRARequest("a"), LoRARequest("b"), None, LoRARequest("a")]
EVERY = [LoRARequest(name) for name in "abcd"]


def tensors(llm: LLM, seed: int, vector: str = "lora_B.bias") -> dict[str, np.ndarray]:
    """Return random factors and a vector for all matrices, by PEFT's names."""
    rng, arch, found = np.random.default_rng(seed), llm.engine.arch, {}

    def draw(*shape: int) -> np.ndarray:
        return (0.2 * rng.normal(size=shape)).astype(np.float32)

    for each in adapted_specs(arch, arch, EXTRAS):
        for part in each.parts:
            prefix = f"base_model.model.{part.module}"
            names = "lora_embedding_{}" if each.is_table else "lora_{}.weight"
            found[f"{prefix}.{names.format('A')}"] = draw(4, each.spec.shape[1])
            found[f"{prefix}.{names.format('B')}"] = draw(each.num_rows(part), 4)
            if not each.is_table:
                found[f"{prefix}.{vector}"] = draw(each.num_rows(part))
    return found


def whole(llm: LLM, seed: int) -> dict[str, np.ndarray]:
    """Return random factors and magnitudes for the layers, and matrices in place of embedding and head."""
    every = tensors(llm, seed, "lora_magnitude_vector")
    in_layers = {name: array for name, array in every.items() if ".layers." in name}
    rng, specs = np.random.default_rng(seed), embeddings(llm.engine.arch)
    drawn = {spec.hf_names[0]: rng.normal(size=spec.shape).astype(np.float32) for spec in specs}
    return in_layers | {f"base_model.model.{name}": array for name, array in drawn.items()}


TRAINED: dict[str, list[int]] = {"embed_tokens": [*range(3, 90, 2)], "lm_head": [*range(5, 90, 3)]}


def tables(llm: LLM, seed: int) -> dict[str, np.ndarray]:
    """Return random factors and magnitudes for the embedding, and rows for tokens in the head."""
    every, rng = tensors(llm, seed, "lora_magnitude_vector"), np.random.default_rng(seed)
    size = llm.engine.arch.hidden_size
    found = {name: array for name, array in every.items() if "embed_tokens" in name}
    found["base_model.model.model.embed_tokens.lora_magnitude_vector"] = rng.uniform(size=size).astype(np.float32)
    return found | trained_rows(llm, seed, "lm_head")


def trained_rows(llm: LLM, seed: int, *modules: str) -> dict[str, np.ndarray]:
    """Return random rows for tokens in the embedding and the head."""
    rng, size = np.random.default_rng(seed), llm.engine.arch.hidden_size
    names = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
    return {
        f"base_model.model.{names[module]}.token_adapter.trainable_tokens_delta": rng.normal(
            size=(len(TRAINED[module]), size)
        ).astype(np.float32)
        for module in modules
    }


@pytest.mark.parametrize("case", mainly([(4, "auto")], (2, "auto"), (8, "auto"), (4, "xla")))
def test_tokens_are_those_of_one_device(start: Start, case: tuple[int, str]) -> None:
    num_devices, backend = case
    outputs = []
    for count in (1, num_devices):
        llm = LLM.over(start(count, **LORA, linear_backend=backend, multi_step=1))
        for seed, (name, draw) in enumerate({"a": tensors, "b": whole}.items()):
            feature = "lora_bias" if draw is tensors else "use_dora"
            llm.update_lora(name, draw(llm, seed), {"r": 4, "lora_alpha": 4, feature: True})
        ids = {"trainable_token_indices": {"lm_head": TRAINED["lm_head"]}}
        llm.update_lora("c", tables(llm, 2), {"r": 4, "lora_alpha": 4, "use_dora": True} | ids)
        llm.update_lora("d", trained_rows(llm, 3, *TRAINED), {"trainable_token_indices": TRAINED})
        outputs.append(
            [
                output
                for requests in (REQUESTS, EVERY)
                for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=requests)
            ]
        )
    assert_equal(*outputs)


@pytest.mark.parametrize("num_devices", mainly([4], 2))
def test_latents_have_the_tokens_of_one_device(mixture: Mixture, num_devices: int) -> None:
    """Adapters of all MLA matrices; devices have some of the heads, and thus some rows of `kv_b_proj`."""
    path, _ = mixture("deepseek_v3")
    outputs = []
    for sizes in ({}, {"tensor_parallel_size": num_devices}):
        options: dict[str, Any] = SHARD_SIZES | LORA | {"lora_extras": [LATENTS]}
        llm = LLM.over(DrivenEngine(EngineConfig(str(path), **options | sizes | {"multi_step": 1})))
        for seed, name in enumerate("ab"):
            llm.update_lora(name, factors(llm, seed, LATENTS), {"r": 4, "lora_alpha": 4})
        outputs.append(llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=REQUESTS))
    assert_equal(*outputs)


CASES = [(4, 2, "auto", False), (4, 2, "auto", True), (2, 1, "auto", False), (2, 2, "xla", True), (4, 1, "xla", False)]


@pytest.mark.parametrize("case", mainly(CASES[:2], *CASES[2:]))
def test_experts_have_the_tokens_of_one_device(mixture: Mixture, case: tuple[int, int, str, bool]) -> None:
    """Adapters of routed experts, with experts or parts of them on different devices, which may have their own rows."""
    num_devices, num_shards, backend, has_rows = case
    path, _ = mixture("qwen3_moe")
    devices = {"tensor_parallel_size": num_devices, "expert_parallel_size": num_shards}
    outputs = []
    for sizes in ({}, devices | {"enable_dp_attention": has_rows}):
        options: dict[str, Any] = SHARD_SIZES | LORA | {"lora_extras": LORA_EXTRAS, "linear_backend": backend}
        llm = LLM.over(DrivenEngine(EngineConfig(str(path), **options | sizes | {"multi_step": 1})))
        for seed, name in enumerate("ab"):
            others = {key: x for key, x in tensors(llm, seed).items() if not key.endswith("bias")}
            llm.update_lora(name, others | factors(llm, seed, EXPERTS), {"r": 4, "lora_alpha": 4})
        outputs.append(llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=REQUESTS))
    assert_equal(*outputs)


def factors(llm: LLM, seed: int, extra: str) -> dict[str, np.ndarray]:
    """Return random factors for all matrices in layers, and those of an extra."""
    rng, arch, found = np.random.default_rng(seed), llm.engine.arch, {}
    for each in adapted_specs(arch, arch, (extra,)):
        for part in each.parts:
            for name, shape in (("A", (4, each.spec.shape[1])), ("B", (each.num_rows(part), 4))):
                drawn = (0.2 * rng.normal(size=shape)).astype(np.float32)
                found[f"base_model.model.{part.module}.lora_{name}.weight"] = drawn
    return found


def assert_equal(wanted: list[RequestOutput], found: list[RequestOutput]) -> None:
    """Assert that outputs have the same ids and, within the tolerance, log probabilities."""
    for expected, other in zip(wanted, found, strict=True):
        assert expected.outputs[0].token_ids == other.outputs[0].token_ids
        pairs = zip(expected.outputs[0].logprobs or (), other.outputs[0].logprobs or (), strict=True)
        for table, own in pairs:
            assert all(abs(table[key].logprob - entry.logprob) < TOLERANCE for key, entry in own.items())
