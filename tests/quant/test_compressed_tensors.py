"""Checkpoints of compressed-tensors, as that library itself decompresses and transformers runs them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from jaxserve import weights
from jaxserve.layers.weight_formats import activations
from jaxserve.models import registry
from jaxserve.weights.quantized import Activation
from jaxserve.weights.rows import leaf_at
from tests.checkpoints import reference_logits
from tests.models.test_parity import run
from tests.oracles import torch
from tests.parameters import some_by_default
from tests.quant.fake_activations import FAKE_INT8
from tests.quant.loaded import ONE_LAYER, loaded, safetensors_of
from tests.quant.quantized_checkpoints import CASES, DYNAMIC, FP4, GROUP, Case, compressed, fp8, ints, write_quantized
from tests.quant.writers import write_fp8

pytest.importorskip("compressed_tensors")

NAMES = [name for name in CASES if name.startswith("ct-") and "order" not in name]  # old versions wrote it
LOADED = [
    name for name in NAMES if not any(kind in name for kind in ("fp4", "mxfp8", "zeros", "int8-weights"))
]  # transformers cannot load the others; int8 weights without int8 activations it takes for packed ones


def decompressed(tensors: dict[str, np.ndarray], module: str, name: str) -> np.ndarray:
    """Return the matrix that compressed-tensors finds in the tensors of a module."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    own = {n.removeprefix(f"{module}."): to_torch(t) for n, t in tensors.items() if n.startswith(f"{module}.")}
    config = CASES[name].config
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    return compressor.decompress(own, scheme)["weight"].float().numpy()


def to_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype.name == "float8_e4m3fn":
        return torch.tensor(array.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.tensor(array)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_library(tmp_path: Path, name: str) -> None:
    write_quantized(tmp_path, CASES[name], **ONE_LAYER)
    arch = registry.from_hf_config(weights.read_config(tmp_path))
    specs, tensors = registry.param_specs(arch), safetensors_of(tmp_path)
    params = weights.load(tmp_path, specs, schemes=arch.schemes)
    for spec in specs:
        if spec.path[-1].endswith("proj"):
            modules = [hf_name.removesuffix(".weight") for hf_name in spec.hf_names]
            expected = np.concatenate([decompressed(tensors, module, name) for module in modules])
            found = leaf_at(params, spec.path)
            if "fp4" in name:  # the library rounds them to bfloat16
                found = np.asarray(found).astype(jnp.bfloat16).astype(np.float32)
                np.testing.assert_allclose(found, expected, rtol=2**-7, atol=0)
            else:
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", some_by_default(LOADED, "ct-fp8-tensor", "ct-fp8-block", "ct-w8a8"))
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    write_quantized(tmp_path, CASES[name], **ONE_LAYER)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    arch, _, params = loaded(tmp_path)
    ids = np.random.default_rng(0).integers(0, arch.vocab_size, 40).astype(np.int32)
    found, expected = np.asarray(run(params, arch, jnp.asarray(ids))[0]), reference_logits(oracle, ids)
    if CASES[name].fake in FAKE_INT8:  # see test_stored.py
        assert np.abs(found - expected).mean() < 0.01 * np.abs(expected).max()
    else:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_blocks_with_quantised_activations(tmp_path: Path) -> None:
    """The library takes only widths that groups divide."""
    config = compressed(
        "float-quantized",
        fp8("block", block_structure=[128, 128]),
        fp8("group", group_size=128, **DYNAMIC),
    )
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
    write_quantized(tmp_path, Case(config, write_fp8("block")), **ONE_LAYER, **sizes)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    arch, _, params = loaded(tmp_path)
    ids = np.random.default_rng(0).integers(0, arch.vocab_size, 40).astype(np.int32)
    found, expected = np.asarray(run(params, arch, jnp.asarray(ids))[0]), reference_logits(oracle, ids)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


ACTIVATIONS = {
    "int8": (ints(8, "token", **DYNAMIC), Activation("int8", None, dynamic=True)),
    "e4m3": (fp8("token", **DYNAMIC), Activation("e4m3", None, dynamic=True)),
    "e4m3 groups": (fp8("group", group_size=32, **DYNAMIC), Activation("e4m3", 32, dynamic=True)),
    "int8 with zero points": (
        ints(8, "token", symmetric=False, **DYNAMIC),
        Activation("int8", None, dynamic=True, symmetric=False),
    ),
    "MX e4m3": (
        fp8("group", group_size=32, scale_dtype="torch.uint8", **DYNAMIC),
        Activation("e4m3", 32, dynamic=True, power_of_two=True),
    ),
    "MX e2m1": (
        {**FP4, **GROUP, **DYNAMIC, "scale_dtype": "torch.uint8"},
        Activation("e2m1", 32, dynamic=True, power_of_two=True),
    ),
    "e2m1": ({**FP4, "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"}, Activation("e2m1", 16, dynamic=False)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_quantised_bit_for_bit(name: str) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    fields, activation = ACTIVATIONS[name]
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((300, 96)) * 10.0 ** rng.uniform(-3, 3, (300, 1))).astype(np.float32)
    x[0] = 0
    x[1] = np.round(x[1] * 8) / 8  # halfway between values
    factor = None if activation.dynamic else torch.tensor([7.0])
    args = QuantizationArgs(**fields)
    scale, zero = compute_dynamic_scales_and_zp(torch.tensor(x[None]), args, torch.nn.Identity(), global_scale=factor)
    wanted = fake_quantize(torch.tensor(x[None]), scale, zero, args, global_scale=factor).numpy()[0]
    stored = activations.Scales(jnp.float32(7))
    quantise = jax.jit(partial(activations.quantize, activation=activation, stored=stored, axis=None))
    values, further = quantise(x)
    np.testing.assert_array_equal(values if further is None else values * further, wanted)
