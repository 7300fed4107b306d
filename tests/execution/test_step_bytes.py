"""Bytes that a compiled step moves."""

import jax
import jax.numpy as jnp
import pytest

from jaxserve.execution.batch import BatchLayout
from jaxserve.execution.lowering import known_options
from jaxserve.execution.round import Model
from jaxserve.execution.state import abstract_state
from jaxserve.execution.step import make_serve_step, step_options
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.pallas_kernels import native
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.tools.planner.program import abstract_params
from tests.checkpoints import hf_dict

R = 8


def step_bytes(arch: ArchConfig, page_size: int) -> float:
    """Return XLA's count for a decode step of R rows; it leaves out what the native kernels read and write."""
    schedule = ScheduleConfig(R, 64, 4096, page_size, 160, windows=arch.kv_layout.windows)
    layout = BatchLayout.from_config(schedule, R)
    state = abstract_state(arch, schedule, kv_dtype=jnp.float32, backend="native")
    blob = jax.ShapeDtypeStruct((layout.blob.size,), jnp.int32)
    step = make_serve_step(Model.from_arch(arch, backend="native"), layout)
    program = jax.jit(step, donate_argnums=1, compiler_options=known_options(step_options("cpu")))
    compiled = program.lower(abstract_params(arch, jnp.dtype("float32")), state, blob).compile()
    return float(compiled.cost_analysis()["bytes accessed"])


def update_bytes(num_columns: int) -> float:
    """Return XLA's count for an update of the page table in place: it is taken for one of the whole table."""
    table, new = jax.ShapeDtypeStruct((2 * R, num_columns), jnp.int32), jax.ShapeDtypeStruct((R,), jnp.int32)
    program = jax.jit(lambda table, rows, columns, new: table.at[rows, columns].set(new, mode="drop"), donate_argnums=0)
    return float(program.lower(table, new, new, new).compile().cost_analysis()["bytes accessed"])


@pytest.mark.skipif(native.unavailable() is not None, reason="the native kernels were not built")
@pytest.mark.long
def test_a_step_copies_no_page_tables() -> None:
    """Two KV groups, whose rows of the page table are looked up in place: four times as many pages cost nothing."""
    windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    arch = registry.from_hf_config(hf_dict("qwen2", num_hidden_layers=2, **windows))
    assert len(arch.kv_layout.windows) == 2
    counts_update = jax.__version_info__ >= (0, 11)
    update = update_bytes(4096 // 16) - update_bytes(4096 // 64) if counts_update else 0
    assert step_bytes(arch, 16) - step_bytes(arch, 64) == update
