"""Run kernels on a CPU in the interpreter; as a script, run a small case with a planted bug: KERNELS CASE OLD NEW."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import jax
import numpy as np

ON_CPU = jax.default_backend() == "cpu"
OP = "jaxserve.pallas_kernels.ragged_paged_attention"
MATMUL = "jaxserve.pallas_kernels.grouped_matmul"
KERNELS = {
    "mosaic_gpu": [
        f"{OP}.mosaic_gpu.{name}"
        for name in (
            "kernel",
            "memory",
            "warpgroup",
            "loading_warpgroup",
            "tile_loader",
            "softmax_warpgroup",
            "computing_warpgroup",
            "ring_reader",
            "outputs",
            "split_merge",
        )
    ],
    "mosaic_tpu": [
        f"{OP}.mosaic_tpu.{name}"
        for name in ("kernel", "work_plan", "page_writer", "phase", "pages", "decode_phase", "tile_phase", "softmax")
    ],
    "grouped_gpu": [f"{MATMUL}.{name}" for name in ("mosaic_gpu.pipeline", "mosaic_gpu.float_kernel", "visits")],
    "grouped_tpu": [f"{MATMUL}.mosaic_tpu.float_kernel", f"{MATMUL}.visits"],
    "quantized_gpu": [f"{MATMUL}.mosaic_gpu.{name}" for name in ("pipeline", "quantized_kernel", "fragments")],
    "quantized_tpu": [f"{MATMUL}.mosaic_tpu.quantized_kernel"],
}
SMALL_TILES = {
    "grouped_gpu": {"stages": 3},
    "grouped_tpu": {"weight_bytes": 2**16, "min_rows": 16, "max_rows": 16},
    "quantized_gpu": {"rows": 128, "stages": 3},
    "quantized_tpu": {"weight_bytes": 2**16, "max_rows": 16, "columns": 256},
}


@dataclass
class Found:
    """Result of a case: the largest error in live outputs, over 1 + the expected value, and the pool's error."""

    error: float
    is_finite: bool
    races: bool
    pool_error: float = 0.0


def run(case, name):
    """Run a case of attention."""
    from jaxserve.pallas_kernels.ragged_paged_attention import BACKENDS, to_canonical
    from jaxserve.pallas_kernels.ragged_paged_attention.quantized import values_of
    from tests.kernels import attention_reference
    from tests.kernels.attention_cases import pool_error

    kernels = BACKENDS[name]

    def attend(inputs, kv_pages, layer):
        page_size = kernels.layout.pool_dims(values_of(kv_pages).shape).page_size
        inputs = inputs._replace(rows=inputs.rows.with_read_pages(page_size))
        return kernels.write_and_attend(inputs, kv_pages, layer, case.options)

    with jax.default_device(jax.devices("cpu")[0]):  # whose float32 is exact, and which compiles small programs soon
        arguments = case.arguments()
        expected_out, expected_pool = attention_reference.write_and_attend(*arguments, case.options)
    inputs, kv_pages, layer = jax.device_put(arguments, jax.devices()[0], may_alias=False)
    here = kernels.settings.interpreted(_params(name)) if ON_CPU else contextlib.nullcontext()
    with here, _watched(name) as has_races:
        options = {"xla_backend_optimization_level": 0} if ON_CPU else {}
        pool = kernels.layout(values_of(kv_pages).shape[3:]).from_canonical(kv_pages)
        out, pool = jax.block_until_ready(jax.jit(attend, compiler_options=options)(inputs, pool, layer))
    out, expected_out = (np.asarray(x, np.float32) for x in (out, expected_out))
    num_live, num_rotated = case.num_live, case.kind.rope_dim if case.has_rope and case.rank is not None else 0
    return Found(
        error=float(np.max((np.abs(out - expected_out) / (1 + np.abs(expected_out)))[:num_live], initial=0)),
        pool_error=pool_error(to_canonical(name, pool, case.kind), expected_pool, num_rotated),
        is_finite=bool(np.isfinite(out).all()),
        races=has_races(),
    )


def run_groups(case, name):
    """Run a case of a grouped matmul; matrices of empty groups, and rows after the last group, are NaN."""
    from jaxserve.pallas_kernels.grouped_matmul import GROUPED_MATMUL
    from jaxserve.pallas_kernels.grouped_matmul.launch import SETTINGS

    backend = GROUPED_MATMUL.backends[name.replace("grouped", "mosaic")]
    multiply = functools.partial(backend.multiply, case.problem(jax.default_backend()))
    here = SETTINGS.interpreted(_params(name)) if ON_CPU else contextlib.nullcontext()
    with here, SETTINGS.sized(**SMALL_TILES[name]), _watched(name, num_kernels=1) as has_races:
        options = {"xla_backend_optimization_level": 0} if ON_CPU else {}
        y = np.asarray(jax.jit(multiply, compiler_options=options)(*case.arguments(np.nan)), np.float32)
    live = y[: sum(case.group_sizes)]
    expected = case.expected()[: len(live)]
    error = np.max(np.abs(live - expected) / (1 + np.abs(expected)), initial=0)
    return Found(float(error), bool(np.isfinite(live).all()), has_races())


def run_quantized(case, name):
    """Run a case of a matmul with a quantised matrix; the scales of other layers are NaN."""
    from jaxserve.pallas_kernels.grouped_matmul import QUANTIZED_MATMUL
    from jaxserve.pallas_kernels.grouped_matmul.launch import SETTINGS
    from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu.quantized_matmul import scales_sums

    problem, arguments = case.problem(jax.default_backend()), case.arguments(np.nan)
    backend, kind = QUANTIZED_MATMUL.backends[name.replace("quantized", "mosaic")], arguments.matrix.kind

    def multiply(x, arrays, layer):
        return backend.multiply(problem, x, arguments.matrix._replace(**arrays), None, layer)

    arrays = {key: array for key, array in arguments.matrix._asdict().items() if key != "kind"}
    here = SETTINGS.interpreted(_params(name)) if ON_CPU else contextlib.nullcontext()
    with here, SETTINGS.sized(**SMALL_TILES[name]), _watched(name, num_kernels=1) as has_races:
        assert backend.unsupported_reason(problem) is None, (backend.unsupported_reason(problem), kind)
        options = {"xla_backend_optimization_level": 0} if ON_CPU else {}
        y = jax.jit(multiply, compiler_options=options)(arguments.x, arrays, arguments.layer)
        is_rounded = name != "quantized_gpu" or not scales_sums(problem, backend.launch(problem).tiles.rows)
    y, expected = np.asarray(y, np.float32), case.expected(is_rounded)
    error = np.max(np.abs(y - expected) / (1 + np.abs(expected)))
    return Found(float(error), bool(np.isfinite(y).all()), has_races())


def _params(name):
    if name.endswith("tpu"):
        from jax.experimental.pallas import tpu as pltpu

        return pltpu.InterpretParams(detect_races=True)
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # TMA gives zeros for tokens past the last; the interpreter gives NaN, which must not matter either.
    return plgpu.InterpretGPUParams(detect_races=True, out_of_bounds_reads="uninitialized")


@contextlib.contextmanager
def _watched(name, num_kernels=2):
    """Yield a function that returns whether the interpreter saw races."""
    if not ON_CPU:
        yield lambda: False
    elif name.endswith("tpu"):
        from jax._src.pallas.mosaic.interpret import interpret_pallas_call

        yield lambda: interpret_pallas_call.races.races_found
    else:
        with _watched_on_gpu() as kernels:
            yield lambda: any(kernel.races_found for kernel in kernels)
        assert len(kernels) >= num_kernels


@contextlib.contextmanager
def _watched_on_gpu():
    """Yield the race detectors of all kernels; the interpreter keeps only that of the last kernel."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    kernels, kind = [], gpu_callbacks.GPURaceDetectionState

    def watch(*args, **options):
        kernels.append(kind(*args, **options))
        return kernels[-1]

    with mock.patch.object(gpu_callbacks, kind.__name__, watch):
        yield kernels


def places_of(name, text):
    """Return the modules of a backend's kernels that contain a piece of text, once per occurrence."""
    sources = {module: Path(importlib.util.find_spec(module).origin).read_text() for module in KERNELS[name]}
    return [module for module, source in sources.items() for _ in range(source.count(text))]


def plant(name, old, new):
    """Import the kernels with the only occurrence of `old` in their source replaced."""
    (name,) = places_of(name, old)
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(Path(spec.origin).read_text().replace(old, new), spec.origin, "exec"), module.__dict__)


def goes_wrong(kernels, case, old, new, folder):
    """Return whether a small case goes wrong, in a process of its own, with `old` replaced in the source."""
    script = [sys.executable, __file__, kernels, case, old, new]
    try:
        done = subprocess.run(
            script, capture_output=True, text=True, timeout=25 if old else 100, cwd=folder, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    print(done.stdout, done.stderr)  # shown where the test fails
    if done.returncode:
        return True
    found = Found(**json.loads(done.stdout.splitlines()[-1]))
    return found.error > 1e-4 or not found.is_finite or found.races


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    kernels, name, old, new = sys.argv[1:]
    if old:
        plant(kernels, old, new)
    if kernels in SMALL_TILES:
        from tests.kernels import grouped_cases, quantized_cases

        cases, run_case = (
            (grouped_cases, run_groups) if kernels.startswith("grouped") else (quantized_cases, run_quantized)
        )
        print(json.dumps(dataclasses.asdict(run_case(cases.BY_NAME[name], kernels))))
        sys.exit()
    from tests.kernels.attention_cases import Case

    lengths, sizes = ((1, 20, 1), (1100, 150, 900)), {"head_dim": 64, "stale": float("nan"), "dtype": "bfloat16"}
    tpu_lengths = (1, 20, 1, 3, 1), (190, 150, 110, 3, 70)
    tree_lengths, tree = ((32, 20, 1, 48), (208, 150, 300, 100)), {"tree": "random", "window": 30}
    cases = {
        "half": Case("half", *lengths, 4, 1, kv_dtype="bfloat16", **sizes),
        "narrow": Case("narrow", *lengths, 16, 1, kv_dtype="float8_e4m3fn", **sizes),
        "tree": Case("tree", *tree_lengths, 4, 1, kv_dtype="bfloat16", **sizes, **tree),
        "tree_wide": Case("tree_wide", (32, 1), (276, 100), 4, 1, kv_dtype="bfloat16", **sizes, tree="random"),
        "tpu": Case("tpu", *tpu_lengths, 4, 1, kv_dtype="bfloat16", **sizes),
        "tpu_tree": Case("tpu_tree", *tree_lengths, 4, 1, kv_dtype="bfloat16", **sizes, **tree),
        "tpu_narrow": Case("tpu_narrow", *tpu_lengths, 4, 1, page_size=32, kv_dtype="float8_e4m3fn", **sizes),
    }
    cases |= {
        f"{name}_latents": dataclasses.replace(cases[name], num_kv_heads=1, head_dim=rank + 32, rank=rank)
        for name, rank in {"tpu": 128, "tpu_narrow": 128, "half": 256}.items()
    }
    print(json.dumps(dataclasses.asdict(run(cases[name], kernels))))
