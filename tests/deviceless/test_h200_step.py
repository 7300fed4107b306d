"""The whole step, compiled for an H200: in place, without copies as large as the pool, with few temporaries."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxserve.execution.batch import BatchLayout
from jaxserve.execution.round import Model
from jaxserve.execution.state import abstract_state
from jaxserve.execution.step import make_serve_step, step_options
from jaxserve.models import registry
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.tools.planner.program import StepCompiler, abstract_params
from jaxserve.tools.planner.targets import parse_target
from tests.deviceless.thunks import dump_options, thunks_of_step

pytestmark = pytest.mark.deviceless

DEFAULT_MODEL = Path(__file__).parents[2] / "weights" / "default" / "config.json"
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "dtype": "bfloat16",
}
BFLOAT16 = jnp.dtype("bfloat16")
DEFAULT_STEPS = {  # tokens, steps per dispatch, elements in the pool: upper bound of temporaries in megabytes
    (8, 1, "bfloat16"): 24,
    (8, 16, "bfloat16"): 24,
    (2048, 1, "bfloat16"): 96,
    (64, 1, "int8"): 24,
    (64, 1, "float8_e4m3fn"): 24,
}
HLO_NAMES = {"bfloat16": "bf16", "float32": "f32", "int8": "s8", "float8_e4m3fn": "f8e4m3fn"}


def lower_step(chip, config, schedule, num_tokens, max_steps, kv_dtype, options=None, backend="mosaic_gpu"):
    """Return the pool, and the step of one bucket, or of multi-step decode if `max_steps` is more than one."""
    arch, layout = registry.from_hf_config(config), BatchLayout.from_config(schedule, num_tokens)
    params = abstract_params(arch, BFLOAT16)
    state = abstract_state(arch, schedule, kv_dtype=kv_dtype, backend=backend)
    blob = jax.ShapeDtypeStruct((layout.blob.size,), jnp.int32)
    program = make_serve_step(Model.from_arch(arch, backend=backend), layout, max_steps)
    return state.kv_pages, chip.lower(program, (params, state, blob), (1,), None, options)


def compile_split_step(config, schedule, num_tokens, num_devices, kv_dtype):
    """Return the step of one bucket over several chips, and one chip's share of the pool."""
    arch, kv_dtype = registry.from_hf_config(config), jnp.dtype(kv_dtype)
    target = dataclasses.replace(parse_target("h200"), shape=(num_devices,))
    compiler = StepCompiler(target, schedule, BFLOAT16, kv_dtype, "mosaic_gpu")
    part = abstract_state(arch.local(num_devices), schedule, kv_dtype=kv_dtype, backend="mosaic_gpu").kv_pages
    return part, compiler.compile(arch, [num_tokens])[0]


def check(pool, compiled, max_temp_bytes, num_kinds):
    memory, program, arrays = compiled.memory_analysis(), compiled.as_text(), jax.tree.leaves(pool)
    assert memory.alias_size_in_bytes >= sum(array.size * array.dtype.itemsize for array in arrays)
    assert memory.temp_size_in_bytes <= max_temp_bytes
    for array in arrays:
        shape = f"{HLO_NAMES[array.dtype.name]}[{','.join(map(str, array.shape))}]"
        makers = re.findall(rf"= {re.escape(shape)}\S* ([a-z-]+)\(", program)
        assert makers, "the pool is in the program"
        assert not {"copy", "copy-start", "transpose", "concatenate", "pad", "convert"} & set(makers)
    kernels = re.findall(r'custom_call_target="mosaic_gpu_v2"', program)
    assert len(kernels) == 2 * num_kinds * arrays[0].shape[0], "attention and merge, once a layer and kind of tiles"


@pytest.fixture(scope="module")
def default_steps(h200):
    """Return pools and programs of the default model, compiled in parallel."""
    schedule, config = ScheduleConfig(256, 2048, 1024, 16, num_pages=50_000), json.loads(DEFAULT_MODEL.read_text())
    lowered = {key: lower_step(h200, config, schedule, *key[:2], jnp.dtype(key[2])) for key in DEFAULT_STEPS}
    compiled = h200.compile_all([program for _, program in lowered.values()])
    return {key: (pool, program) for (key, (pool, _)), program in zip(lowered.items(), compiled, strict=True)}


@pytest.mark.parametrize("step", DEFAULT_STEPS, ids=str)
def test_default_model(default_steps, step):
    check(*default_steps[step], DEFAULT_STEPS[step] * 1e6, num_kinds=1 if step[0] < 512 else 2)


@pytest.mark.parametrize(("num_tokens", "max_steps"), [(64, 1), (2048, 1), (16, 8)])
def test_a_step_is_one_cuda_graph(h200, num_tokens, max_steps, tmp_path):
    """Branches and loops are nodes of the graph too: the host waits for nothing, and launches once."""
    schedule, config = ScheduleConfig(256, 2048, 1024, 16, num_pages=64), json.loads(DEFAULT_MODEL.read_text())
    options = step_options(h200.device_kind) | dump_options(h200.device_kind, tmp_path)
    _, step = lower_step(h200, config, schedule, num_tokens, max_steps, BFLOAT16, options)
    h200.compile_all([step])
    assert thunks_of_step(tmp_path) == ["kCommandBuffer"]


def test_layers_of_8b_over_sixteen(h200):
    """Each KV head of 8 is on two chips. Chips exchange twice a layer, for the embedding, and in branches to sample."""
    schedule = ScheduleConfig(256, 2048, 8192, 16, num_pages=40_000)
    config = {**LLAMA_8B, "num_hidden_layers": 2}
    pool, compiled = compile_split_step(config, schedule, 8, 16, "int8")
    check(pool, compiled, 100e6, num_kinds=1)
    program = compiled.as_text()
    meetings = [line for line in program.splitlines() if re.search(r" all-(reduce|gather|to-all)(-start)?\(", line)]
    in_layers = [line for line in meetings if "/cond/" not in line]
    assert len(in_layers) == 2 * config["num_hidden_layers"] + 1
    assert all(" all-reduce" in line for line in in_layers)
