"""LoRA adapters written by PEFT, and PEFT's own outputs for batches that mix them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from tests.oracles import torch

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
# Factors are drawn with this standard deviation, so that adapters change most tokens.
STD = 0.15


def write_adapters(
    model: transformers.PreTrainedModel, directory: Path, configs: Mapping[str, Mapping[str, Any]]
) -> Any:
    """Write an adapter with random factors for each configuration; return PEFT's model with all of them.

    Args:
        model: base model.
        directory: each adapter is a folder in it, named like its configuration.
        configs: LoraConfig arguments by adapter.
    """
    import peft

    whole = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers renames attributes in layers that adapters leave out
        for seed, (name, fields) in enumerate(configs.items()):
            modules = {"target_modules": [*ATTENTION, *MLP], "task_type": "CAUSAL_LM"}
            config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, **modules, **fields})
            if whole is None:
                whole = peft.get_peft_model(model, config, adapter_name=name)
            else:
                whole.add_adapter(name, config)
            generator = torch.Generator().manual_seed(seed)
            for key, parameter in whole.named_parameters():
                if f".{name}." in key or key.endswith(f".{name}"):
                    parameter.data = STD * torch.randn(parameter.shape, generator=generator)
        assert whole is not None
        whole.eval()
        whole.save_pretrained(str(directory))
    return whole


def adapted_logits(
    model: Any, prompts: Sequence[Sequence[int]], names: Sequence[str]
) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """Return each prompt's logits [T, V], all computed by PEFT in one mixed batch; "__base__" is the base model."""
    length = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[0] * (length - len(prompt))] for prompt in prompts])
    with torch.no_grad():
        logits = model(input_ids=ids, adapter_names=list(names)).logits
    return [each[: len(prompt)].float().numpy() for each, prompt in zip(logits, prompts, strict=True)]


def separate_logits(model: Any, prompt: Sequence[int], name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return a prompt's logits [T, V] with one adapter: PEFT mixes none with DoRA, nor in layers over all tokens."""
    model.set_adapter(name if name != "__base__" else next(iter(model.peft_config)))
    with torch.no_grad(), model.disable_adapter() if name == "__base__" else contextlib.nullcontext():
        logits = model(input_ids=torch.tensor([list(prompt)])).logits
    return logits[0].float().numpy()


def greedy_ids(model: Any, prompt: Sequence[int], name: str, num_tokens: int) -> list[int]:
    """Return a prompt's greedy continuation with an adapter."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(separate_logits(model, ids, name)[-1].argmax()))
    return ids[len(prompt) :]
