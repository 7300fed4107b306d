"""Tiny quantised checkpoints by numpy, in the layouts of the tools, and the models that they stand for.

Each writer takes a matrix [O, I] in float32, and returns the tensors of a module and the matrix that they encode.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import torch
import transformers

from jaxserve.weights.safetensors_file import write_file
from tests.checkpoints import build_model

E4M3 = ml_dtypes.float8_e4m3fn
# No width is a multiple of 128; on two or four devices, some groups of 16, 32 and 128 columns are cut.
SIZES = {"hidden_size": 160, "intermediate_size": 224, "head_dim": 40, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "tie_word_embeddings": False}

Tensors = dict[str, np.ndarray]
Writer = Callable[[np.ndarray, np.random.Generator], tuple[Tensors, np.ndarray]]
Fake = Callable[[torch.Tensor, Mapping[str, np.ndarray]], torch.Tensor]  # emulated quantisation of activations


class Case(NamedTuple):
    config: dict[str, Any]
    write: Writer
    fake: Fake | None = None
    is_quantised: Callable[[str], bool] = lambda name: name != "lm_head"


def largest(w: np.ndarray, group: int, block_rows: int = 1) -> np.ndarray:
    """Return the largest absolute value of each block, [ceil(O / rows), ceil(I / group)]."""
    padded = np.pad(np.abs(w), ((0, -w.shape[0] % block_rows), (0, -w.shape[1] % group)))
    return padded.reshape(padded.shape[0] // block_rows, block_rows, -1, group).max(axis=(1, 3))


def spread(grid: np.ndarray, w: np.ndarray, group: int, block_rows: int = 1) -> np.ndarray:
    whole = np.repeat(np.repeat(grid, group, axis=1), block_rows, axis=0)
    return whole[: w.shape[0], : w.shape[1]]


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack unsigned numbers along the last axis into int32, the first in the lowest bits."""
    per_word = 32 // bits
    grouped = codes.astype(np.uint64).reshape(*codes.shape[:-1], -1, per_word)
    shifted = grouped << (np.arange(per_word, dtype=np.uint64) * np.uint64(bits))
    return shifted.sum(axis=-1, dtype=np.uint64).astype(np.uint32).view(np.int32)


def write_fp8(by: str, scale_name: str = "weight_scale", *, static: tuple[int, ...] | None = None) -> Writer:
    """Return a writer; `static` is the shape of the scales of a tensor and of its activations."""

    def write(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        group, rows = {"tensor": (w.shape[1], w.shape[0]), "channel": (w.shape[1], 1), "block": (128, 128)}[by]
        scale = (largest(w, group, rows) / 448).astype(np.float32)
        wide = spread(scale, w, group, rows)
        q = (w / wide).astype(E4M3)
        tensors = {"weight": q, scale_name: scale if static is None else scale.reshape(static)}
        tensors |= {} if static is None else {"input_scale": np.full(static, 0.011, np.float32)}
        return tensors, q.astype(np.float32) * wide

    return write


def e2m1_codes(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15


def write_fp4(tool: str, *, static: bool = True) -> Writer:
    def write(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        factor = np.float32(448 * 6 / 3.0)  # factor of all modules, as parts are fused
        own = (factor * (largest(w, 16) / np.float32(6))).astype(E4M3)
        second = np.float32(1) / factor
        wide = own.astype(np.float32)
        scale = wide * second if tool == "modelopt" else wide / factor
        codes = e2m1_codes(w / spread(scale, w, 16))
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        if tool == "modelopt":
            names = {"weight": packed, "weight_scale": own, "weight_scale_2": second.reshape(())}
            names |= {"input_scale": np.float32(1 / 500).reshape(())} if static else {}
        else:
            names = {"weight_packed": packed, "weight_scale": own, "weight_global_scale": factor.reshape(1)}
            names |= {"input_global_scale": np.float32([500])} if static else {}
        return names, values * spread(scale, w, 16)

    return write


def write_mxfp4(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    exponent = np.floor(np.log2(largest(w, 32))) - 2 + 127
    scale = spread(2.0 ** (exponent - 127), w, 32).astype(np.float32)
    codes = e2m1_codes(w / scale)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {"weight_packed": packed, "weight_scale": exponent.astype(np.uint8)}, values * scale


def write_mxfp8(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    exponent = np.floor(np.log2(largest(w, 32))) - 8 + 127
    scale = spread(2.0 ** (exponent - 127), w, 32).astype(np.float32)
    q = np.clip(w / scale, -448, 448).astype(E4M3)
    return {"weight": q, "weight_scale": exponent.astype(np.uint8)}, q.astype(np.float32) * scale


def integers(
    w: np.ndarray, bits: int, group: int, *, symmetric: bool, low: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return unsigned codes [O, I], zero points and scales [O, groups]; zero points are at least `low`."""
    top, padded = 2**bits - 1, np.pad(w, ((0, 0), (0, -w.shape[1] % group)))
    groups = padded.reshape(len(w), -1, group)
    if symmetric:
        scale = np.abs(groups).max(-1) / (top / 2)
        zero = np.full(scale.shape, 2 ** (bits - 1))
    else:
        least, most = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scale = (most - least) / top
        zero = np.clip(np.round(-least / scale), low, top).astype(int)
    scale = scale.astype(np.float16).astype(np.float32)
    codes = np.clip(np.round(groups / scale[..., None]) + zero[..., None], 0, top)
    codes = codes.reshape(padded.shape)[:, : w.shape[1]]
    return codes.astype(np.uint32), zero.astype(np.uint32), scale


def write_ints(bits: int, group: int, *, symmetric: bool = True, form: str = "pack-quantized") -> Writer:
    def write(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        size = w.shape[1] if group == -1 else group
        codes, zero, scale = integers(w, bits, size, symmetric=symmetric)
        values = (codes.astype(np.float32) - spread(zero, w, size).astype(np.float32)) * spread(scale, w, size)
        if form == "int-quantized":
            return {"weight": (codes.astype(int) - 2 ** (bits - 1)).astype(np.int8), "weight_scale": scale}, values
        tensors = {"weight_packed": words(codes, bits), "weight_scale": scale}
        tensors["weight_shape"] = np.array(w.shape, np.int64)
        if not symmetric:
            tensors["weight_zero_point"] = np.ascontiguousarray(words(zero.T, bits).T)
        return tensors, values

    return write


def write_gptq(bits: int, group: int, *, version: int = 1, symmetric: bool = True, act_order: bool = False) -> Writer:
    def write(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        size = w.shape[1] if group == -1 else group
        # The order is a function of the inputs, so that it is one for the parts of a fused product.
        order = np.random.default_rng(w.shape[1]).permutation(w.shape[1]) if act_order else np.arange(w.shape[1])
        codes, zero, scale = integers(w[:, order], bits, size, symmetric=symmetric)
        q = codes.astype(np.float32) - spread(zero, w, size).astype(np.float32)
        group_of, values, stored = np.empty(w.shape[1], np.int32), np.empty_like(w), np.empty_like(codes)
        group_of[order] = np.arange(w.shape[1]) // size
        values[:, order], stored[:, order] = q * spread(scale, w, size), codes
        zeros = words(zero.T, bits).view(np.uint32)
        if version == 1:
            zeros = zeros - words(np.ones_like(zero.T), bits).view(np.uint32)
        return {
            "qweight": np.ascontiguousarray(words(stored.astype(np.uint32), bits).T),
            "qzeros": zeros.view(np.int32),
            "scales": np.ascontiguousarray(scale.T).astype(np.float16),
            "g_idx": group_of,
            "bias": np.zeros(len(w), np.float16),
        }, values

    return write


def write_awq(group: int) -> Writer:
    def mixed(codes: np.ndarray) -> np.ndarray:
        taken = codes.reshape(len(codes), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return words(taken.reshape(codes.shape), 4)

    def write(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        codes, zero, scale = integers(w, 4, group, symmetric=False)
        values = (codes.astype(np.float32) - spread(zero, w, group).astype(np.float32)) * spread(scale, w, group)
        scales = np.ascontiguousarray(scale.T).astype(np.float16)
        return {"qweight": mixed(codes.T), "qzeros": mixed(zero.T), "scales": scales}, values

    return write


def write_row_nibbles(group: int) -> Writer:
    """Return ModelOpt's writer of W4A16_AWQ, whose factors of inputs are in the norm before but in down projections."""

    def write(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        factor = np.random.default_rng(w.shape[1]).uniform(0.5, 2, w.shape[1]).astype(np.float32)
        factor = np.ones_like(factor) if w.shape[1] == SIZES["hidden_size"] else factor
        scale = (largest(w / factor, group) / 7).astype(np.float32)
        signed = np.clip(np.round(w / factor / spread(scale, w, group)), -8, 7).astype(np.int8)
        codes = signed.view(np.uint8) & 15
        tensors = {"weight": codes[::2] | codes[1::2] << 4, "weight_scale": scale}
        tensors |= {} if (factor == 1).all() else {"pre_quant_scale": factor}
        return tensors, signed * spread(scale, w, group) * factor

    return write


# Activations


def fake_int8(x: torch.Tensor, tensors: Mapping[str, np.ndarray]) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return torch.clamp(torch.round(x / scale), -128, 127) * scale


def fake_fp8(x: torch.Tensor, tensors: Mapping[str, np.ndarray]) -> torch.Tensor:
    return to_fp8(x, x.abs().amax(-1, keepdim=True) / 448)


def fake_fp8_static(x: torch.Tensor, tensors: Mapping[str, np.ndarray]) -> torch.Tensor:
    return to_fp8(x, torch.tensor(tensors["input_scale"].reshape(())))


def fake_fp8_groups(x: torch.Tensor, tensors: Mapping[str, np.ndarray]) -> torch.Tensor:
    size = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -size % 128)).unflatten(-1, (-1, 128))
    return to_fp8(padded, padded.abs().amax(-1, keepdim=True) / 448).flatten(-2)[..., :size]


def fake_fp4(x: torch.Tensor, tensors: Mapping[str, np.ndarray]) -> torch.Tensor:
    if "input_scale" in tensors:
        factor = torch.tensor(np.float32(1) / tensors["input_scale"])
    else:
        factor = torch.tensor(tensors["input_global_scale"].reshape(()))
    groups = x.unflatten(-1, (-1, 16))
    scale = (factor * (groups.abs().amax(-1, keepdim=True) / 6)).clamp(max=448).to(torch.float8_e4m3fn).float()
    scale = torch.where(scale == 0, 0.125, scale) / factor
    values = (groups / scale).clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return (torch.tensor(values) * scale).flatten(-2)


def to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.clamp(x / scale, -448, 448).to(torch.float8_e4m3fn).float() * scale


# Checkpoints


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
    "modelopt-fp8": Case(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head*"]},
        write_fp8("tensor", static=()),
        fake_fp8_static,
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
        compressed("mxfp4-pack-quantized", {**FP4, **GROUP, "scale_dtype": "torch.uint8"}),
        write_mxfp4,
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
