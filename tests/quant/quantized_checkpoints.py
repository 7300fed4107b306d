"""Tiny quantised checkpoints, and the models in transformers that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import transformers

from jaxserve.weights.safetensors_file import write_file
from tests.checkpoints import build_model
from tests.oracles import torch
from tests.quant.fake_activations import (
    Fake,
    fake_fp4,
    fake_fp8,
    fake_fp8_groups,
    fake_fp8_static,
    fake_int8,
    fake_int8_zeros,
    fake_mxfp4,
    fake_mxfp8,
)
from tests.quant.writers import (
    SIZES,
    Tensors,
    Writer,
    write_awq,
    write_fp4,
    write_fp8,
    write_fp8_blocks,
    write_fp8_rows,
    write_gptq,
    write_ints,
    write_ints_ordered,
    write_mxfp4,
    write_mxfp8,
    write_row_nibbles,
)


class Case(NamedTuple):
    config: dict[str, Any]
    write: Writer
    fake: Fake | None = None
    is_quantised: Callable[[str], bool] = lambda name: name != "lm_head"


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    base = {"symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": {**base, **weights}, "input_activations": inputs and {**base, **inputs}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


def fp8(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, **more}


def ints(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, **more}


FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
DYNAMIC = {"dynamic": True}
GROUP: dict[str, Any] = {"strategy": "group", "group_size": 32}
MXFP4_GROUPS = {**FP4, **GROUP, "scale_dtype": "torch.uint8"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32}
MODULES = [*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down"))]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
CASES: dict[str, Case] = {
    "ct-fp8-tensor": Case(
        compressed("float-quantized", fp8("tensor"), fp8("tensor")), write_fp8("tensor", static=(1,)), fake_fp8_static
    ),
    "ct-fp8-channel": Case(
        compressed("float-quantized", fp8("channel"), fp8("token", **DYNAMIC)), write_fp8("channel"), fake_fp8
    ),
    "ct-fp8-weights": Case(compressed("naive-quantized", fp8("channel")), write_fp8("channel")),
    "ct-fp8-block": Case(compressed("float-quantized", fp8("block", block_structure=[128, 128])), write_fp8("block")),
    "fp8-block": Case(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        write_fp8("block", "weight_scale_inv"),
        fake_fp8_groups,
    ),
    "fp8-tensor": Case(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        write_fp8("tensor", static=(1,)),
        fake_fp8_static,
    ),
    "fp8-tensor-transformers": Case(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        write_fp8("tensor", "weight_scale_inv", static=(), input_name="activation_scale"),
        fake_fp8_static,
    ),
    "modelopt-fp8": Case(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head*"]},
        write_fp8("tensor", static=()),
        fake_fp8_static,
    ),
    "modelopt-fp8-token": Case(
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": ["lm_head*"]},
        write_fp8_rows,
        fake_fp8,
    ),
    "modelopt-fp8-block": Case(
        {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo", "ignore": ["lm_head*"]}, write_fp8_blocks
    ),
    "ct-nvfp4": Case(compressed("nvfp4-pack-quantized", FP4, {**FP4, "dynamic": "local"}), write_fp4("ct"), fake_fp4),
    "ct-nvfp4-weights": Case(compressed("nvfp4-pack-quantized", FP4), write_fp4("ct", static=False)),
    "modelopt-nvfp4": Case(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
        write_fp4("modelopt"),
        fake_fp4,
    ),
    "modelopt-int4-awq": Case(
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 32, "ignore": ["lm_head"]},
        write_row_nibbles(32),
    ),
    "ct-mxfp4-weights": Case(
        compressed("mxfp4-pack-quantized", MXFP4_GROUPS),
        write_mxfp4,
    ),
    "ct-mxfp4": Case(
        compressed("mxfp4-pack-quantized", MXFP4_GROUPS, {**MXFP4_GROUPS, **DYNAMIC}), write_mxfp4, fake_mxfp4
    ),
    "modelopt-mxfp8": Case(
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32, "ignore": ["lm_head"]},
        write_mxfp8,
        fake_mxfp8,
    ),
    "ct-mxfp8-weights": Case(compressed("mxfp8-quantized", fp8(**GROUP, scale_dtype="torch.uint8")), write_mxfp8),
    "modelopt-mixed": Case(
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                f"model.layers.{layer}.{name}": {"quant_algo": "W4A16_NVFP4", "group_size": 16}
                for layer in range(2)
                for name in MODULES
            },
        },
        write_fp4("modelopt", static=False),
    ),
    "ct-int4": Case(compressed("pack-quantized", ints(4, **GROUP)), write_ints(4, 32)),
    "ct-int4-channel": Case(compressed("pack-quantized", ints(4, "channel")), write_ints(4, -1)),
    "ct-int4-zeros": Case(
        compressed("pack-quantized", ints(4, **GROUP, symmetric=False)),
        write_ints(4, 32, symmetric=False),
    ),
    "ct-int4-order": Case(
        compressed("pack-quantized", ints(4, **GROUP, symmetric=False, actorder="group")),
        write_ints_ordered(32, symmetric=False),
    ),
    "ct-int8-zeros": Case(
        compressed("pack-quantized", ints(8, **GROUP, symmetric=False)),
        write_ints(8, 32, symmetric=False),
    ),
    "ct-int8-packed": Case(compressed("pack-quantized", ints(8, "channel")), write_ints(8, -1)),
    "ct-int8-weights": Case(compressed("int-quantized", ints(8, "channel")), write_ints(8, -1, form="int-quantized")),
    "ct-w8a8": Case(
        compressed("int-quantized", ints(8, "channel"), ints(8, "token", **DYNAMIC)),
        write_ints(8, -1, form="int-quantized"),
        fake_int8,
    ),
    "ct-w8a8-zeros": Case(
        compressed("int-quantized", ints(8, "channel"), ints(8, "token", symmetric=False, **DYNAMIC)),
        write_ints(8, -1, form="int-quantized"),
        fake_int8_zeros,
    ),
    "ct-w8a8-static-zeros": Case(
        compressed("int-quantized", ints(8, "channel"), ints(8, "tensor", symmetric=False)),
        write_ints(8, -1, form="int-quantized", static=True),
        fake_int8_zeros,
    ),
    "ct-w4a8": Case(
        compressed("int-quantized", ints(4, "channel"), ints(8, "token", **DYNAMIC)),
        write_ints(4, -1, form="int-quantized"),
        fake_int8,
    ),
    "gptq": Case(GPTQ, write_gptq(4, 32)),
    "gptq-wide": Case({**GPTQ, "group_size": 128}, write_gptq(4, 128)),  # the last group is a smaller one
    "gptq-zeros": Case({**GPTQ, "sym": False, "group_size": 16}, write_gptq(4, 16, symmetric=False)),
    "gptq-order": Case({**GPTQ, "desc_act": True, "sym": False}, write_gptq(4, 32, symmetric=False, act_order=True)),
    "gptq-order-wide": Case({**GPTQ, "group_size": 128, "desc_act": True}, write_gptq(4, 128, act_order=True)),
    "gptq-v2": Case(
        {**GPTQ, "checkpoint_format": "gptq_v2", "sym": False}, write_gptq(4, 32, version=2, symmetric=False)
    ),
    "gptq-int8": Case({**GPTQ, "bits": 8, "group_size": -1}, write_gptq(8, -1)),
    "auto-round-gptq": Case(
        {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq"},
        write_gptq(4, 32),
    ),
    "auto-round-awq": Case(
        {**AUTO_ROUND, "packing_format": "auto_round:auto_awq"},
        write_awq(32),
    ),
    "awq": Case(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, write_awq(32)
    ),
}


def write_quantized(
    path: Path, case: Case, seed: int = 0, family: str = "llama", **overrides: Any
) -> transformers.PreTrainedModel:
    """Write a checkpoint, and return the model in float32 with the weights that it encodes, and its activations.

    Experts are written one by one, as the hub has them.
    """
    model = build_model(family, seed, **{**SIZES, **overrides})
    rng, tensors = np.random.default_rng(seed), {}
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    tensors |= {name: b.numpy() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")}
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        if module.endswith(".experts"):
            for expert, part, matrix in expert_matrices(kind, parameter.data):
                own, values = case.write(matrix.numpy(), rng)
                tensors |= {f"{module}.{expert}.{part}.{suffix}": array for suffix, array in own.items()}
                matrix.copy_(torch.tensor(values))
            if case.fake is not None:
                experts = model.get_submodule(module)
                experts.forward = partial(run_experts, experts, partial(case.fake, tensors=own))
        elif kind == "weight" and module in linear and case.is_quantised(module):
            own, values = case.write(parameter.detach().numpy(), rng)
            tensors |= {f"{module}.{suffix}": array for suffix, array in own.items()}
            parameter.data = torch.tensor(values)
            if case.fake is not None and not module.endswith("kv_b_proj"):  # it is multiplied with other operands
                fake = case.fake
                model.get_submodule(module).register_forward_pre_hook(
                    lambda _, inputs, fake=fake, own=own: (fake(inputs[0], own),)
                )
        else:
            tensors[name] = parameter.detach().numpy()
    write_model(path, model, case.config, tensors)
    return model


def write_model(
    path: Path, model: transformers.PreTrainedModel, quantization: dict[str, Any], tensors: Tensors
) -> None:
    path.mkdir(exist_ok=True)
    config = {**model.config.to_dict(), "quantization_config": quantization, "dtype": "float32"}
    config["architectures"] = [type(model).__name__]
    (path / "config.json").write_text(json.dumps(config))
    structs = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in tensors.items()}
    write_file(path / "model.safetensors", structs, tensors.__getitem__)


def expert_matrices(kind: str, stack: torch.Tensor) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield number, name and matrix of the parts of a stack of experts, `gate_up_proj` or `down_proj`."""
    for expert, matrix in enumerate(stack):
        names = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
        for name, part in zip(names, matrix.chunk(len(names)), strict=True):
            yield expert, name, part


def run_experts(
    experts: torch.nn.Module, fake: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, ids: Any, weights: Any
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, whose products have quantised activations."""
    y = torch.zeros_like(x)
    for token, (own, factors) in enumerate(zip(ids, weights, strict=True)):
        for expert, factor in zip(own, factors, strict=True):
            gate, up = (experts.gate_up_proj[expert] @ fake(x[token : token + 1])[0]).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            y[token] += factor * (experts.down_proj[expert] @ fake(inner[None])[0])
    return y


MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
        *("model.embed_tokens", "lm_head"),
    ],
}


def write_gpt_oss(path: Path, seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """Write a gpt-oss checkpoint in the layout that is published, and return the model that it encodes."""
    model, tensors = build_model("gpt_oss", seed, **overrides), {}
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            matrices = parameter.data.transpose(1, 2).numpy()  # [E, out, in]
            own, values = write_mxfp4(matrices.reshape(-1, matrices.shape[2]), np.random.default_rng(0))
            blocks = own["weight_packed"].reshape(*matrices.shape[:2], -1, 16)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": own["weight_scale"].reshape(blocks.shape[:3])}
            parameter.data = torch.tensor(values.reshape(matrices.shape)).transpose(1, 2).contiguous()
        else:
            tensors[name] = parameter.detach().numpy()
    write_model(path, model, MXFP4, tensors)
    return model
