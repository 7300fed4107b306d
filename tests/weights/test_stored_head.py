"""The matrix of logits: the files decide if it is tied, as in transformers, whatever config.json says."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import transformers

from jaxserve import weights
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.weights import stored_head
from tests.checkpoints import FAMILIES, VARIED, write_checkpoint
from tests.parameters import some_by_default
from tests.quant.quantized_checkpoints import Case, compressed, ints, write_quantized
from tests.quant.writers import write_ints

FILE = "model.safetensors"
HEADS, EMBEDDINGS = ("lm_head.weight", "embed_out.weight"), ("embed_tokens.weight", "wte.weight", "embed_in.weight")


def switch(path: Path, *, tied: bool) -> None:
    """Change the switch alone."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))


def change_head(path: Path, head: Any) -> None:
    """Give the file another head: an array, or None for none, or "equal"."""
    tensors = safetensors.numpy.load_file(path / FILE)
    name = next(name for name in tensors if name in HEADS)
    embeddings = next(tensors[name] for name in tensors if name.endswith(EMBEDDINGS))
    del tensors[name]
    if head is not None:
        tensors[name] = embeddings.copy() if isinstance(head, str) else head
    safetensors.numpy.save_file(tensors, path / FILE, metadata={"format": "pt"})


def read(path: Path) -> tuple[ArchConfig, dict[str, Any]]:
    arch = registry.from_hf_config(weights.read_config(path))
    return arch, weights.load(path, registry.param_specs(arch), schemes=arch.schemes)


def oracle_head(path: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    return model.get_output_embeddings().weight.detach().numpy()


@pytest.mark.parametrize("family", some_by_default(list(FAMILIES), *VARIED, "gpt_neox", "gemma2"))
def test_stored_tensors_decide_whether_embeddings_are_tied(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, family, tie_word_embeddings=False)
    untied, params = read(tmp_path)
    assert not caplog.text
    switch(tmp_path, tied=True)
    arch, loaded = read(tmp_path)
    assert arch == untied
    assert not arch.tied_embeddings
    np.testing.assert_array_equal(loaded["lm_head"], params["lm_head"])
    np.testing.assert_array_equal(loaded["lm_head"], oracle_head(tmp_path))
    assert "the stored head differs from the embeddings" in caplog.text
    caplog.clear()
    change_head(tmp_path, "equal")
    arch, loaded = read(tmp_path)
    assert arch.tied_embeddings
    assert "lm_head" not in loaded
    change_head(tmp_path, None)
    assert read(tmp_path)[0] == arch
    assert not caplog.text
    switch(tmp_path, tied=False)
    assert read(tmp_path)[0] == arch
    assert "no head is stored" in caplog.text


def test_stored_head_serves_as_missing_embeddings(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    tensors = safetensors.numpy.load_file(tmp_path / FILE)
    head = tensors.pop("model.embed_tokens.weight")
    safetensors.numpy.save_file(tensors | {"lm_head.weight": head}, tmp_path / FILE, metadata={"format": "pt"})
    arch, loaded = read(tmp_path)
    assert arch.tied_embeddings
    np.testing.assert_array_equal(loaded["embed"], head)
    np.testing.assert_array_equal(head, oracle_head(tmp_path))


def test_head_that_differs_only_in_the_last_block_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_head, "_BLOCK_BYTES", 1000)
    write_checkpoint(tmp_path, "llama", tie_word_embeddings=False, dtype="bfloat16")
    switch(tmp_path, tied=True)
    change_head(tmp_path, "equal")
    assert read(tmp_path)[0].tied_embeddings
    head = safetensors.numpy.load_file(tmp_path / FILE)["lm_head.weight"]
    head[-1, -1] += 1
    change_head(tmp_path, head)
    assert not read(tmp_path)[0].tied_embeddings


def test_weights_with_another_head_do_not_fit_a_tied_model(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", tie_word_embeddings=False)
    untied, params = read(tmp_path)
    specs = registry.param_specs(dataclasses.replace(untied, tied_embeddings=True))
    named = safetensors.numpy.load_file(tmp_path / FILE)
    for given in (named, params):
        with pytest.raises(weights.CheckpointError, match=r"1 unexpected: lm_head"):
            weights.assemble(given, specs)
    with pytest.raises(weights.CheckpointError, match=r"lm_head\.weight, which differs from the tied embeddings"):
        weights.load(tmp_path, specs)
    equal = named | {"lm_head.weight": named["model.embed_tokens.weight"]}
    np.testing.assert_array_equal(weights.assemble(equal, specs)["embed"], named["model.embed_tokens.weight"])


def test_quantised_head_is_used(tmp_path: Path) -> None:
    case = Case(
        compressed("pack-quantized", ints(8, "channel"), ignore=[]), write_ints(8, -1), is_quantised=lambda _: True
    )
    model = write_quantized(tmp_path, case, tie_word_embeddings=False)
    switch(tmp_path, tied=True)
    arch, loaded = read(tmp_path)
    assert not arch.tied_embeddings
    np.testing.assert_allclose(loaded["lm_head"], model.lm_head.weight.detach().numpy(), rtol=1e-6)


def test_conversion_keeps_an_untied_head(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", "llama", tie_word_embeddings=False)
    switch(tmp_path / "hf", tied=True)
    arch, loaded = read(tmp_path / "hf")
    weights.convert(tmp_path / "hf", tmp_path / "orbax", registry.param_specs(arch))
    weights.convert(tmp_path / "orbax", tmp_path / "again", registry.param_specs(arch))
    for form in ("orbax", "again"):
        converted, again = read(tmp_path / form)
        assert converted == arch
        np.testing.assert_array_equal(again["lm_head"], loaded["lm_head"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 2, .* got 1000000000"),
        ({"vocab_size": 10**12}, "vocab_size must be at most"),
        ({"num_attention_heads": 10**9, "num_key_value_heads": 10**9}, "num_attention_heads must be at most"),
        ({"num_experts": 10**9}, "num_experts must be at most"),
    ],
)
def test_config_sizes_beyond_the_tensors_are_refused(tmp_path: Path, change: dict[str, int], named: str) -> None:
    write_checkpoint(tmp_path, "qwen3_moe" if "num_experts" in change else "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(weights.CheckpointError, match=f"^config.json: {named}[^\n]*$"):
        weights.read_config(tmp_path)
