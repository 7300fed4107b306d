"""GGUF files: weights are those of the gguf package, logits and configurations those of transformers."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from jaxserve import LLM, ConfigError, EngineConfig, weights
from jaxserve.layers.linear import linear
from jaxserve.layers.mlp import swiglu
from jaxserve.layers.weight_formats.packed import NativeMatrix
from jaxserve.layers.weight_formats.stored_matrix import StoredMatrix
from jaxserve.models import registry
from jaxserve.models.params import device_bytes
from jaxserve.pallas_kernels import packed_linear
from jaxserve.text.loading import load_hf_tokenizer, load_tokenizer
from jaxserve.tools.planner.plan import make_plan
from jaxserve.tools.planner.program import abstract_params
from jaxserve.tools.planner.targets import parse_target
from jaxserve.weights import gguf_file
from jaxserve.weights.gguf_blocks import BLOCK_TYPES
from jaxserve.weights.quantized.config import GGUF_SCHEMES
from jaxserve.weights.rows import leaf_at
from tests import tiny_tokenizers
from tests.checkpoints import ROPES, reference_logits
from tests.e2e.sizes import SIZES
from tests.models.test_parity import run
from tests.oracles import torch
from tests.parameters import some_by_default
from tests.quant.loaded import ONE_LAYER, UNOPTIMIZED, all_rows, loaded, torch_rows
from tests.quant.test_stored import GREEDY, PROMPT, needs_kernels
from tests.soon_compiled import few_programs
from tests.weights.gguf_files import KINDS, add_vocabulary, fuse_qkv, replace, write_gguf


@pytest.mark.parametrize("kind", KINDS)
def test_weights_equal_the_gguf_packages_dequantisation(tmp_path: Path, kind: str) -> None:
    """Every parameter is bit for bit what `gguf.quants.dequantize` returns, and matrices are held as stored."""
    model = write_gguf(tmp_path / "model.gguf", kind, **ONE_LAYER)
    arch, specs, params = loaded(tmp_path)
    dequantised = weights.load(tmp_path, specs, schemes=arch.schemes)
    for spec in specs:
        found, expected = leaf_at(params, spec.path), torch_rows(model, spec)
        np.testing.assert_array_equal(leaf_at(dequantised, spec.path), expected)
        if kind in GGUF_SCHEMES and spec.is_matrix:
            assert isinstance(found, StoredMatrix)
            assert found.scheme == GGUF_SCHEMES[kind]
            if kind in ("Q8_0", "Q4_0"):  # no more bytes than in the file
                block = BLOCK_TYPES[kind]
                assert device_bytes(found) == expected.size // block.num_columns * block.num_bytes
            if spec.path[-1] == "qkv_proj":  # fused, and of rows in another order
                np.testing.assert_array_equal(all_rows(found), expected)


@needs_kernels
@pytest.mark.parametrize("kind", some_by_default(list(GGUF_SCHEMES), "Q4_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"))
def test_native_kernels_use_the_stored_elements(tmp_path: Path, kind: str) -> None:
    """Products are those of the encoded weights in float64; minima are zero points that are not whole."""
    model = write_gguf(tmp_path / "model.gguf", kind, **ONE_LAYER)
    _, specs, params = loaded(tmp_path, native=True)
    multiply = jax.jit(linear, static_argnames="activation", compiler_options=UNOPTIMIZED)
    for spec in specs:
        if not spec.path[-1].endswith("proj"):
            continue
        matrix, wide = leaf_at(params, spec.path), torch_rows(model, spec).astype(np.float64)
        assert isinstance(matrix, NativeMatrix)
        x = np.random.default_rng(1).standard_normal((5, spec.shape[1])).astype(np.float32)
        wanted = x.astype(np.float64) @ wide.T
        if spec.gated:
            gate, up = np.split(wanted, 2, axis=1)
            wanted = gate / (1 + np.exp(-gate)) * up
        activation = swiglu if spec.gated else None
        np.testing.assert_allclose(multiply(x, matrix, activation=activation), wanted, rtol=1e-5, atol=2e-5)


GEMMA = {"query_pre_attn_scalar": 40, "tie_word_embeddings": True, "num_hidden_layers": 7, "layer_types": None}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


READ_BY_TRANSFORMERS = ("tied", "gemma2", "gemma3", "phi3", "qwen2_moe", "qwen3_moe")
BY_DEFAULT = ("Q8_0", "Q4_K", "qwen2", "llama3", "mixed", "gemma2", "gemma3 linear", "phi3 longrope")
BY_DEFAULT += ("phi2 fused", "mixtral", "qwen2_moe", "qwen3_moe")
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
EXPERTS = {"moe_intermediate_size": 96, "decoder_sparse_step": 1, "mlp_only_layers": []}
CASES: dict[str, dict[str, Any]] = {  # one layer's names, but for Gemma
    **{kind: {"kind": kind} for kind in KINDS},
    "tied": {"kind": "Q8_0", "tie_word_embeddings": True},
    "biases": {"kind": "F16", "attention_bias": True, "mlp_bias": True},
    "qwen2": {"kind": "Q4_0", "family": "qwen2", "use_sliding_window": False},
    "qwen3": {"kind": "Q4_0", "family": "qwen3"},
    "linear": {"kind": "Q4_0", "rope_parameters": ROPES["linear"]},
    "yarn": {"kind": "Q4_0", "rope_parameters": ROPES["yarn"]},
    "llama3": {"kind": "Q4_0", "rope_parameters": {**ROPES["llama3"], "original_max_position_embeddings": 8192}},
    "gemma2": {"kind": "Q4_0", "family": "gemma2", **GEMMA, "num_hidden_layers": 2},
    "gemma3": {"kind": "Q8_0", "family": "gemma3", **GEMMA},
    "gemma3 linear": {"kind": "F16", "family": "gemma3", **GEMMA, "rope_parameters": GEMMA_ROPE},
    "phi2": {"kind": "Q4_0", "family": "phi"},
    "phi2 fused": {"kind": "Q4_0", "family": "phi", "change": fuse_qkv},
    "phi3": {"kind": "Q4_0", "family": "phi3", "sliding_window": None, "rope_parameters": PLAIN_ROPE},
    "phi3 window": {"kind": "F16", "family": "phi3", "rope_parameters": PLAIN_ROPE},
    "phi3 longrope": {"kind": "F16", "family": "phi3", "sliding_window": None},
    "mixtral": {"kind": "Q4_0", "family": "mixtral", "sliding_window": None, "head_dim": 40},
    "qwen2_moe": {"kind": "Q8_0", "family": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"kind": "Q4_0", "family": "qwen3_moe", **EXPERTS, "norm_topk_prob": True},
    "olmoe": {"kind": "F16", "family": "olmoe", "norm_topk_prob": False},
    # As llama.cpp mixes types: of a product of several matrices, the value is of another one.
    "mixed": {"kind": lambda name: "Q5_0" if "v_proj" in name else "F16" if "lm_head" in name else "Q4_0"},
}


@pytest.mark.parametrize("name", some_by_default(list(CASES), *BY_DEFAULT))
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    """Logits are those of the model that was written; transformers reads the same from the file."""
    model = write_gguf(tmp_path / "model.gguf", **{**ONE_LAYER, **CASES[name]})
    is_native = name not in KINDS and packed_linear.unsupported("int4", "cpu") is None  # has smaller programs
    arch, _, params = loaded(tmp_path / "model.gguf", native=is_native)
    ids = np.random.default_rng(0).integers(0, arch.vocab_size, 40).astype(np.int32)
    expected = reference_logits(model, ids)
    np.testing.assert_allclose(np.asarray(run(params, arch, jnp.asarray(ids))[0]), expected, rtol=0, atol=1e-4)
    if name in KINDS or name in READ_BY_TRANSFORMERS:
        # Of some families transformers reads the tensors alone: it has defaults for what files leave out.
        known = {} if name in KINDS or name == "tied" else {"config": model.config}
        again = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file="model.gguf", dtype=torch.float32, **known
        )
        if name.endswith("moe"):
            again.set_experts_implementation("eager")
        np.testing.assert_array_equal(reference_logits(again, ids), expected)


CONVERTED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False},
    **dict.fromkeys(("gemma2", "gemma3"), GEMMA),
    "phi": {},
    "phi3": {"sliding_window": 9, "rope_parameters": PLAIN_ROPE},
    "mixtral": {"sliding_window": None},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "olmoe": {"norm_topk_prob": False},
}


@pytest.mark.parametrize("family", CONVERTED)
def test_config_equals_the_converted_models(tmp_path: Path, family: str) -> None:
    model = write_gguf(tmp_path / "model.gguf", "F16", family=family, **CONVERTED[family])
    model.save_pretrained(tmp_path / "hf")
    converted, original = (
        registry.from_hf_config(weights.read_config(path)) for path in (tmp_path / "model.gguf", tmp_path / "hf")
    )
    same = dataclasses.replace(converted, dtype=original.dtype, norm_eps=original.norm_eps)
    assert same.with_attention(window=original.windows) == original
    assert converted.norm_eps == pytest.approx(original.norm_eps)


def test_early_files_with_separate_expert_tensors_are_read(tmp_path: Path) -> None:
    def split(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if "_exps" in name]:
            data, kind = tensors.pop(name)
            for expert, matrix in enumerate(data):
                tensors[name.replace("_exps", f".{expert}")] = matrix, kind

    sizes = {**ONE_LAYER, "family": "mixtral", "sliding_window": None, "head_dim": 40}
    write_gguf(tmp_path / "new.gguf", "Q4_0", **sizes)
    write_gguf(tmp_path / "early.gguf", "Q4_0", change=split, **sizes)
    (one, _, new), (other, _, early) = (loaded(tmp_path / f"{name}.gguf") for name in ("new", "early"))
    assert {**vars(one), "schemes": None} == {**vars(other), "schemes": None}  # rules name each expert
    jax.tree.map(np.testing.assert_array_equal, new, early)


def test_gemma_fields(tmp_path: Path) -> None:
    """Files leave out the factor of queries, which the largest models have otherwise, and may list local layers."""

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("gemma3.rope.freq_base_swa", 5e3)
        writer.add_array("gemma3.attention.sliding_window_pattern", [True, False])

    sizes = {**GEMMA, "num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 32}
    write_gguf(tmp_path / "local.gguf", "F16", family="gemma3", metadata=metadata, **sizes)
    config = weights.read_config(tmp_path / "local.gguf")
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert config["rope_parameters"]["sliding_attention"] == {"rope_type": "default", "rope_theta": 5e3}
    assert config["query_pre_attn_scalar"] == 40
    write_gguf(tmp_path / "deep.gguf", "F16", family="gemma2", **{**sizes, "num_hidden_layers": 46})
    assert weights.read_config(tmp_path / "deep.gguf")["query_pre_attn_scalar"] == 96 // 4


@pytest.mark.parametrize(("name", "wanted"), [("attn_factor", 0.5 * (0.1 * np.log(4) + 1)), ("yarn_attn_factor", 0.5)])
def test_yarn_factors(tmp_path: Path, name: str, wanted: float) -> None:
    """llama.cpp multiplies YaRN's factor of attention; the converter stores transformers', which replaces it."""

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("llama.rope.scaling.yarn_beta_fast", 16.0)
        writer.add_float32(f"llama.rope.scaling.{name}", 0.5)

    write_gguf(tmp_path / "model.gguf", "F16", metadata=metadata, rope_parameters=ROPES["yarn"], **ONE_LAYER)
    rope = weights.read_config(tmp_path)["rope_parameters"]
    assert rope["attention_factor"] == pytest.approx(wanted)
    assert rope["beta_fast"] == 16
    assert rope["original_max_position_embeddings"] == 16


# Engines


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("kind", some_by_default(list(KINDS), "Q4_0", "Q4_K"))
def test_planned_bytes_equal_loaded_bytes(tmp_path: Path, kind: str, num_devices: int) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, kind, **ONE_LAYER)
    arch, _, params = loaded(path)
    planned = abstract_params(arch, jnp.dtype("float32"), None, num_devices)
    assert jax.tree.structure(planned) == jax.tree.structure(params)
    held, size = device_bytes(params), sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(planned))
    assert size == held if num_devices == 1 else held / 2 < size < held
    if num_devices == 1:
        _, _, packed = loaded(path, native=packed_linear.unsupported("int4", "cpu") is None)
        config = EngineConfig(str(path), dtype="float32")
        assert make_plan(config, parse_target("cpu")).memory.weights == device_bytes(packed)


@pytest.mark.parametrize("kind", some_by_default(list(KINDS), "Q4_K"))
def test_orbax_keeps_every_value(tmp_path: Path, kind: str) -> None:
    write_gguf(tmp_path / "model.gguf", kind, **ONE_LAYER)
    arch, specs, params = loaded(tmp_path / "model.gguf")
    weights.convert(tmp_path / "model.gguf", tmp_path / "orbax", specs, schemes=arch.schemes)
    weights.convert(tmp_path / "orbax", tmp_path / "hf", specs, schemes=arch.schemes)
    for copy in ("orbax", "hf"):
        again, _, copied = loaded(tmp_path / copy)
        assert again == arch
        for found, wanted in zip(jax.tree.leaves(copied), jax.tree.leaves(params), strict=True):
            assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


def test_an_engine_serves_and_takes_other_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = {name: tmp_path / f"{name}.gguf" for name in "abcd"}
    model = write_gguf(paths["a"], "Q4_0", **ONE_LAYER)
    other = write_gguf(paths["b"], "Q4_0", seed=1, **ONE_LAYER)
    write_gguf(paths["c"], "Q8_0", **ONE_LAYER)
    write_gguf(paths["d"], "F16", **ONE_LAYER)
    with caplog.at_level(logging.INFO), few_programs():
        llm = LLM(str(paths["a"]), skip_tokenizer_init=True, **SIZES)
    with llm:

        def check(wanted: transformers.PreTrainedModel) -> None:
            (output,) = llm.generate([PROMPT], GREEDY)
            prompt = torch.tensor([PROMPT["prompt_token_ids"]])
            ids = wanted.generate(prompt, do_sample=False, max_new_tokens=6, eos_token_id=None)[0]
            assert output.outputs[0].token_ids == ids[prompt.shape[1] :].tolist()

        check(model)
        llm.update_weights(paths["b"])
        check(other)
        for refused in ("c", "d"):
            with pytest.raises(ConfigError, match="got another quantization_config"):
                llm.update_weights(paths[refused])
        check(other)
    (line,) = [line for line in caplog.messages if "checkpoint:" in line]
    assert line.startswith("gguf checkpoint: 6 matrices gguf Q4_0: int4 weights by groups of 32")
    with pytest.raises(ConfigError, match=r"exactly one \.gguf file, got a\.gguf, b\.gguf"):
        LLM(str(tmp_path), skip_tokenizer_init=True)


def vocabulary() -> tuple[tiny_tokenizers.Tokenizer, list[str], list[str]]:
    tokenizer = tiny_tokenizers.byte_level()
    ids = tokenizer.get_vocab()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return tokenizer, sorted(ids, key=ids.__getitem__), [" ".join(pair) for pair in merges]


def test_tokenizer_in_the_file_encodes_like_the_original(tmp_path: Path) -> None:
    """Texts become the ids of the tokenizer that was converted, after the token that begins a sequence."""
    original, tokens, merges = vocabulary()
    path = tmp_path / "model.gguf"

    def metadata(writer: gguf.GGUFWriter) -> None:
        add_vocabulary(writer, tokens, merges)
        writer.add_chat_template("{{ messages[0]['content'] }}!")

    write_gguf(path, "Q8_0", metadata=metadata, vocab_size=len(tokens), **ONE_LAYER)
    text = "Once upon a time there was\n\ta 東京 engine."
    for place in (path, tmp_path):
        tokenizer = load_tokenizer(place)
        ids = list(tokenizer.encode(text))
        assert ids == [1, *original.encode(text).ids]
        assert tokenizer.decode(ids[1:]) == text
        assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
        assert tokenizer.chat_template == {"default": "{{ messages[0]['content'] }}!"}
        assert load_hf_tokenizer(place)(text).input_ids == ids


def test_missing_tokenizer_error_names_the_options(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "F16", **ONE_LAYER)
    with pytest.raises(ConfigError, match=r"must have a tokenizer .* pass a directory as tokenizer="):
        LLM(str(tmp_path / "model.gguf"))


# Faults


def add_unknown_type(tensors: dict[str, Any]) -> None:
    w = np.zeros((224, 160), np.float32)
    kind = gguf.GGMLQuantizationType.MXFP4
    tensors["blk.0.ffn_up.weight"] = gguf.quants.quantize(w, kind), kind


def quantise_a_norm(tensors: dict[str, Any]) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    tensors["output_norm.weight"] = gguf.quants.quantize(np.ones(160, np.float32), kind), kind


def other_rope(tensors: dict[str, Any]) -> None:
    tensors["rope_freqs.weight"] = np.linspace(1, 5, 20, dtype=np.float32), gguf.GGMLQuantizationType.F32


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"change": add_unknown_type}, r"tensors of the types F32.*got blk\.0\.ffn_up\.weight of MXFP4"),
    "norm": ({"change": quantise_a_norm}, r"quantised types only for matrices, got output_norm\.weight Q8_0"),
    "missing": ({"change": lambda t: t.pop("blk.0.ffn_down.weight")}, r"1 missing: model\.layers\.0\.mlp\.down_proj"),
    "missing part": ({"kind": "Q8_0", "change": lambda t: t.pop("blk.0.attn_k.weight")}, r"1 missing: .*k_proj"),
    "embedding": ({"change": lambda t: t.pop("token_embd.weight")}, r"must hold token_embd\.weight"),
    "unexpected": (
        {"change": lambda t: t.update({"blk.0.ffn_gate_inp.weight": t["output_norm.weight"]})},
        r"1 unexpected: blk\.0\.ffn_gate_inp\.weight",
    ),
    "shape": (
        {"change": lambda t: t.update({"output.weight": t["blk.0.ffn_up.weight"]})},
        r"of another shape: lm_head",
    ),
    "rope": ({"change": other_rope}, r"the factors of Llama 3's RoPE in rope_freqs\.weight"),
    "scaling": ({"metadata": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)}, "got 'longrope'"),
    "experts": ({"family": "qwen2", "metadata": lambda w: w.add_expert_count(4)}, "as qwen2 is, got 4"),
    "experts' weights": (
        {"family": "mixtral", "head_dim": 40, "metadata": lambda w: w.add_expert_weights_scale(2.5)},
        r"have llama\.expert_weights_scale 0\.0 or 1\.0, or none, got 2\.5",
    ),
    "shards": ({"metadata": lambda w: w.add_uint16("split.count", 3)}, "must be the first of a model's files"),
    "number of shards": ({"metadata": lambda w: w.add_string("split.count", "3")}, "must be the first of a model's"),
    "partial": (
        {"metadata": lambda w: replace(w, "llama.rope.dimension_count", 20)},
        "partial_rotary_factor must be 1",
    ),
    "values": ({"metadata": lambda w: replace(w, "llama.attention.value_length", 20)}, "one size, got 40 and 20"),
    "layers": (
        {"metadata": lambda w: replace(w, "llama.feed_forward_length", [224, 96])},
        r"one llama\.feed_forward_length for all layers, got \[224, 96\]",
    ),
    "absent": (
        {"metadata": lambda w: w.kv_data[0].pop("llama.block_count")},
        r"positive llama\.block_count .* got None",
    ),
    "text": ({"metadata": lambda w: replace(w, "llama.block_count", "two")}, r"llama\.block_count .* got two"),
    "count": ({"metadata": lambda w: replace(w, "llama.block_count", 2**31)}, "must hold 2147483648 layers"),
    "model": ({"metadata": lambda w: replace(w, "general.architecture", "mamba")}, r"'qwen3moe'\], got mamba"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_unsupported_models_are_named(tmp_path: Path, name: str) -> None:
    fault, message = FAULTS[name]
    path = tmp_path / "model.gguf"
    write_gguf(path, **{"kind": "F16", **ONE_LAYER, **fault})
    with pytest.raises(ConfigError, match=message):
        LLM(str(path), skip_tokenizer_init=True, **SIZES)


def test_missing_gguf_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "model.gguf", "F16", **ONE_LAYER)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"needs the gguf package: pip install 'jaxserve\[gguf\]'"):
        LLM(str(tmp_path / "model.gguf"), skip_tokenizer_init=True)


def test_shards_are_one_model(tmp_path: Path) -> None:
    """Any file of a model stands for all, and so does their directory; the tokenizer is that of the first."""
    _, tokens, merges = vocabulary()
    sizes = {**ONE_LAYER, "vocab_size": len(tokens), "metadata": lambda w: add_vocabulary(w, tokens, merges)}
    whole, directory = tmp_path / "whole.gguf", tmp_path / "shards"
    directory.mkdir()
    for path, count in ((whole, 0), (directory / "model.gguf", 5)):
        write_gguf(path, "Q8_0", shard_tensors=count, **sizes)
    first, second, third = sorted(directory.iterdir())
    assert first.name == "model-00001-of-00003.gguf"
    _, _, expected = loaded(whole)
    for path in (first, second, directory):
        assert weights.read_config(path) == weights.read_config(whole)
        assert load_tokenizer(path).encode("a 東京 engine") == load_tokenizer(whole).encode("a 東京 engine")
    jax.tree.map(np.testing.assert_array_equal, loaded(directory)[2], expected)
    content = third.read_bytes()
    third.unlink()
    with pytest.raises(weights.CheckpointError, match=r"all 3 files .* got model-00003-of-00003\.gguf absent"):
        weights.read_config(first)
    third.write_bytes(content[:-64])
    with pytest.raises(weights.CheckpointError, match=r"00003-of-00003\.gguf must be a complete GGUF file"):
        weights.read_config(directory)
    third.write_bytes(second.read_bytes())
    with pytest.raises(weights.CheckpointError, match=r"00003-of-00003\.gguf must be number 2 of 3 files, got 1"):
        weights.read_config(first)
    third.write_bytes(content)
    first.unlink()
    with pytest.raises(weights.CheckpointError, match="must be the first of a model's files"):
        weights.read_config(second)


def test_a_replaced_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for kind in ("F16", "Q8_0"):
        write_gguf(path, kind, **ONE_LAYER)
        assert ("quantization_config" in weights.read_config(path)) == (kind == "Q8_0")
        os.utime(path, ns=(1, 1))


def test_vocabularies_are_skipped(tmp_path: Path) -> None:
    """Arrays too long to be read, of strings and of numbers, change nothing that comes behind them."""

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list([f"token {i}" for i in range(5000)])
        writer.add_token_scores([float(i) for i in range(5000)])
        writer.add_array("short", [3, 4])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    write_gguf(tmp_path / "long.gguf", "Q8_0", metadata=metadata, **ONE_LAYER)
    write_gguf(tmp_path / "short.gguf", "Q8_0", rope_parameters=rope, **ONE_LAYER)
    assert weights.read_config(tmp_path / "long.gguf") == weights.read_config(tmp_path / "short.gguf")
    assert gguf_file.open_file(tmp_path / "long.gguf").metadata["short"] == [3, 4]
    (_, _, long), (_, _, short) = (loaded(tmp_path / f"{name}.gguf") for name in ("long", "short"))
    jax.tree.map(np.testing.assert_array_equal, long, short)
