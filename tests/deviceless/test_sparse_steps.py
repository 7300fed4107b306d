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
from jaxserve.layers.page_bounds import BoundedHeads
from jaxserve.pallas_kernels.deviceless import TPU_V6E
from jaxserve.pallas_kernels.ragged_paged_attention import (
    AttentionInputs,
    AttentionOptions,
    Heads,
    RaggedRows,
    default_page_size,
    ragged_paged_attention,
)
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


def test_a_quarter_of_the_keys_takes_three_tenths_of_the_bytes(tpu):
    """XLA's count of the choice, with the kernel's own estimate of attention to all pages in its table.

    XLA also counts the bounds that it writes to vector memory and reads from there.
    """
    R, K, Q, H, context = 8, 8, 32, 128, 32_768
    P = default_page_size("mosaic_tpu", Heads(K, H), BFLOAT16)
    form, num_pages = BoundedHeads(K, H, budget=context // 4), R * context // P
    sizes = {"num_layers": 8, "num_pages": num_pages, "page_size": P}  # more bounds than vector memory holds
    pool = jax.eval_shape(lambda: form.new_pages("mosaic_tpu", **sizes, dtype=BFLOAT16))
    queries, new = (jax.ShapeDtypeStruct((R, heads, H), BFLOAT16) for heads in (Q, K))
    layer = jax.ShapeDtypeStruct((), jnp.int32)

    def rows(num_columns):
        return RaggedRows(*(jax.ShapeDtypeStruct(x, jnp.int32) for x in ((R,), (R, num_columns), (R + 1,), ())))

    def attend(inputs, pages, layer):
        return ragged_paged_attention(inputs, pages, layer, AttentionOptions(H**-0.5), backend="mosaic_tpu")

    def choose(queries, bounds, layer, rows, choosing):
        return form._choose(queries, bounds, layer, rows, choosing, P)

    attended = [
        TPU_V6E.lower(attend, (AttentionInputs(queries, new, new, rows(tokens // P)), pool.pages, layer), (1,))
        for tokens in (context, form.budget)
    ]
    chosen = (queries, pool.bounds, layer, rows(context // P), jax.ShapeDtypeStruct((R,), jnp.bool_))
    compiled = TPU_V6E.compile_all([*attended, TPU_V6E.lower(choose, chosen, ())])
    dense, sparse, choice = (each.cost_analysis()["bytes accessed"] for each in compiled)
    assert dense >= R * context * 2 * K * H * BFLOAT16.itemsize
    gathered = re.findall(rf"= bf16\[{num_pages},{K},{2 * H}\]\S*S\(1\)\S* fusion\(", compiled[-1].as_text())
    assert len(gathered) == 1, "the rows' bounds lie in vector memory"
    choice -= 2 * num_pages * K * 2 * H * BFLOAT16.itemsize
    assert sparse + choice <= 0.3 * dense, (sparse / dense, choice / dense)
