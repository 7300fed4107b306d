"""Adapter files in the layouts in which trainers save them: read whole, or refused by name."""

from typing import Any

import numpy as np
import pytest

from jaxserve.weights import CheckpointError
from jaxserve.weights.adapter_files import make_adapter

LAYER = "base_model.model.model.layers.0."
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM", "bias": "none"}
# Further fields in the configuration and further tensors, by trainer.
UNSLOTH = {
    "target_modules": "(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|(?:\\bmodel\\.layers\\..*)",
    "auto_mapping": {"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True},
    "modules_to_save": ["embed_tokens", "lm_head"],
    "loftq_config": {},
}
AXOLOTL = {"target_modules": ["q_proj"], "fan_in_fan_out": None, "layers_to_transform": None, "megatron_config": None}
FACTORY = {"target_modules": "all-linear", "use_rslora": True, "modules_to_save": ["embed_tokens"]}
TRL = {"target_modules": ["q_proj"], "task_type": "SEQ_CLS", "modules_to_save": ["score"]}
TABLES = ("model.embed_tokens", "lm_head")


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def pair(module: str = f"{LAYER}self_attn.q_proj", infix: str = "") -> dict[str, np.ndarray]:
    return {f"{module}.lora_A{infix}.weight": floats(2, 6), f"{module}.lora_B{infix}.weight": floats(8, 2)}


def saved(name: str, infix: str = "") -> dict[str, np.ndarray]:
    return {f"base_model.model.{name}{infix}.weight": floats(9, 6)}


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, np.ndarray], tuple[str, ...]]] = {
    "PEFT": ({}, pair(), ()),
    "PEFT, embeddings": (
        {"target_modules": ["embed_tokens"]},
        {
            "base_model.model.model.embed_tokens.lora_embedding_A": floats(2, 9),
            "base_model.model.model.embed_tokens.lora_embedding_B": floats(6, 2),
            **saved("model.embed_tokens", ".base_layer"),
        },
        (),
    ),
    "unsloth": (UNSLOTH, pair() | saved(TABLES[0]) | saved(TABLES[1]), TABLES),
    "unsloth, older PEFT": (
        UNSLOTH,
        pair(infix=".default") | saved(TABLES[0], ".modules_to_save.default") | saved(TABLES[1], ".modules_to_save"),
        TABLES,
    ),
    "axolotl": (AXOLOTL, pair(), ()),
    "axolotl, FSDP and torch.compile": (
        AXOLOTL,
        pair("base_model.model._orig_mod.model.layers.0._fsdp_wrapped_module.self_attn.q_proj"),
        (),
    ),
    "axolotl, trained tokens": (
        AXOLOTL | {"trainable_token_indices": [7]},
        pair() | {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": floats(1, 6)},
        (),
    ),
    "LLaMA-Factory": (FACTORY, pair() | saved(TABLES[0]), TABLES[:1]),
    "TRL, reward model": (TRL, pair() | saved("score"), ("score",)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_is_read(name):
    fields, tensors, whole = LAYOUTS[name]
    adapter = make_adapter(CONFIG | fields, tensors, name)
    assert set(adapter.whole) == set(whole)
    num_arrays = sum(len(each.arrays) for each in adapter.modules.values())
    num_arrays += len(whole) + len(adapter.base) + len(adapter.tokens)
    assert num_arrays == len(tensors)
    assert all(module in ("model.layers.0.self_attn.q_proj", "model.embed_tokens") for module in adapter.modules)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, np.ndarray], str]] = {
    "LLaMA-Factory, PiSSA": ({"init_lora_weights": "pissa_niter_16"}, {}, "init_lora_weights must not change the base"),
    "LLaMA-Factory, LoRA+ with biases": ({"bias": "all"}, {}, "bias must be 'none', got 'all'"),
    "unsloth, LoftQ": ({"init_lora_weights": "loftq"}, {}, "init_lora_weights must not change the base"),
    "TRL, value head": ({}, {"v_head.summary.bias": floats(1)}, "v_head.summary.bias; other tensors"),
    "TRL, IA3": ({"peft_type": "IA3"}, {}, "peft_type must be 'LORA', got 'IA3'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name(name):
    fields, tensors, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message):
        make_adapter(CONFIG | fields, pair() | tensors, name)
