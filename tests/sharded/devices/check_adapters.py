"""LoRA adapters over several devices: the tokens of one device, for every matrix that adapters change."""

from collections.abc import Callable

import numpy as np
import pytest

from jaxserve import LLM, LoRARequest, SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.models.adapter_layout import AdapterLayout
from tests.e2e.workloads import TOLERANCE, tokens
from tests.parameters import mainly

Start = Callable[..., DrivenEngine]

LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)


def tensors(llm: LLM, seed: int) -> dict[str, np.ndarray]:
    """Return random factors for all matrices, by PEFT's names."""
    rng, arch, found = np.random.default_rng(seed), llm.engine.arch, {}
    for each in AdapterLayout.specs(arch, arch):
        for part in each.parts:
            shapes = {"A": (4, each.spec.shape[1]), "B": (each.num_rows(part), 4)}
            for name, shape in shapes.items():
                key = f"base_model.model.{part.module}.lora_{name}.weight"
                found[key] = (0.2 * rng.normal(size=shape)).astype(np.float32)
    return found


@pytest.mark.parametrize("backend", ["auto", "xla"])
@pytest.mark.parametrize("num_devices", mainly([4], 2, 8))
def test_tokens_are_those_of_one_device(start: Start, num_devices: int, backend: str) -> None:
    names, prompts = ["a", "b", None, "a"], [{"prompt_token_ids": tokens(count, count)} for count in (9, 5, 7, 11)]
    requests, outputs = [None if name is None else LoRARequest(name) for name in names], []
    for count in (1, num_devices):
        llm = LLM.over(start(count, **LORA, linear_backend=backend))
        for seed, name in enumerate("ab"):
            llm.update_lora(name, tensors(llm, seed), {"r": 4, "lora_alpha": 4})
        outputs.append(llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=requests))
    for expected, found in zip(*outputs, strict=True):
        assert expected.outputs[0].token_ids == found.outputs[0].token_ids
        pairs = zip(expected.outputs[0].logprobs or (), found.outputs[0].logprobs or (), strict=True)
        for wanted, table in pairs:
            assert all(abs(wanted[key].logprob - entry.logprob) < TOLERANCE for key, entry in table.items())
