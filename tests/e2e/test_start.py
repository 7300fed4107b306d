"""Start of engines, and programs that are never compiled afterwards."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings

from jaxserve import LLM
from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly import build, generation_defaults, memory, parameters
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.layers.weight_formats import packed
from jaxserve.pallas_kernels import native, packed_linear
from tests.checkpoints import write_checkpoint
from tests.e2e.sizes import ONE_ROW, SIZES
from tests.e2e.workloads import Job, few_but_rich, generate, jobs, run, run_alone, tokens
from tests.parameters import mainly
from tests.random_runs import examples
from tests.soon_compiled import few_programs

Start = Callable[..., DrivenEngine]

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def start_process(llama: Path, cache_dir: Path) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("start_program.py")), str(llama), str(cache_dir)]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result, *at_exit = done.stdout.splitlines()
    assert at_exit == ["closed", "finalized"], "a runner stops compiling before finalizers take what is traced"
    return json.loads(result)


@pytest.mark.long
def test_second_start_compiles_nothing(llama: Path, tmp_path: Path) -> None:
    first, second = start_process(llama, tmp_path), start_process(llama, tmp_path)
    assert first["programs"] >= 3  # the state, set_slot, the step
    assert second["programs"] == 0
    assert second["token_ids"] == first["token_ids"]
    for result in (first, second):
        assert result["compiled_while_serving"] == 0
        assert result["refused"], "wrong types are RequestErrors without any type checker"


@pytest.mark.parametrize(
    ("asked", "stored", "on_cpu", "served"),
    [
        ("auto", "float32", False, "bfloat16"),
        ("auto", "float16", False, "float16"),
        ("auto", "bfloat16", False, "bfloat16"),
        ("auto", "float32", True, "float32"),
        ("auto", "bfloat16", True, "float32"),
        ("float32", "float32", False, "float32"),
    ],
)
def test_dtype_of_weights_and_activations(llama: Path, asked: str, stored: str, on_cpu: bool, served: str) -> None:
    config = EngineConfig(str(llama), dtype=asked)
    arch = replace(generation_defaults.build_arch(config), dtype=stored)
    assert parameters.compute_dtype(config, arch, on_cpu=on_cpu).name == served


@pytest.mark.skipif(packed_linear.unsupported("float32", "cpu") is not None, reason="needs the native kernels")
@pytest.mark.parametrize("stored", mainly(["bfloat16"], "float16"))
@pytest.mark.long
def test_a_cpu_keeps_16_bit_matrices(tmp_path: Path, stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens equal the same weights' tokens in float32; so do log probabilities, to the last bit without AMX tiles.

    The tiles, which multiply bfloat16, add the same products in another order.
    """
    write_checkpoint(tmp_path, "llama", dtype=stored)
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    prompts = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (1, 20)]

    def complete(dtype: str, instruction_set: str) -> tuple[list[list[int]], list[dict[int, float]]]:
        own = {"skip_tokenizer_init": True, "dtype": dtype}
        with native.using(instruction_set), few_programs(), LLM(str(tmp_path), **own, **SIZES) as llm:
            outputs = [output.outputs[0] for output in llm.generate(prompts, sampling)]
            dtypes = {x.dtype.name for x in jax.tree.leaves(llm.params) if x.ndim > 1 and x.size}
            assert dtypes == {stored if dtype == "auto" else "float32"}
        steps = [step for output in outputs for step in output.logprobs or []]
        return [output.token_ids for output in outputs], [{i: x.logprob for i, x in step.items()} for step in steps]

    best, *others = native.instruction_sets()
    exact = others[0] if best == "amx" and stored == "bfloat16" else best
    expected = complete("float32", exact)
    assert complete("auto", exact) == expected
    if best != exact:
        token_ids, logprobs = complete("auto", best)
        assert token_ids == expected[0]
        for step, expected_step in zip(logprobs, expected[1], strict=True):
            assert list(step) == list(expected_step)
            np.testing.assert_allclose([*step.values()], [*expected_step.values()], atol=1e-5)
    config = EngineConfig(str(tmp_path))
    arch = generation_defaults.build_arch(config)
    assert parameters.matrix_dtype(config, arch).name == stored
    monkeypatch.setattr(packed, "unsupported", lambda *_: "as without a compiler")
    assert parameters.matrix_dtype(config, arch).name == "float32"


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_float32_checkpoint_on_an_accelerator(
    llama: Path, dtype: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config = EngineConfig(str(llama), dtype=dtype)
    params = parameters.build_params(config, generation_defaults.build_arch(config))
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(params)}
    assert ("bfloat16" in dtypes) == (dtype == "auto")
    messages = [record.getMessage() for record in caplog.records if "served in" in record.getMessage()]
    assert messages == ['the float32 checkpoint is served in bfloat16; pass dtype="float32" to keep its precision'] * (
        dtype == "auto"
    )


@given(jobs=jobs(aborts=True))
@settings(few_but_rich, max_examples=examples(4))  # of other tests, `drained` checks the same
def test_no_request_compiles_anything(start: Start, jobs: list[Job]) -> None:
    engine = start()  # forbid_compiles: a step that compiles raises
    run(engine, jobs)
    assert engine.stats.num_compiles == 0


def test_a_compile_while_serving_is_noticed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    engine = start()
    pack = engine.replicas[0].executor.packer.pack

    def compiling(*args: Any) -> Any:
        jax.jit(lambda x: x * 3.25)(1.0)
        return pack(*args)

    monkeypatch.setattr(engine.replicas[0].executor.packer, "pack", compiling)
    engine.add_request("a", tokens(3, 0), GREEDY)
    with pytest.raises(RuntimeError, match="compiled 1 programs after warm-up"):
        engine.step()
    engine.abort("a")
    engine.stats.num_compiles = 0


@pytest.mark.parametrize("options", mainly([{"dtype": "bfloat16"}], {"kv_cache_dtype": "bfloat16"}))
@pytest.mark.long
def test_narrow_dtypes(start: Start, options: dict[str, str]) -> None:
    """Half-precision programs run, and the log probabilities of their first token are within 0.1."""
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
    (exact,) = generate(start(), [tokens(9, 0)], params)
    engine = start(**ONE_ROW | options)
    (narrow,) = generate(engine, [tokens(9, 0)], params)
    kv_dtype = options.get("kv_cache_dtype", "bfloat16")
    assert jax.tree.leaves(engine.replicas[0].executor.state.kv_pages)[0].dtype == kv_dtype
    assert engine.replicas[0].executor.params["embed"].dtype == options.get("dtype", "float32")
    a, b = (next(iter(o.outputs[0].logprobs[0].values())).logprob for o in (exact, narrow))
    assert a == pytest.approx(b, abs=0.1)
    assert len(narrow.outputs[0].token_ids) == 5


def test_int8_weights(start: Start) -> None:
    """A step reads a quarter of the bytes; outputs are near, and depend on neither batch nor cache."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    prompts = [tokens(length, length) for length in (1, 23, 9)]
    exact, narrow = start(), start(quantization="int8")
    together = generate(narrow, prompts, params)
    bytes_read = narrow.last_step.weight_bytes
    for prompt, output in zip(prompts, together, strict=True):
        (cached,) = generate(narrow, [prompt], params)
        narrow.reset_prefix_cache()
        (alone,) = generate(narrow, [prompt], params)
        assert cached.outputs[0].token_ids == alone.outputs[0].token_ids == output.outputs[0].token_ids
        (reference,) = generate(exact, [prompt], params)
        a, b = (next(iter(o.outputs[0].logprobs[0].values())).logprob for o in (reference, output))
        assert a == pytest.approx(b, abs=0.05)
    assert 0.25 < bytes_read / exact.last_step.weight_bytes < 0.29
    assert narrow.replicas[0].executor.state.kv_pages.dtype == "float32"


@pytest.mark.full
def test_int8_weights_run_in_bfloat16(start: Start) -> None:
    engine = start(**ONE_ROW, dtype="bfloat16", quantization="int8")
    assert engine.replicas[0].executor.state.kv_pages.dtype == "bfloat16"
    assert len(generate(engine, [tokens(9, 0)], GREEDY)[0].outputs[0].token_ids) > 0


SMALL = {"max_num_batched_tokens": 4}
BEST = "xla" if build.native.unavailable() else "native"


@pytest.mark.parametrize(
    ("backend", "dtype", "head_bytes", "error"),
    [
        pytest.param(BEST, "int8", 16 + 2, 0.05, marks=pytest.mark.long),
        pytest.param(BEST, "int4", 8 + 4, 0.2, marks=pytest.mark.full),
        pytest.param(BEST, "fp8", 16 + 2, 0.05, marks=pytest.mark.full),
        pytest.param("xla", "int8", 16 + 2, 0.05, marks=pytest.mark.full),
    ],
)
def test_narrow_pools(start: Start, backend: str, dtype: str, head_bytes: int, error: float) -> None:
    """Outputs are near, and depend on neither batch, cache, chunks nor preemption; tokens take few bytes."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    prompts = [tokens(length, length) for length in (1, 23, 9)]
    exact = start()
    options = {"kv_cache_dtype": dtype, "attention_backend": backend}
    narrow, small = (start(**options, **sizes) for sizes in ({}, SMALL))
    together, chunked = (generate(engine, prompts, params) for engine in (narrow, small))
    for prompt, *outputs in zip(prompts, together, chunked, strict=True):
        (cached,) = generate(narrow, [prompt], params)
        narrow.reset_prefix_cache()
        (alone,) = generate(narrow, [prompt], params)
        ids = {tuple(output.outputs[0].token_ids) for output in (cached, alone, *outputs)}
        assert len(ids) == 1
        (reference,) = generate(exact, [prompt], params)
        a, b = (next(iter(o.outputs[0].logprobs[0].values())).logprob for o in (reference, alone))
        assert a == pytest.approx(b, abs=error)
    narrow.reset_prefix_cache()
    crowd = [Job(tokens(20, i), replace(params, max_tokens=25)) for i in range(4)]
    outputs = run(narrow, crowd)
    assert narrow.stats.num_preemptions > 0
    for output, job in zip(outputs, crowd, strict=True):
        narrow.reset_prefix_cache()
        assert output.outputs[0].token_ids == run_alone(narrow, job).outputs[0].token_ids
    wide, few = (engine.replicas[0].executor for engine in (exact, narrow))
    assert wide.arch.attention.head_dim == 16
    assert few.costs.kv_token_bytes / wide.costs.kv_token_bytes == head_bytes / (4 * 16)


def test_background_compiles_end_and_serve(llama: Path) -> None:
    """Requests are served meanwhile, with the next larger program that is ready."""
    sizes = {**ONE_ROW, "max_num_batched_tokens": 3, "compile_ahead": "background"}
    engine = DrivenEngine(EngineConfig(model=str(llama), skip_tokenizer_init=True, **sizes))
    early = generate(engine, [tokens(9, 0)], GREEDY)
    engine.wait_until_warm()
    assert sorted(engine.replicas[0].executor.programs.table) == [(size, 1, 0, 0) for size in (1, 2, 3)]
    assert generate(engine, [tokens(9, 0)], GREEDY)[0].outputs[0].token_ids == early[0].outputs[0].token_ids
    engine.close()
    engine.close()


@pytest.mark.parametrize("on_cpu", [True, False])
def test_missing_native_kernels_are_warned_of_once(
    on_cpu: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build.native, "unavailable", lambda: "there are no native kernels: no compiler")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu" if on_cpu else "gpu")
    build.warn_without_native_kernels()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * on_cpu
    assert ("no compiler; with a C++ compiler" in caplog.text) == on_cpu


def test_slots_are_in_the_budget_of_the_pool(start: Start, llama: Path) -> None:
    engine, config = start(), EngineConfig(str(llama), **SIZES)
    arch, slots = engine.arch, engine.replicas[0].executor.state.slots
    assert memory.slot_bytes(config, arch, on_cpu=True) == sum(table.nbytes for table in jax.tree.leaves(slots))
    longer = replace(config, max_model_len=128)
    for budget in (
        lambda config: memory.accelerator_pool_bytes(config, arch, total_bytes=10**9, limit_bytes=10**9, used_bytes=0),
        lambda config: memory.cpu_pool_bytes(config, arch, page_size=16, page_bytes=10**12),
    ):
        assert budget(config) - budget(longer) == 4 * 4 * 64


def test_the_pool_is_sized_from_memory_when_not_given(llama: Path) -> None:
    sizes = {**ONE_ROW, "num_pages": None}
    engine = DrivenEngine(EngineConfig(model=str(llama), skip_tokenizer_init=True, **sizes))
    assert engine.schedule.num_pages == ONE_ROW["num_pages"]  # one row of full length needs no more
    generate(engine, [tokens(9, 0)], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))


INTERRUPTED_WHILE_COMPILING = """
import os, signal, sys, threading, jax
from jaxserve.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background

compile_lowered = jax.stages.Lowered.compile
seen = []

def compile_and_be_interrupted(self, *args, **kwargs):
    seen.append(self)
    if len(seen) == int(sys.argv[1]):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    return compile_lowered(self, *args, **kwargs)

jax.stages.Lowered.compile = compile_and_be_interrupted
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        pytest.param("2", ["generate", "x"], marks=pytest.mark.full, id="generate"),  # the first step's
        pytest.param("4", ["bench", "offline"], id="bench"),  # one in the background, waited for
    ],
)
@pytest.mark.long
def test_an_interrupt_while_compiling_ends_the_process_in_order(
    program: str, arguments: list[str], tmp_path: Path
) -> None:
    """XLA must not be at work when its client is destroyed, or the process crashes."""
    command = [sys.executable, "-c", INTERRUPTED_WHILE_COMPILING, program, *arguments]
    command += ["--compilation-cache-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "interrupted" in done.stderr
    assert done.returncode == 130, done.stderr
