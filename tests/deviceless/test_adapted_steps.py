"""Steps with LoRA adapters, compiled for chips: stacks are read in place, and loads compile one program."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxserve.api.lora_request import LORA_EXTRAS
from jaxserve.assembly.memory import tree_bytes
from jaxserve.execution import lowering
from jaxserve.execution.step import step_options
from jaxserve.models import decoder
from jaxserve.models.adapter_layout import AdapterLayout
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.tools.planner.models import read_model
from jaxserve.tools.planner.program import StepCompiler, temp_bytes
from jaxserve.tools.planner.targets import parse_target
from tests.deviceless.thunks import dump_options, thunks_of_step

pytestmark = pytest.mark.deviceless

BFLOAT16 = jnp.dtype("bfloat16")
NUM_SLOTS, RANK, NUM_TOKENS = 64, 64, 8


@pytest.mark.parametrize(("name", "backend"), [("h200", "mosaic_gpu"), ("v6e:1x1", "mosaic_tpu")])
def test_a_step_copies_no_stack(targets, name, backend, tmp_path, monkeypatch):
    """Nor does the program that writes a slot; on a GPU the step is one CUDA graph."""
    target, (_, arch) = targets(name), read_model(None)
    is_scanned = "v6e" in name and decoder.can_scan(arch)
    layout = AdapterLayout(
        NUM_SLOTS, RANK, dtype="bfloat16", is_native=False, is_scanned=is_scanned, extras=LORA_EXTRAS
    )
    schedule = ScheduleConfig(32, 64, 1024, 16, 64)
    plain, adapted = (
        StepCompiler(parse_target(name), schedule, BFLOAT16, BFLOAT16, backend, adapters=each)
        for each in (None, layout)
    )
    assert target is not None
    [before] = plain.compile(arch, [NUM_TOKENS])
    monkeypatch.setattr(lowering, "step_options", lambda kind: step_options(kind) | dump_options(kind, tmp_path))
    [after] = adapted.compile(arch, [NUM_TOKENS])
    if target.sheet.chip.platform == "gpu":
        assert thunks_of_step(tmp_path) == ["kCommandBuffer"]
    widest = max(sum(each.part_sizes) for each in layout.specs(arch, arch))
    smallest = min(NUM_SLOTS * RANK * size * 2 for each in layout.specs(arch, arch) for size in each.part_sizes)
    grown = temp_bytes(after) - temp_bytes(before)
    assert grown < max(smallest // 2, 64 * NUM_TOKENS * (widest + NUM_SLOTS * RANK)), grown
    writer = adapted._lowering(arch).writers()["set_adapter"]
    [compiled] = adapted._chip.compile_all([writer()])
    one = tree_bytes(replace(layout, num_slots=1).abstract(arch, None))
    assert temp_bytes(compiled) < max(smallest, 2 * one)  # float32 scales of row norms
