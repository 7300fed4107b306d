"""Images in plans: the tower's weights, the cost of an image and the encoder cache, against published sizes."""

import json
from pathlib import Path

import pytest

from jaxserve import EngineConfig
from jaxserve.tools.planner.plan import Plan, make_plan
from jaxserve.tools.planner.report import build_report, render
from jaxserve.tools.planner.targets import parse_target
from tests.vision_checkpoints import PUBLISHED

TOWER_PARAMS = 676.55e6  # of Qwen2.5-VL 7B


def plan(directory: Path, target: str, num_images: int = 1) -> Plan:
    """Return the plan of a decoder with few layers behind Qwen2.5-VL 7B's tower."""
    stem, vision, hidden_size = PUBLISHED["qwen2.5-vl-7b"]
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 2, "intermediate_size": 18944}
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "max_position_embeddings": 8192}
    text = {"hidden_size": hidden_size, "vocab_size": 152064, "dtype": "bfloat16", **heads, **rope}
    config = {"architectures": [f"{stem}ForConditionalGeneration"], "vision_config": vision, "text_config": text}
    (directory / "config.json").write_text(json.dumps(config))
    options = EngineConfig(str(directory / "config.json"), limit_mm_per_prompt={"image": num_images})
    return make_plan(options, parse_target(target), compiles=False)


def test_plans_count_tower_cache_and_images(tmp_path: Path) -> None:
    found, text = plan(tmp_path, "h200"), plan(tmp_path, "h200", num_images=0)
    assert found.images is not None
    assert found.images.tower_bytes == pytest.approx(2 * TOWER_PARAMS, rel=0.001)
    assert found.memory.weights - text.memory.weights == found.images.tower_bytes
    assert found.memory.images == 2 * 3584 * found.schedule.num_encoder_rows
    assert text.kv_tokens > found.kv_tokens
    assert [(cost.patches, cost.embeddings) for cost in found.images.costs] == [
        (size, size // 4) for size in (256, 1024, 4096, 16384)
    ]
    cost = found.images.costs[1]
    matmuls_ms = 1e3 * 2 * TOWER_PARAMS * 1024 / 989e12
    assert cost.encode_ms is not None
    assert matmuls_ms < cost.encode_ms < 1.05 * matmuls_ms
    assert build_report(found)["images"]["programs"][1]["embeddings"] == 256
    assert "of it 1.35 GB for the vision tower" in render(found)
    assert text.images is build_report(text)["images"] is None
    on_cpu = plan(tmp_path, "cpu")
    assert on_cpu.images is not None
    assert {cost.encode_ms for cost in on_cpu.images.costs} == {None}
    assert "ms to encode" not in render(on_cpu)
