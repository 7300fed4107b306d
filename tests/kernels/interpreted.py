"""Runs the kernels of GPUs, on a CPU in the interpreter; as a script, a small case with a bug planted: CASE OLD NEW."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import jax
import numpy as np

ON_CPU = jax.default_backend() == "cpu"
KERNELS = [f"pallas_kernels.ragged_paged_attention.mosaic_gpu.{name}" for name in ("kernel", "merge")]


@dataclass
class Found:
    """What came of a case: the largest error in live outputs, over 1 + what was expected, and the pool's."""

    error: float
    pool_error: float
    is_finite: bool
    races: bool


def run(case):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.ragged_paged_attention import mosaic_gpu, reference
    from pallas_kernels.ragged_paged_attention.cases import pool_error
    from pallas_kernels.ragged_paged_attention.interface import RaggedRows

    inputs = case.inputs()
    rows = RaggedRows(inputs.kv_lens, inputs.page_table, inputs.cu_q_lens, inputs.num_rows)
    options = {**case.options, "sinks": inputs.sinks, "rope": inputs.rope, "tree_mask": inputs.tree_mask}

    def attend(backend, kv_pages):
        return backend.write_and_attend(inputs.q, inputs.k, inputs.v, kv_pages, inputs.layer, rows, **options)

    expected_out, expected_pool = attend(reference, inputs.kv_pages)
    # TMA gives zeros for tokens past the last; the interpreter gives NaN, which must not matter either.
    params = plgpu.InterpretGPUParams(detect_races=True, out_of_bounds_reads="uninitialized") if ON_CPU else None
    with mosaic_gpu.interpreted(params) if ON_CPU else contextlib.nullcontext(), _watched() as kernels:
        attend_here = jax.jit(functools.partial(attend, mosaic_gpu))
        out, pool = jax.block_until_ready(attend_here(mosaic_gpu.from_canonical(inputs.kv_pages)))
    live = sum(case.q_lens)
    out, expected_out = (np.asarray(x, np.float32) for x in (out, expected_out))
    return Found(
        error=float(np.max((np.abs(out - expected_out) / (1 + np.abs(expected_out)))[:live], initial=0)),
        pool_error=pool_error(mosaic_gpu.to_canonical(pool), expected_pool),
        is_finite=bool(np.isfinite(out).all()),
        races=any(kernel.races_found for kernel in kernels),
    )


@contextlib.contextmanager
def _watched():
    """What the interpreter sees of each kernel, one after the other: it keeps that of the last one alone."""
    kernels = []
    if not ON_CPU:
        yield kernels
        return
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    kind = gpu_callbacks.GPURaceDetectionState

    def watch(*args, **options):
        kernels.append(kind(*args, **options))
        return kernels[-1]

    with mock.patch.object(gpu_callbacks, kind.__name__, watch):
        yield kernels
    assert len(kernels) >= 2, "attention and merge"


def places_of(text):
    """The modules of the kernels that have a piece of text, once for each time."""
    sources = {name: Path(importlib.util.find_spec(name).origin).read_text() for name in KERNELS}
    return [name for name, source in sources.items() for _ in range(source.count(text))]


def plant(old, new):
    """Has the kernels be imported with the one piece `old` of their source replaced."""
    (name,) = places_of(old)
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(Path(spec.origin).read_text().replace(old, new), spec.origin, "exec"), module.__dict__)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    name, old, new = sys.argv[1:]
    if old:
        plant(old, new)
    from pallas_kernels.ragged_paged_attention.cases import Case

    lengths, sizes = ((1, 20, 1), (1100, 150, 900)), {"head_dim": 64, "stale": float("nan"), "dtype": "bfloat16"}
    cases = {
        "half": Case("half", *lengths, 4, 1, kv_dtype="bfloat16", **sizes),
        "narrow": Case("narrow", *lengths, 16, 1, kv_dtype="float8_e4m3fn", **sizes),
    }
    print(json.dumps(dataclasses.asdict(run(cases[name]))))
