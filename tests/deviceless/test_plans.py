"""Plans for chips that are not attached, compiled for them."""

import json
import re
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jaxserve import cli
from jaxserve.api.config import EngineConfig
from jaxserve.scheduling.schedule_config import ScheduleConfig, resolve_schedule
from jaxserve.tools.planner.models import read_model
from jaxserve.tools.planner.program import StepCompiler, temp_bytes
from jaxserve.tools.planner.targets import parse_target

pytestmark = pytest.mark.deviceless

BFLOAT16 = jnp.dtype("bfloat16")
MAX_PROGRAMS = 12
COMPILE_S = 60  # processor time for three programs


@pytest.mark.parametrize(
    ("name", "backend", "decode"),
    [("h100x2", "mosaic_gpu", 64), ("h200x2", "mosaic_gpu", 64), ("tpu7x:1x1x1", "mosaic_tpu", 64)],
    ids=["h100x2", "h200x2", "tpu7x"],
)
def test_the_plan_of_a_small_model(targets, name, backend, decode, capsys):
    target = targets(name)
    sizes = ["--max-num-seqs", "32", "--max-num-batched-tokens", "64"]
    assert cli.main(["plan", "--target", name, "--json", *sizes]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    assert plan["attention_backend"] == backend
    assert plan["compiled_tokens"] == [64, decode]
    assert (plan["num_chips"], plan["num_devices"]) == (target.num_chips, 2)
    assert 0 < plan["decode_temp_bytes_per_chip"] <= 24e6
    assert 0 < plan["temp_bytes_per_chip"] <= 24e6
    assert plan["compile_s"] > 0
    assert plan["collectives_per_layer"] == [{"kind": "all-reduce", "count": 2, "num_bytes": 2 * decode * 256 * 2}]
    taken = sum(plan[f"{part}_bytes_per_chip"] for part in ("weights", "slots", "temp", "kv"))
    assert 0.85 * plan["limit_bytes_per_chip"] < taken < plan["limit_bytes_per_chip"]


def test_the_default_programs_of_a_tpu_are_few_and_compile(tpu, monkeypatch):
    """All programs are counted, and background and multi-step ones are compiled."""
    config, (_, arch) = EngineConfig(), read_model(None)
    schedule = resolve_schedule(config, max_position=arch.max_position, platform="tpu", page_size=16, num_pages=64)
    assert schedule.num_programs(config.max_steps) <= MAX_PROGRAMS
    smallest = schedule.buckets()[:1]
    monkeypatch.setattr(ScheduleConfig, "buckets", lambda _: smallest)
    compiler = StepCompiler(parse_target("v6e:1x1"), schedule, BFLOAT16, BFLOAT16, "mosaic_tpu")
    started = time.process_time()
    seconds = compiler.compile_times(arch, config.max_steps)
    assert list(seconds) == ["admit", "set_slot", "step 16", "multi-step 16 of 64"]
    assert min(seconds.values()) > 0
    assert time.process_time() - started <= COMPILE_S


def test_a_sweep_goes_on_after_chips_that_the_model_cannot_use(tpu, capsys):
    assert cli.main(["plan", "--sweep", "v5e:3x5", "v6e:1x2", "cpu", "--model", "llama-3.1-70b", "--json"]) == 0
    missing, too_small, cpu = json.loads(capsys.readouterr().out)["targets"]
    assert "tensor_parallel_size must divide" in missing["reason"]
    assert too_small["missing_bytes_per_chip"] > 35e9
    assert cpu["compile_s"] is None


def test_a_larger_pool_takes_no_more_temporaries(h200):
    _, arch = read_model(None)
    schedules = [ScheduleConfig(32, 64, 1024, 16, num_pages) for num_pages in (64, 50_000)]
    compilers = [StepCompiler(parse_target("h200"), x, BFLOAT16, BFLOAT16, "mosaic_gpu") for x in schedules]
    small, large = (temp_bytes(program) for x in compilers for program in x.compile(arch, [8]))
    assert small == large


@pytest.mark.parametrize("name", ["v4:1x1x1", "v5e:1x1", "v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1"])
def test_the_compiler_knows_the_memory_of_a_tpu(tpu, name):
    target = parse_target(name)
    devices = target.sheet.chip.devices(target.topology)
    assert len(devices) == target.num_devices
    assert {device.device_kind for device in devices} == {target.sheet.chip.device_kind}
    assert {device.num_cores for device in devices} == {target.sheet.chip.num_cores}
    too_much = jax.ShapeDtypeStruct((2**28, 1024), jnp.float32, sharding=SingleDeviceSharding(devices[0]))
    lowered = jax.jit(lambda x: x * 2).trace(too_much).lower(lowering_platforms=("tpu",))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        target.sheet.chip.compile_all([lowered])
    (gib,) = re.findall(r"available HBM \((\d+\.\d+)G\)", str(caught.value))
    assert target.sheet.limit_bytes(0.9) == pytest.approx(float(gib) * 2**30, rel=0.001)
