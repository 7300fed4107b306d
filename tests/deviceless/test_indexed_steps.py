"""Steps of models whose queries choose their tokens, compiled for a TPU: the pool stays in place."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxserve.assembly.memory import tree_bytes
from jaxserve.execution.batch import BatchLayout
from jaxserve.execution.round import Model
from jaxserve.execution.state import abstract_state
from jaxserve.execution.step import make_serve_step, step_options
from jaxserve.pallas_kernels.ragged_paged_attention import Latents, default_page_size
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.tools.planner.models import read_model
from jaxserve.tools.planner.program import abstract_params, temp_bytes
from tests.deviceless.layers import first_layers

pytestmark = pytest.mark.deviceless

BFLOAT16 = jnp.dtype("bfloat16")


def test_decode_steps_copy_no_pool(targets):
    chip = targets("v6e:1x1").sheet.chip
    arch = first_layers(read_model("deepseek-v3.2")[1], 2)
    arch = arch.with_attention(shares_choice=[False, True])
    page_size = default_page_size("mosaic_tpu", Latents(512, 64), BFLOAT16)
    schedule = ScheduleConfig(64, 2048, 8192, page_size, 100_000 // page_size, few_programs=True)
    layout = BatchLayout.from_config(schedule, 64)
    state = abstract_state(arch, schedule, kv_dtype=BFLOAT16, backend="mosaic_tpu")
    assert state.kv_pages.index_keys.shape[0] == 1 < state.kv_pages.latents.shape[0]
    program = make_serve_step(Model.from_arch(arch, backend="mosaic_tpu"), layout)
    blob = jax.ShapeDtypeStruct((layout.blob.size,), jnp.int32)
    params = abstract_params(arch, BFLOAT16, is_stacked=True)
    [compiled] = chip.compile_all(
        [chip.lower(program, (params, state, blob), (1,), None, step_options(chip.device_kind))]
    )
    assert compiled.memory_analysis().alias_size_in_bytes >= tree_bytes(state.kv_pages)
    assert temp_bytes(compiled) <= 400e6
    for array in jax.tree.leaves(state.kv_pages):
        shape = ",".join(map(str, array.shape))
        makers = set(re.findall(rf"= bf16\[{shape}\]\S* ([a-z-]+)\(", compiled.as_text()))
        assert makers, "the pool is in the program"
        assert not {"copy", "copy-start", "transpose", "concatenate", "pad", "convert"} & makers
