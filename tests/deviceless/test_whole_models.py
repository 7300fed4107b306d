"""Large models, compiled for chips: their steps work in place and exchange twice a layer."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from jaxserve.assembly.memory import tree_bytes
from jaxserve.execution import lowering
from jaxserve.execution.state import abstract_state
from jaxserve.execution.step import step_options
from jaxserve.models import registry
from jaxserve.pallas_kernels.op import AUTO
from jaxserve.pallas_kernels.ragged_paged_attention import Heads, default_page_size
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.tools.planner.models import known_models, read_model
from jaxserve.tools.planner.plan import decode_bucket
from jaxserve.tools.planner.program import StepCompiler, abstract_params, collectives, layer_collectives, temp_bytes
from tests.deviceless.layers import first_layers, layers_of_each_kind
from tests.deviceless.thunks import dump_options, thunks_of_step

pytestmark = pytest.mark.deviceless

BFLOAT16 = jnp.dtype("bfloat16")
POOL_TOKENS = 20_000
BACKENDS = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}


def check_exchanges(arch, num_tokens, text, num_copies):
    """Check for two exchanges of activations a layer, after attention and SwiGLU, and one for the embedding."""
    (sums,) = layer_collectives(text, num_copies)
    assert (sums.kind, sums.count, sums.num_bytes) == ("all-reduce", 2, 2 * num_tokens * arch.hidden_size * 2)
    lines = [line for line in text.splitlines() if f"bf16[{num_tokens},{arch.hidden_size}]" in line]
    assert sum(x.count for x in collectives("\n".join(lines))) == 2 * num_copies + 1


def check_makers(pool, text, dtype="bf16"):
    """Check that nothing makes an array of the shape of the pool by copying."""
    shape = ",".join(map(str, jax.tree.leaves(pool)[0].shape))
    makers = re.findall(rf"= {dtype}\[{shape}\]\S* ([a-z-]+)\(", text)
    assert makers, "the pool is in the program"
    assert not {"copy", "copy-start", "transpose", "concatenate", "pad", "convert"} & set(makers)


@pytest.mark.parametrize(
    ("name", "target", "num_layers", "decode_megabytes", "largest_megabytes"),
    [
        ("llama-3.1-8b", "h200", 6, 800, 850),
        pytest.param("llama-3.1-8b", "h200", None, 800, 850, marks=pytest.mark.full),
        pytest.param("llama-3.1-70b", "h200x4", None, 300, 350, marks=pytest.mark.full),
        ("llama-3.1-8b", "v6e:1x1", None, 131 + 64, 131 + 64),
        pytest.param("llama-3.1-70b", "v6e:2x4", None, 16 + 64, 16 + 64, marks=pytest.mark.full),
        ("gemma-2-9b", "h200", 6, 800, 850),
        pytest.param("gemma-2-9b", "h200", None, 800, 850, marks=pytest.mark.full),
        pytest.param("gemma-2-9b", "v6e:1x1", None, 340, 360, marks=pytest.mark.full),
        pytest.param("gemma-3-27b", "h200x2", None, 420, 450, marks=pytest.mark.full),
        ("gemma-3-27b", "v6e:2x2", None, 410, 440),
        pytest.param("gpt-neo-2.7b", "h200", None, 800, 850, marks=pytest.mark.full),
        pytest.param("glm-4-9b", "h200", 4, 475, 490, marks=pytest.mark.full),
        pytest.param("glm-4-9b", "v6e:1x1", None, 400, 400, marks=pytest.mark.full),
        pytest.param("gpt-oss-20b", "h200", 2, 650, 900, marks=pytest.mark.full),
        ("deepseek-v2-lite", "v6e:1x1", 1, 125, 215),
        pytest.param("glm-4.7-flash", "v6e:1x1", 3, 190, 680, marks=pytest.mark.full),
    ],
)
def test_steps_work_in_place(targets, name, target, num_layers, decode_megabytes, largest_megabytes):
    target, arch = targets(target), first_layers(read_model(name)[1], num_layers)
    platform, local = target.sheet.chip.platform, arch.local(target.num_devices)
    sizes = {"num_query_heads": local.attention.num_heads, "page_size": None, "kv_dtype": BFLOAT16}
    backend = local.kv_layout.pool.select_backend(AUTO, **sizes, platform=platform)
    assert backend == BACKENDS[platform]
    page_size = local.kv_layout.pool.default_page_size(backend, BFLOAT16)
    num_pages = POOL_TOKENS // page_size * len(arch.kv_layout.windows)
    schedule = ScheduleConfig(256, 2048, 8192, page_size, num_pages, windows=arch.kv_layout.windows)
    compiler = StepCompiler(target, schedule, BFLOAT16, BFLOAT16, backend)
    buckets = (decode_bucket(schedule), schedule.max_num_batched_tokens)
    state = abstract_state(local, schedule, kv_dtype=BFLOAT16, backend=backend)
    planned = tree_bytes(abstract_params(arch, BFLOAT16, None, target.num_devices)) + tree_bytes(state)
    limits = (decode_megabytes, largest_megabytes)
    for num_tokens, limit, program in zip(buckets, limits, compiler.compile(arch, buckets), strict=True):
        memory, text = program.memory_analysis(), program.as_text()
        assert memory.argument_size_in_bytes == pytest.approx(planned, rel=0.001)
        assert memory.alias_size_in_bytes >= tree_bytes(state.kv_pages)
        assert temp_bytes(program) <= limit * 1e6
        check_makers(state.kv_pages, text)
        if target.num_devices > 1:
            num_scanned = arch.period + arch.num_layers % arch.period
            check_exchanges(arch, num_tokens, text, num_copies=num_scanned if platform == "tpu" else arch.num_layers)


def smallest_sizes():
    """Return the planner's config of the smallest published size of each architecture."""
    by_size = sorted((registry.num_params(arch), name, arch) for name, arch in map(read_model, known_models()))
    return {arch.architecture: name for _, name, arch in reversed(by_size)}


KNOWN_TO_FAIL = {
    ("gpt-oss-20b", "v6e:1x1"): "the experts' 2,880 columns do not fill lanes: XLA multiplies, copying them every step",
    ("phi-2", "v6e:1x1"): "heads of 80 do not fill lanes: XLA copies the pool in every step",
}


def marks_of(name, target):
    """Return the marks of a model's test on a target: by default few are compiled, and some are known to fail."""
    known = KNOWN_TO_FAIL.get((name, target))
    marks = [] if name in ("gpt2", "gemma-4-e2b") else [pytest.mark.full]
    return marks if known is None else [*marks, pytest.mark.xfail(reason=known, raises=AssertionError, strict=True)]


@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param(name, target, marks=marks_of(name, target))
        for name in smallest_sizes().values()
        for target in ("h200", "v6e:1x1")
    ],
)
def test_first_layers_work_in_place(targets, name, target, tmp_path, monkeypatch):
    """The decode step over a layer of each kind: in place, with small temporaries, and on a GPU one CUDA graph."""
    monkeypatch.setattr(lowering, "step_options", lambda kind: step_options(kind) | dump_options(kind, tmp_path))
    target, arch = targets(target), layers_of_each_kind(read_model(name)[1])
    arch = dataclasses.replace(arch, schemes=None)
    sizes = {"num_query_heads": arch.attention.num_heads, "page_size": None, "kv_dtype": BFLOAT16}
    with jax.sharding.use_abstract_mesh(target.sheet.chip.mesh()):
        backend = arch.kv_layout.pool.select_backend(AUTO, **sizes, platform=None)
    page_size = arch.kv_layout.pool.default_page_size(backend, BFLOAT16)
    num_pages = 16 * POOL_TOKENS // page_size * len(arch.kv_layout.windows)
    num_snapshots = None if arch.state is None else 32
    schedule = ScheduleConfig(
        64, 64, 8192, page_size, num_pages, windows=arch.kv_layout.windows, num_snapshots=num_snapshots
    )
    state = abstract_state(arch, schedule, kv_dtype=BFLOAT16, backend=backend)
    (program,) = StepCompiler(target, schedule, BFLOAT16, BFLOAT16, backend).compile(arch, (64,))
    memory, pool_bytes = program.memory_analysis(), tree_bytes(state.kv_pages)
    assert memory.alias_size_in_bytes >= pool_bytes
    check_makers(state.kv_pages, program.as_text())
    if arch.state is not None:
        check_makers(state.states, program.as_text(), "f32")
    assert temp_bytes(program) <= pool_bytes / 2
    if target.sheet.chip.platform == "gpu":
        assert thunks_of_step(tmp_path) == ["kCommandBuffer"]


@pytest.mark.full
@pytest.mark.parametrize("target", ["h200x4", "v6e:2x2"])
def test_divided_experts_exchange_no_more_and_need_no_more_memory(targets, target):
    target, arch = targets(target), first_layers(read_model("qwen3-30b-a3b")[1], 1)
    backend, local = BACKENDS[target.sheet.chip.platform], arch.local(target.num_devices)
    heads = Heads(local.attention.num_kv_heads, local.attention.head_dim)
    page_size = default_page_size(backend, heads, BFLOAT16)
    schedule = ScheduleConfig(64, 2048, 8192, page_size, POOL_TOKENS // page_size)
    compiler = StepCompiler(target, schedule, BFLOAT16, BFLOAT16, backend)
    sliced, divided = (compiler.compile(arch.divided(4, n), (64,))[0] for n in (1, 4))
    assert collectives(divided.as_text()) == collectives(sliced.as_text())
    assert temp_bytes(divided) <= temp_bytes(sliced)
