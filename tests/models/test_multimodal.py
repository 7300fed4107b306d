"""Multimodal checkpoints, whose text part is served, against transformers in float32."""

import logging
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from tests import checkpoints
from tests.models.test_parity import assert_close, load_logits

VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 64}
VISION |= {"num_position_embeddings": 16, "patch_size": 4}
TOKENS = {name: 3 + i for i, name in enumerate(["image_token_id", "video_token_id", "vision_start_token_id"])}


def write_multimodal(path: Path, family: str, *, tied: bool) -> transformers.PreTrainedModel:
    """Write a multimodal checkpoint whose text part is of a family; return the model."""
    text = checkpoints.build_config(family, tie_word_embeddings=tied).to_dict()
    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[family]
    fields = {"text_config": text, "vision_config": VISION, "tie_word_embeddings": tied, **TOKENS}
    config = getattr(transformers, f"{name}Config")(**fields, vision_end_token_id=6)
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


@pytest.mark.parametrize(("family", "tied"), [("qwen3_5", True), ("qwen3_5_moe", False)])
def test_the_text_part_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, tied: bool) -> None:
    model = write_multimodal(tmp_path, family, tied=tied)
    if family in checkpoints.MIXTURES:
        with_fused_experts(tmp_path / "model.safetensors")
    with caplog.at_level(logging.INFO):
        arch, token_ids, logits, _ = load_logits(tmp_path)
    assert "the text part alone is served; these parts are not read: model.visual." in caplog.text
    assert arch.tied_embeddings == tied
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(token_ids.astype(np.int64))[None]).logits[0].numpy()
    assert_close(logits, expected)
