"""The speculative step of a large model with a small draft, compiled for chips: both pools stay where they are."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from jaxserve.api.token_tree import TokenTree
from jaxserve.assembly.memory import tree_bytes
from jaxserve.execution.batch import BatchLayout
from jaxserve.execution.round import Model
from jaxserve.execution.state import abstract_state
from jaxserve.execution.step import step_options
from jaxserve.execution.verification import make_speculative_step
from jaxserve.pallas_kernels.ragged_paged_attention import Heads, default_page_size
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.spec_decode.draft_model import DraftModel
from jaxserve.tools.planner.models import read_model
from jaxserve.tools.planner.program import abstract_params, temp_bytes
from tests.deviceless.layers import first_layers

pytestmark = pytest.mark.deviceless

BFLOAT16 = jnp.dtype("bfloat16")
BACKENDS = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}
ROWS, NUM_DRAFTS, MAX_ROUNDS = 16, 4, 4
TREE = TokenTree.from_paths([(0,) * n for n in range(1, NUM_DRAFTS + 1)] + [(1,), (2,), (0, 1), (1, 0), (0, 0, 1)])


@pytest.mark.parametrize(
    ("target", "megabytes", "tree", "num_layers"),
    [
        pytest.param("h200", 800, None, 4, id="h200-chain-of-4-layers"),
        pytest.param("h200", 800, None, None, id="h200-chain", marks=pytest.mark.full),
        pytest.param("h200", 800, TREE, None, id="h200-tree", marks=pytest.mark.full),
        pytest.param("v6e:1x1", 400, None, None, id="v6e-chain", marks=pytest.mark.full),
        pytest.param("v6e:1x1", 400, TREE, None, id="v6e-tree"),
    ],
)
def test_a_round_of_8b_with_a_draft_of_1b_works_in_place(targets, target, megabytes, tree, num_layers):
    chip = targets(target).sheet.chip
    arch, draft_arch = (first_layers(read_model(name)[1], num_layers) for name in ("llama-3.1-8b", "llama-3.2-1b"))
    backend = BACKENDS[chip.platform]
    page_size = default_page_size(backend, Heads(8, 128), BFLOAT16)
    schedule = ScheduleConfig(256, 2048, 8192, page_size, 20_000 // page_size, few_programs=True, max_drafts=NUM_DRAFTS)
    draft_arch = dataclasses.replace(draft_arch, one_kv_group=True)
    sizes = (NUM_DRAFTS, draft_arch, arch.vocab_size, schedule, "bfloat16", backend)
    proposer = DraftModel(*sizes, kv_group=0, chunk=256, tree=tree)
    layout = BatchLayout.from_config(schedule, ROWS, is_speculative=True)
    program = make_speculative_step(Model.from_arch(arch, backend=backend), layout, proposer, MAX_ROUNDS)
    options = {"kv_dtype": BFLOAT16, "backend": backend, "new_draft": proposer.new_state}
    state = abstract_state(arch, schedule, **options)
    is_stacked = chip.platform == "tpu"
    params = tuple(abstract_params(each, BFLOAT16, is_stacked=is_stacked) for each in (arch, draft_arch))
    blob = jax.ShapeDtypeStruct((layout.blob.size,), jnp.int32)
    lowered = chip.lower(program, (params, state, blob), (1,), None, step_options(chip.device_kind))
    [compiled] = chip.compile_all([lowered])
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes >= tree_bytes(state.kv_pages) + tree_bytes(state.draft.kv_pages)
    assert temp_bytes(compiled) <= megabytes * 1e6
    for pool in (state.kv_pages, state.draft.kv_pages):
        shape = ",".join(map(str, jax.tree.leaves(pool)[0].shape))
        makers = set(re.findall(rf"= bf16\[{shape}\]\S* ([a-z-]+)\(", text))
        assert makers, "the pool is in the program"
        assert not {"copy", "copy-start", "transpose", "concatenate", "pad", "convert"} & makers
