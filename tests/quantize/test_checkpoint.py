"""Quantised checkpoints against transformers with compressed-tensors, and the command that writes them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import transformers

from jaxserve import cli, weights
from jaxserve.api.config import DEFAULT_MODEL
from jaxserve.api.embedded import embedded_model
from jaxserve.errors import ConfigError
from jaxserve.models import registry
from jaxserve.tools.quantizer import checkpoint
from jaxserve.tools.quantizer.calibration import calibration_sequences
from jaxserve.tools.quantizer.checkpoint import quantize_checkpoint
from jaxserve.tools.quantizer.scheme import SCHEMES, QuantizeOptions
from jaxserve.weights.safetensors_store import open_tensors
from quantization_quality import decode
from tests.checkpoints import reference_logits, write_checkpoint
from tests.oracles import torch
from tests.parameters import some_by_default

# Sizes of the default checkpoints are no multiples of a block.
CASES = {
    "int4-gptq": ("llama", {"dtype": "bfloat16"}),
    "int4-awq": ("gemma3", {"dtype": "bfloat16"}),
    "int4-rtn": ("mistral", {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2}),
    "int8": ("qwen2", {"intermediate_size": 50}),
    "w8a8-smoothquant": ("gpt_neo", {"intermediate_size": 50}),
    "fp8": ("granite", {"intermediate_size": 50}),
    "fp8-block": ("qwen3", {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}),
}
OTHER_NAMES = ("gpt_neox", "cohere")  # families whose modules have names of their own
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}


def calibration_file(path: Path, num_tokens: int = 64) -> str:
    ids = np.random.default_rng(0).integers(0, 131, (4, num_tokens // 4)).tolist()
    path.write_text("".join(json.dumps({"token_ids": line}) + "\n" for line in ids))
    return str(path)


def quantize(source: Path, target: Path, scheme: str, **options):
    file = calibration_file(source.with_suffix(".jsonl")) if SCHEMES[scheme].is_calibrated else None
    return quantize_checkpoint(source, target, QuantizeOptions(scheme, calibration=file, sequence_len=16, **options))


@pytest.mark.parametrize("scheme", some_by_default(CASES, "int4-gptq"))
def test_transformers_computes_what_the_file_says(tmp_path, scheme):
    pytest.importorskip("compressed_tensors", reason="of the extra `test`; not in every environment")
    family, sizes = CASES[scheme]
    model = write_checkpoint(tmp_path / "model", family, **sizes)
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"kept": true}')
    done = quantize(tmp_path / "model", tmp_path / "new", scheme, max_shard_bytes=20_000)
    assert len(list((tmp_path / "new").glob("model-*.safetensors"))) > 2
    assert json.loads((tmp_path / "new" / "tokenizer_config.json").read_text()) == {"kept": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32)
    tensors = open_tensors(tmp_path / "new")
    assert done.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    state = {name: torch.tensor(array) for name, array in decode(tensors).items()}
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    ids = np.random.default_rng(1).integers(0, 131, 24)
    quantized = [module for module in loaded.modules() if hasattr(module, "quantization_scheme")]
    assert quantized
    for module in quantized:  # activations are rounded only by those that are told to
        module.quantization_enabled = False
    np.testing.assert_array_equal(reference_logits(loaded, ids), reference_logits(model, ids))
    for module in quantized:
        module.quantization_enabled = True
    changed = (reference_logits(loaded, ids) != reference_logits(model, ids)).any()
    assert changed == (SCHEMES[scheme].activations is not None)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "model"
    write_checkpoint(path, "llama", dtype="bfloat16")
    return path


@pytest.mark.parametrize("scheme", some_by_default([s for s in SCHEMES if s != "fp8-block"], "int4-rtn", "fp8"))
def test_names_dtypes_and_values(model, tmp_path, scheme):
    done = quantize(model, tmp_path / "new", scheme)
    old, new = open_tensors(model), open_tensors(tmp_path / "new")
    config = weights.read_config(tmp_path / "new")["quantization_config"]
    name = "model.layers.1.self_attn.k_proj.weight"
    code = {"pack-quantized": "_packed", "int-quantized": "", "float-quantized": ""}[config["format"]]
    expected = {"": np.int8, "_packed": np.int32}[code] if not SCHEMES[scheme].is_float else ml_dtypes.float8_e4m3fn
    assert new[name + code].dtype == expected
    assert new[name + "_scale"].dtype == ml_dtypes.bfloat16
    assert new["model.embed_tokens.weight"].tobytes() == old["model.embed_tokens.weight"].tobytes()
    decoded = decode(new)
    assert decoded.keys() == old.keys()
    assert max(done.errors.values()) < (0.05 if SCHEMES[scheme].bits == 4 else 2e-3)
    if not SCHEMES[scheme].smoothing:
        for name, array in decoded.items():
            exact = np.asarray(old[name]).astype(np.float32)
            assert np.square(array - exact).sum() < 0.05 * np.square(exact).sum()


@pytest.mark.parametrize("scheme", some_by_default([*SCHEMES, *OTHER_NAMES], *OTHER_NAMES))
def test_a_written_checkpoint_is_read_unchanged(tmp_path, scheme):
    family, scheme = (scheme, "int8") if scheme in OTHER_NAMES else (CASES[scheme][0], scheme)
    write_checkpoint(tmp_path / "model", family, dtype="bfloat16", **SIZES)
    quantize(tmp_path / "model", tmp_path / "new", scheme)
    arch = registry.from_hf_config(weights.read_config(tmp_path / "new"))
    specs = registry.param_specs(arch)
    read = weights.load(tmp_path / "new", specs, jnp.float32, schemes=arch.schemes)
    expected = weights.assemble(decode(open_tensors(tmp_path / "new")), specs, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, read, expected)


def test_nothing_is_left_of_a_run_that_fails(model, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_rounded", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quantize(model, tmp_path / "new", "int8")
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".jsonl"]


def test_command_and_its_errors(model, tmp_path, capsys):
    bad, empty = tmp_path / "bad.jsonl", tmp_path / "empty.txt"
    bad.write_text('{"text": 5}\n')
    empty.write_text("\n")
    for flags, text in [
        (["--scheme", "int8", "--group-size", "32"], "for schemes with groups"),
        (["--scheme", "int4-rtn", "--group-size", "48"], "must divide the input sizes of all matrices, [64, 96]"),
        (["--scheme", "fp8-block"], "multiples of 128"),
        (["--scheme", "int4-gptq", "--calibration", str(bad)], "bad.jsonl, line 1 must have a `text` or `token_ids`"),
        (["--scheme", "int4-gptq", "--calibration", str(tmp_path / "none")], "must be readable UTF-8"),
        (["--scheme", "int4-gptq", "--calibration", str(empty)], "must have text, but"),
        (["--scheme", "int4-gptq", "--sequence-len", "0"], "sequence_len must be a positive integer, got 0"),
    ]:
        assert cli.main(["quantize", str(model), str(tmp_path / "new"), *flags]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert text in line
        assert not (tmp_path / "new").exists()
    assert cli.main(["quantize", str(model), str(model), "--scheme", "int8"]) == 2
    assert "must be absent or an empty directory" in capsys.readouterr().err
    assert cli.main(["quantize", str(model), str(tmp_path / "new"), "--scheme", "int4-rtn"]) == 0
    assert "int4-rtn in groups of 32" in capsys.readouterr().err
    assert cli.main(["quantize", str(tmp_path / "new"), str(tmp_path / "twice"), "--scheme", "int8"]) == 2
    assert "must be an unquantised checkpoint" in capsys.readouterr().err


def test_matrices_that_are_stored_transposed_are_refused(tmp_path):
    write_checkpoint(tmp_path / "model", "gpt2")
    with pytest.raises(ConfigError, match=r"must be stored as \[out, in\]"):
        quantize(tmp_path / "model", tmp_path / "new", "int8")


def test_calibration_text_is_cut_into_sequences(tmp_path):
    model = embedded_model(DEFAULT_MODEL)
    sizes = {"num_sequences": 3, "sequence_len": 8, "vocab_size": 4096}
    (tmp_path / "plain.txt").write_text("import os\n" * 20)
    plain = calibration_sequences(model, str(tmp_path / "plain.txt"), **sizes)
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": "import os\n" * 20}))
    assert plain.shape == (3, 8)
    np.testing.assert_array_equal(calibration_sequences(model, str(tmp_path / "lines.jsonl"), **sizes), plain)
    (tmp_path / "ids.jsonl").write_text('{"token_ids": [1, 2, 3]}\n\n{"token_ids": [4, 5]}\n')
    short = calibration_sequences(model, str(tmp_path / "ids.jsonl"), **sizes)
    np.testing.assert_array_equal(short, jnp.array([[1, 2, 3, 4, 5]]))
    shipped = calibration_sequences(model, None, **{**sizes, "num_sequences": 40})
    assert shipped.shape == (40, 8)
    assert len(np.unique(shipped)) > 50
    with pytest.raises(ConfigError, match="below 4"):
        calibration_sequences(model, str(tmp_path / "ids.jsonl"), **{**sizes, "vocab_size": 4})
