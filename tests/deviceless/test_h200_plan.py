"""Plans for H200s, compiled for them: what follows from few layers is what all of them take."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxserve import cli
from jaxserve.config import ScheduleConfig
from jaxserve.models import registry
from jaxserve.planner.program import StepCompiler, collectives, temp_bytes

DEFAULT_MODEL = Path(__file__).parents[2] / "weights" / "default" / "config.json"
BFLOAT16 = jnp.dtype("bfloat16")


@pytest.mark.parametrize("num_chips", [1, 2])
def test_few_layers_tell_of_all(h200, num_chips):
    """Of two kinds; and a pool of another size takes no other temporaries."""
    config = json.loads(DEFAULT_MODEL.read_text()) | {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 10}
    config |= {"use_sliding_window": True, "sliding_window": 256, "max_window_layers": 7}
    arch = registry.from_hf_config(config)

    def compiler(num_pages):
        schedule = ScheduleConfig(64, 512, 1024, 16, num_pages)
        return StepCompiler(h200, num_chips, schedule, BFLOAT16, BFLOAT16, "mosaic_gpu")

    told, whole = compiler(500).step_program(arch, 512), compiler(50_000).compile(arch, 512)
    assert told.compiled_layers == (4, 6)
    assert told.temp_bytes == pytest.approx(temp_bytes(whole), rel=1e-3)
    sums = {exchange.kind: exchange for exchange in collectives(whole.as_text())}.get("all-reduce")
    embedding = 512 * 256 * 2
    assert [(x.kind, x.count, x.num_bytes) for x in told.collectives] == (
        [("all-reduce", 2, 2 * embedding)] if num_chips > 1 else []
    )
    assert (sums is None) == (num_chips == 1)
    assert sums is None or (sums.count, sums.num_bytes) == (10 * 2 + 1, (10 * 2 + 1) * embedding)


@pytest.mark.parametrize("target", ["h200", "h200x2"])
def test_the_plan_of_a_small_model(h200, target, capsys):
    sizes = ["--max-num-seqs", "32", "--max-num-batched-tokens", "64"]
    assert cli.main(["plan", "--target", target, "--json", *sizes]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    assert plan["attention_backend"] == "mosaic_gpu"
    assert plan["compiled_tokens"] == [64, 32]
    assert 0 < plan["decode_temp_bytes_per_chip"] <= 24e6
    assert 0 < plan["temp_bytes_per_chip"] <= 24e6
    assert plan["compile_s"] > 0
    assert [exchange["count"] for exchange in plan["collectives_per_layer"]] == ([2] if target == "h200x2" else [])
    taken = sum(plan[f"{part}_bytes_per_chip"] for part in ("weights", "slots", "temp", "kv"))
    assert 0.85 * plan["limit_bytes_per_chip"] < taken < plan["limit_bytes_per_chip"]
