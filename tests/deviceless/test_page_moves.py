"""Programs that move pages between the pool and host memory, compiled for chips: the pool is not copied."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxserve.assembly.memory import tree_bytes
from jaxserve.execution.moved_pools import state_pools
from jaxserve.execution.page_programs import MOVED_PAGES, MOVED_STATES, KVLayout, PagedPool, PagePrograms
from jaxserve.execution.state import abstract_state, copy_state
from jaxserve.layers.sharding import tensor_mesh
from jaxserve.pallas_kernels.ragged_paged_attention import Heads, default_page_size
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.tools.planner.models import read_model
from jaxserve.tools.planner.program import temp_bytes

pytestmark = pytest.mark.deviceless

BACKENDS = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("target", ["h200", "h200x2", "v6e:1x1", "v6e:2x2"])
def test_pages_move_without_a_copy_of_the_pool(targets, target, kv_dtype):
    target = targets(target)
    chip = target.sheet.chip
    backend, dtype, arch = BACKENDS[chip.platform], jnp.dtype(kv_dtype), read_model("llama-3.1-8b")[1]
    mesh = tensor_mesh(target.num_devices, chip.devices(target.topology))
    page_size = default_page_size(backend, Heads(8 // target.num_devices, 128), dtype)
    schedule = ScheduleConfig(256, 2048, 8192, page_size, 20_000 // page_size, few_programs=True)
    pool = abstract_state(arch, schedule, kv_dtype=dtype, backend=backend, mesh=mesh).kv_pages
    layout = KVLayout(backend, arch.local(target.num_devices).kv_layout.pool.kind)
    programs = PagePrograms("pages", [PagedPool(pool, layout)], mesh, chip=chip).by_name()
    assert len(programs) == 2 * len(MOVED_PAGES)
    lowered = [
        chip.lower(each.program, each.args, () if each.donated is None else (each.donated,), mesh, None, each.results)
        for each in programs.values()
    ]
    num_bytes = tree_bytes(pool) // target.num_devices
    for name, compiled in zip(programs, chip.compile_all(lowered), strict=True):
        memory, text = compiled.memory_analysis(), compiled.as_text()
        moved_bytes = MOVED_PAGES[-1] * num_bytes // schedule.num_pages
        assert temp_bytes(compiled) <= 4 * moved_bytes + 2**20, name
        is_gather = name.startswith("gather")
        assert is_gather or memory.alias_size_in_bytes >= num_bytes, name
        if chip.platform == "tpu":  # descriptions of GPUs have no host memory
            (layout,) = re.findall(r"entry_computation_layout=\{(.*)\}, allow", text)
            arguments, results = layout.split("->")
            num_moved = int(name.split()[1]) * len(jax.tree.leaves(pool))
            assert (results if is_gather else arguments).count("S(5)") == num_moved, "the copies lie in host memory"
        entry = text[text.index("\nENTRY ") :]  # inside fusions, bytes are read with other tiles, in place
        for leaf in jax.tree.leaves(pool):
            shape = ",".join(map(str, leaf.shape))
            makers = set(re.findall(rf"= \w+\[{shape}\]\S* ([a-z-]+)\(", entry))
            assert not {"copy", "copy-start", "transpose", "concatenate", "pad", "convert"} & makers, name


@pytest.mark.parametrize("target", ["h200", "v6e:1x1"])
def test_states_move_without_a_copy_of_the_pool(targets, target):
    target = targets(target)
    chip, arch = target.sheet.chip, read_model("qwen3-next-80b-a3b")[1]
    schedule = ScheduleConfig(16, 2048, 8192, 64, 128, num_snapshots=16, few_programs=True)
    state = abstract_state(arch, schedule, kv_dtype=jnp.bfloat16, backend=BACKENDS[chip.platform])
    programs = PagePrograms("states", state_pools(state), None, MOVED_STATES, chip).by_name()
    lowered = {
        name: chip.lower(
            each.program, each.args, () if each.donated is None else (each.donated,), None, None, each.results
        )
        for name, each in programs.items()
    }
    entries = jax.ShapeDtypeStruct((2,), jnp.int32)
    lowered["keep"] = chip.lower(copy_state, (state.states, entries), (0,), None, None, None)
    num_bytes, entry_bytes = tree_bytes(state.states), tree_bytes(state.states) // schedule.num_state_entries
    for name, compiled in zip(lowered, chip.compile_all([*lowered.values()]), strict=True):
        assert temp_bytes(compiled) <= 4 * entry_bytes + 2**20, name
        assert name.startswith("gather") or compiled.memory_analysis().alias_size_in_bytes >= num_bytes, name
