"""Plans for H200s, compiled for them."""

import json

import jax.numpy as jnp
import pytest

from jaxserve import cli
from jaxserve.config import ScheduleConfig
from jaxserve.planner.plan import read_model
from jaxserve.planner.program import StepCompiler, temp_bytes

BFLOAT16 = jnp.dtype("bfloat16")


@pytest.mark.parametrize("target", ["h200", "h200x2"])
def test_the_plan_of_a_small_model(h200, target, capsys):
    sizes = ["--max-num-seqs", "32", "--max-num-batched-tokens", "64"]
    assert cli.main(["plan", "--target", target, "--json", *sizes]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    assert plan["attention_backend"] == "mosaic_gpu"
    assert plan["compiled_tokens"] == [64, 36]
    assert 0 < plan["decode_temp_bytes_per_chip"] <= 24e6
    assert 0 < plan["temp_bytes_per_chip"] <= 24e6
    assert plan["compile_s"] > 0
    two_sums = {"kind": "all-reduce", "count": 2, "num_bytes": 2 * 36 * 256 * 2}
    assert plan["collectives_per_layer"] == ([two_sums] if target == "h200x2" else [])
    taken = sum(plan[f"{part}_bytes_per_chip"] for part in ("weights", "slots", "temp", "kv"))
    assert 0.85 * plan["limit_bytes_per_chip"] < taken < plan["limit_bytes_per_chip"]


def test_a_larger_pool_takes_no_more_temporaries(h200):
    _, arch = read_model(None)
    schedules = [ScheduleConfig(32, 64, 1024, 16, num_pages) for num_pages in (64, 50_000)]
    compilers = [StepCompiler(h200, 1, schedule, BFLOAT16, BFLOAT16, "mosaic_gpu") for schedule in schedules]
    small, large = (temp_bytes(compiler.compile(arch, 64)) for compiler in compilers)
    assert small == large
