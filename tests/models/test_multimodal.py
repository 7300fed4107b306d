"""Multimodal checkpoints, whose text part is served, against transformers in float32."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import transformers

from jaxserve.errors import ConfigError
from jaxserve.models import registry
from tests import checkpoints
from tests.models.test_parity import assert_close, load_logits
from tests.oracles import torch

VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 64}
VISION |= {"num_position_embeddings": 16, "patch_size": 4}
TOKENS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGLIP = SIZES | {"image_size": 8, "patch_size": 4, "vision_use_head": False}


GEMMA4_VISION = {**SIZES, "head_dim": 8, "num_key_value_heads": 2, "patch_size": 4, "position_embedding_size": 16}
PIXTRAL = {"model_type": "pixtral", **SIZES, "head_dim": 8, "image_size": 8, "patch_size": 4}
NAMES = {
    "gemma3": "Gemma3",
    "gemma4": "Gemma4",
    "gemma4_moe": "Gemma4",
    "mistral": "Mistral3",
    "ministral3": "Mistral3",
}
NAMES |= {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe", "qwen3": "Qwen3VL", "qwen3_moe": "Qwen3VLMoe"}
DEEP = VISION | {"deepstack_visual_indexes": [0]}
OTHERS = {
    "Gemma3": "multi_modal_projector., vision_tower.",
    "Gemma4": "model.embed_vision., model.vision_tower.",
    "Mistral3": "multi_modal_projector., vision_tower.",
}


def write_multimodal(path: Path, family: str, *, tied: bool) -> transformers.PreTrainedModel:
    """Write a multimodal checkpoint whose text part is of a family; return the model."""
    text = checkpoints.build_config(family, tie_word_embeddings=tied).to_dict()
    name = NAMES[family]
    own = {
        "Gemma3": {"vision_config": SIGLIP, "mm_tokens_per_image": 1},
        "Gemma4": {"vision_config": GEMMA4_VISION, "audio_config": None},
        "Mistral3": {"vision_config": PIXTRAL},
        "Qwen3VL": {"vision_config": DEEP, **TOKENS},
        "Qwen3VLMoe": {"vision_config": DEEP, **TOKENS},
    }.get(name, {"vision_config": VISION, **TOKENS})
    if name.startswith("Qwen3VL"):
        text |= {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}}
        del text["model_type"]
    config = getattr(transformers, f"{name}Config")(text_config=text, tie_word_embeddings=tied, **own)
    model = getattr(transformers, f"{name}ForConditionalGeneration")._from_config(config, dtype=torch.float32).eval()
    if family in checkpoints.MIXTURES:
        model.set_experts_implementation("eager")
    checkpoints.randomize(model)
    model.save_pretrained(path)
    return model


def with_fused_experts(file: Path) -> None:
    """Write the experts of each layer as two tensors, as checkpoints on the hub may have them."""
    tensors = safetensors.numpy.load_file(file)
    modules = sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name})
    for module in modules:
        count = sum(name.startswith(f"{module}.experts.") for name in tensors) // 3
        gate, up, down = (
            np.stack([tensors.pop(f"{module}.experts.{e}.{part}_proj.weight") for e in range(count)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{module}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{module}.experts.down_proj"] = down
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})


def with_transposed_experts(file: Path) -> None:
    """Write each expert's matrices as [in, out], as Qwen3-VL's published checkpoints have them."""
    tensors = safetensors.numpy.load_file(file)
    stacks = {name: t.swapaxes(1, 2).copy() for name, t in tensors.items() if ".experts." in name}
    safetensors.numpy.save_file(tensors | stacks, file, metadata={"format": "pt"})


CASES = [("qwen3_5_moe", False), ("gemma3", True), ("gemma4", True), ("mistral", False), ("qwen3_moe", False)]
OF_THE_SAME_CLASSES = [("qwen3_5", True), ("gemma4_moe", True), ("ministral3", False), ("qwen3", True)]


@pytest.mark.parametrize(
    ("family", "tied"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in OF_THE_SAME_CLASSES)]
)
def test_the_text_part_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, tied: bool) -> None:
    model = write_multimodal(tmp_path, family, tied=tied)
    if family == "qwen3_5_moe":
        with_fused_experts(tmp_path / "model.safetensors")
    if family == "qwen3_moe":
        with_transposed_experts(tmp_path / "model.safetensors")
    with caplog.at_level(logging.INFO):
        arch, token_ids, logits, _ = load_logits(tmp_path)
    others = OTHERS.get(NAMES[family], "model.visual.")
    assert f"only the text part is served; these parts are not read: {others}" in caplog.text
    assert arch.tied_embeddings == tied
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(token_ids.astype(np.int64))[None]).logits[0].numpy()
    assert_close(logits, expected)


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL"])
def test_flat_configs_have_a_text_part_too(tmp_path: Path, name: str) -> None:
    """Published files have the text part's fields beside `vision_config`, and its tensors without `language_model`."""
    text = {**checkpoints.SIZES, "rope_parameters": {"rope_type": "mrope", "mrope_section": [4, 2, 2]}}
    text |= {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "patch_size": 4}
    if name == "Qwen2_5_VL":
        vision = VISION | {"out_hidden_size": 64, "fullatt_block_indexes": [0]}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **TOKENS)
    model = getattr(transformers, f"{name}ForConditionalGeneration")._from_config(config, dtype=torch.float32).eval()
    checkpoints.randomize(model)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    flat = {**saved.pop("text_config"), **saved}
    scaling = {"type": "mrope", "mrope_section": [4, 2, 2]}
    flat |= {"rope_scaling": scaling, "rope_theta": flat.pop("rope_parameters")["rope_theta"]}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    _, token_ids, logits, _ = load_logits(tmp_path)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(token_ids.astype(np.int64))[None]).logits[0].numpy()
    assert_close(logits, expected)


@pytest.mark.parametrize("name", ["InternVLForConditionalGeneration", "Qwen2AudioForConditionalGeneration"])
def test_others_are_refused_by_name(name: str) -> None:
    text = checkpoints.build_config("llama").to_dict()
    with pytest.raises(ConfigError, match=f"Gemma3ForConditionalGeneration.* text parts, got .*{name}.*; convert"):
        registry.from_hf_config({"architectures": [name], "text_config": text})


def test_text_parts_leave_out_defaults() -> None:
    """Read a config.json like the published one of Gemma 3 4B."""
    rope = {"rope_type": "linear", "factor": 8.0}
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**text, "rope_scaling": rope}}
    arch, full = registry.from_hf_config(config), transformers.Gemma3TextConfig(**text)
    assert (arch.vocab_size, arch.attention.num_heads, arch.attention.num_kv_heads) == (
        full.vocab_size,
        full.num_attention_heads,
        4,
    )
    assert (arch.attention.head_dim, arch.norm_eps, arch.windows[0]) == (full.head_dim, full.rms_norm_eps, 1024)
