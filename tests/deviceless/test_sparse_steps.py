"""Steps whose output tokens see fewer keys and values, compiled for chips: the pool and its bounds stay in place."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxserve.api.sparsity_config import EvictionConfig
from jaxserve.assembly.memory import tree_bytes
from jaxserve.execution.batch import BatchLayout, CompactionLayout
from jaxserve.execution.compaction import make_compact
from jaxserve.execution.round import Model
from jaxserve.execution.state import abstract_state
from jaxserve.execution.step import make_serve_step, step_options
from jaxserve.pallas_kernels.ragged_paged_attention import Heads, default_page_size
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.tools.planner.models import read_model
from jaxserve.tools.planner.program import abstract_params, temp_bytes
from tests.deviceless.layers import first_layers

pytestmark = pytest.mark.deviceless

BFLOAT16 = jnp.dtype("bfloat16")
BACKENDS = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}
OPTIONS = {
    "quest": {"page_budget": 2048},
    "streaming_llm": {"eviction": EvictionConfig("streaming_llm", 2048)},
    "snapkv": {"eviction": EvictionConfig("snapkv", 2048)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("target", ["h200", "v6e:1x1"])
def test_decode_steps_and_compaction_work_in_place(targets, target, name):
    chip = targets(target).sheet.chip
    arch, backend = first_layers(read_model("llama-3.1-8b")[1], 4), BACKENDS[chip.platform]
    arch = arch.with_page_budget(OPTIONS[name].get("page_budget"), 8192)
    page_size = default_page_size(backend, Heads(8, 128), BFLOAT16)
    num_pages = 100_000 // page_size
    schedule = ScheduleConfig(64, 2048, 8192, page_size, num_pages, few_programs=True, **OPTIONS[name])
    model = Model.from_arch(arch, backend=backend, sparsity=schedule.sparsity)
    layout = CompactionLayout.from_config(schedule) if name == "snapkv" else BatchLayout.from_config(schedule, 64)
    program = make_compact(model, layout) if name == "snapkv" else make_serve_step(model, layout)
    state = abstract_state(arch, schedule, kv_dtype=BFLOAT16, backend=backend)
    params = abstract_params(arch, BFLOAT16, is_stacked=chip.platform == "tpu")
    blob = jax.ShapeDtypeStruct((layout.blob.size,), jnp.int32)
    lowered = chip.lower(program, (params, state, blob), (1,), None, step_options(chip.device_kind))
    [compiled] = chip.compile_all([lowered])
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes >= tree_bytes(state.kv_pages)
    assert temp_bytes(compiled) <= 400e6
    for array in jax.tree.leaves(state.kv_pages):
        makers = set(re.findall(rf"= bf16\[{','.join(map(str, array.shape))}\]\S* ([a-z-]+)\(", text))
        assert makers, "the pool is in the program"
        assert not {"copy", "copy-start", "transpose", "concatenate", "pad", "convert"} & makers
