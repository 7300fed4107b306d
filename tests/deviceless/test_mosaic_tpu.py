"""Attention for TPUs compiles to machine code for each generation of them, in place; so does the step around it."""

import itertools
import json
import re
import time

import jax
import jax.numpy as jnp
import pytest
from test_h200_step import DEFAULT_MODEL, LLAMA_8B

from jaxserve.assembly.memory import tree_bytes
from jaxserve.execution.batch import BatchLayout
from jaxserve.execution.paged_attention import PagedAttention
from jaxserve.execution.state import abstract_state
from jaxserve.layers.token_context import TokenContext
from jaxserve.models import decoder, registry
from jaxserve.pallas_kernels.deviceless import TPU7X, TPU_V5E, TPU_V5P, TPU_V6E
from jaxserve.pallas_kernels.ragged_paged_attention import (
    BACKENDS,
    Heads,
    Problem,
    RaggedRows,
    default_page_size,
    from_canonical,
    ragged_paged_attention,
    select_backend,
)
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import values_of
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.tools.planner.program import StepCompiler, abstract_params, layer_collectives, temp_bytes
from jaxserve.tools.planner.targets import parse_target
from tests.kernels.attention_cases import CASES, Case, widened

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(TPU_V6E.unavailable() is not None, reason=str(TPU_V6E.unavailable())),
]

CHIPS = {"v5e": TPU_V5E, "v5p": TPU_V5P, "v6e": TPU_V6E, "tpu7x": TPU7X}
COMPILE_S = 20  # processor time; a third of it on an idle processor
_MANY = ((*([1] * 40), 200, 300), (*range(20, 60), 400, 300))
_DECODE = ((1,) * 64, (64,) * 64)
WIDE = [
    Case(
        f"group_of_{group}_of_{K}_head_dim_{H}_pages_of_{P}",
        *lengths,
        group * K,
        K,
        H,
        P,
        **{"dtype": "bfloat16", "kv_dtype": "bfloat16", **options},
    )
    for lengths, group, K, H, P, options in [
        (_DECODE, 4, 8, 128, 16, {}),
        (_MANY, 8, 1, 128, 128, {"tree": "random", "window": 300}),
        (_MANY, 4, 8, 128, 16, {"has_rope": True}),
        (_MANY, 3, 3, 64, 32, {"soft_cap": 30.0, "has_sinks": True}),
        (_MANY, 7, 2, 96, 256, {}),
        (_MANY, 2, 2, 256, 16, {"window": 300, "soft_cap": 30.0, "has_sinks": True}),
        (_MANY, 1, 32, 128, 64, {}),
        (_MANY, 8, 4, 512, 16, {"has_rope": True}),
        (_MANY, 4, 8, 128, 16, {"dtype": "float32", "kv_dtype": "float32"}),
    ]
]
NARROW = [
    Case("int8_pages_of_32", *_MANY, 32, 8, 128, 32, dtype="bfloat16", kv_dtype="int8"),
    Case("fp8_group_of_3", *_MANY, 9, 3, 64, 128, soft_cap=30.0, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
]


def _program(case):
    """Return what distinguishes the kernels of two cases; the numbers of tokens, rows and pages do not, except one."""
    inputs, kv_pages, _ = case.arguments()
    num_tokens, *heads = inputs.q.shape
    page = values_of(kv_pages).shape[2:]
    options = (case.window is None, case.soft_cap, case.has_sinks, case.tree is None, inputs.rope is None)
    return min(num_tokens, 2), *heads, page, case.dtype, case.kv_dtype, options


def _runs(case):
    problem = Problem(case.kind, case.num_query_heads, case.page_size, jnp.dtype(case.kv_dtype), "tpu")
    return BACKENDS["mosaic_tpu"].unsupported_reason(problem) is None


DISTINCT = {_program(case): case for case in map(widened, reversed(CASES)) if _runs(case)}.values()
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
BFLOAT16 = jnp.dtype("bfloat16")


@pytest.mark.parametrize(
    ("chip", "case"),
    [
        *zip(itertools.cycle(CHIPS), DISTINCT),
        *[("v6e", case) for case in (*WIDE, *NARROW)],
        *[
            pytest.param(chip, case, marks=pytest.mark.full)
            for chip in ("v5e", "v5p", "tpu7x")
            for case in (*WIDE[1:5], WIDE[7], *NARROW)
        ],
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_compiles_in_place(chip, case):
    inputs, kv_pages, _ = jax.eval_shape(case.arguments)
    kv_pages = jax.eval_shape(lambda kv_pages: from_canonical("mosaic_tpu", kv_pages), kv_pages)

    def attend(inputs, kv_pages, layer):
        return ragged_paged_attention(inputs, kv_pages, layer, case.options, backend="mosaic_tpu")

    args = (inputs, kv_pages, jax.ShapeDtypeStruct((), jnp.int32))
    started = time.process_time()
    compiled = CHIPS[chip].compile(attend, args, donate_argnums=(1,))
    assert time.process_time() - started <= COMPILE_S
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= tree_bytes(kv_pages)
    # The bound covers queries and outputs in the kernel's layouts, and new keys and values in float32.
    assert memory.temp_size_in_bytes <= 16 * inputs.q.size * 4 + 2**21
    cost = compiled.cost_analysis()
    keys = case.q_lens.count(1) * inputs.rows.page_table.shape[1] * case.page_size
    itemsize = jnp.dtype(case.kv_dtype).itemsize
    assert cost["bytes accessed"] >= keys * 2 * case.num_kv_heads * case.head_dim * itemsize
    assert cost["flops"] >= 4 * keys * case.num_query_heads * case.head_dim


def compile_step(config, target, num_tokens, pool_tokens, max_model_len, kv_dtype=BFLOAT16):
    """Return one chip's share of the pool, with pages of default size, and the step of one bucket."""
    arch, target = registry.from_hf_config(config), parse_target(target)
    local = arch.local(target.num_devices)
    sizes = {"kind": Heads(local.attention.num_kv_heads, local.attention.head_dim), "kv_dtype": kv_dtype}
    backend = select_backend(num_query_heads=local.attention.num_heads, page_size=None, **sizes, platform="tpu")
    assert backend == "mosaic_tpu"
    page_size = default_page_size(backend, sizes["kind"], kv_dtype)
    schedule = ScheduleConfig(256, 2048, max_model_len, page_size, num_pages=pool_tokens // page_size)
    (program,) = StepCompiler(target, schedule, BFLOAT16, kv_dtype, backend).compile(arch, [num_tokens])
    return abstract_state(local, schedule, kv_dtype=kv_dtype, backend=backend).kv_pages, program


def check_memory(pool, program, logits_bytes):
    """Check that the pool is updated in place and that temporaries are small beside the logits."""
    assert program.memory_analysis().alias_size_in_bytes >= tree_bytes(pool)
    assert temp_bytes(program) <= logits_bytes + 64e6


def check_pool_is_never_copied(pool, text):
    for x in jax.tree.leaves(pool):
        makers = re.findall(rf"= [a-z0-9]+\[{','.join(map(str, x.shape))}\]\S* ([a-z-]+)\(", text)
        assert makers, "the pool is in the program"
        assert set(makers) <= {"parameter", "get-tuple-element", "custom-call", "bitcast"}
    kernels = re.findall(r'custom_call_target="tpu_custom_call"', text)
    assert len(kernels) == 1, "in the loop over the layers"


def test_step_of_the_default_model_works_in_place():
    config = json.loads(DEFAULT_MODEL.read_text())
    pool, program = compile_step(config, "v6e:1x1", 64, 800_000, 1024)
    check_memory(pool, program, 64 * config["vocab_size"] * 4)
    check_pool_is_never_copied(pool, program.as_text())


def test_step_with_an_int8_pool_works_in_place():
    config = json.loads(DEFAULT_MODEL.read_text())
    pool, program = compile_step(config, "v6e:1x1", 64, 800_000, 1024, kv_dtype=jnp.dtype("int8"))
    check_memory(pool, program, 64 * config["vocab_size"] * 4)
    check_pool_is_never_copied(pool, program.as_text())


@pytest.mark.full
def test_step_of_8b_works_in_place():
    pool, program = compile_step(LLAMA_8B, "v6e:1x1", 8, 64_000, 8192)
    check_memory(pool, program, 8 * LLAMA_8B["vocab_size"] * 4)


def test_weights_of_layers_are_not_copied_on_tpu7x():
    config = LLAMA_8B | {"num_hidden_layers": 4}
    pool, program = compile_step(config, "tpu7x:1x1x1", 8, 16_000, 2048)
    check_memory(pool, program, 8 * LLAMA_8B["vocab_size"] * 2)  # half of the vocabulary


def test_step_of_70b_over_eight_works_in_place_and_exchanges_twice_a_layer():
    pool, program = compile_step(LLAMA_70B, "v6e:2x4", 64, 320_000, 8192)
    check_memory(pool, program, 64 * LLAMA_70B["vocab_size"] // 8 * 4)
    text = program.as_text()
    check_pool_is_never_copied(pool, text)
    (sums,) = layer_collectives(text, 1)
    assert (sums.kind, sums.count, sums.num_bytes) == ("all-reduce", 2, 2 * 64 * LLAMA_70B["hidden_size"] * 2)


def test_a_decode_step_reads_weights_and_keys_once():
    """XLA's count for layers one after the other, with our own estimate for the kernel.

    All vector memory goes to one operation at a time: XLA counts weights prefetched to it several times, although they
    are read from main memory once.
    """
    arch = registry.from_hf_config(LLAMA_8B | {"num_hidden_layers": 2})
    rows, context = 64, 8192
    schedule = ScheduleConfig(rows, 2048, context, 16, num_pages=rows * context // 16)
    layout = BatchLayout.from_config(schedule, rows)

    def decode(params, state, blob):
        batch, rows = layout.unpack(blob), state.sequences
        ragged_rows = RaggedRows(rows.length + 1, rows.page_table, batch.cu_q_lens, batch.num_rows)
        tokens = TokenContext(rows.length, PagedAttention("mosaic_tpu", state.kv_pages, (ragged_rows,)))
        hidden, tokens = decoder.forward(params, arch, batch.token_ids, tokens)
        return decoder.compute_logits(params, arch, hidden), tokens.attention

    params = abstract_params(arch, BFLOAT16)
    state = abstract_state(arch, schedule, kv_dtype=BFLOAT16, backend="mosaic_tpu")
    blob = jax.ShapeDtypeStruct((layout.blob.size,), jnp.int32)
    no_fetching_ahead = {"xla_tpu_scoped_vmem_limit_kib": "120000"}
    lowered = TPU_V6E.lower(decode, (params, state, blob), (1,), compiler_options=no_fetching_ahead)
    counted = TPU_V6E.compile_all([lowered])[0].cost_analysis()["bytes accessed"]
    weights = tree_bytes(params) - tree_bytes(params["embed"])  # only some rows of it are read
    logits = rows * arch.vocab_size * 4
    assert weights + tree_bytes(state.kv_pages) + logits <= counted
    assert counted <= 1.05 * (weights + tree_bytes(state.kv_pages) + logits)
