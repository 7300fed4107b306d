"""Scaling of a decode step's cost over rows, context and queue, for host and device.

    python scripts/scaling.py scaling            # writes scaling.json and scaling.png; needs the bench extra

The host's cost is CPU time on a null device. The device runs the embedded model with a raised context limit, and its
time is a step's wall time; next to it is the lower bound from the step's FLOPs and bytes at numpy's rates on the same
cores. Memory is the process's growth since before the requests.
"""

import argparse
import gc
import json
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import matplotlib as mpl
import numpy as np
import psutil
from matplotlib.figure import Figure

from jaxserve.api.config import EngineConfig
from jaxserve.api.embedded import embedded_model
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.scheduling.step_plan import StepShape
from synthetic.null_device import null_engine
from synthetic.prompts import prompts

mpl.use("Agg")

PAGE_SIZE = 16
MAX_CONTEXT = 8192
PREFILL_TOKENS = 512
HOST_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
DEVICE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
QUEUES = (0, 100, 1_000, 10_000, 100_000)

Point = dict[str, float]
Start = Callable[..., DrivenEngine]


def start_host(**options: Any) -> DrivenEngine:
    """Return an engine on a null device, with capacity for the longest context at every point."""
    return null_engine(max_model_len=MAX_CONTEXT + 1024, **options)


def start_device(**options: Any) -> DrivenEngine:
    """Return the embedded model; RoPE has no limit, so only its quality suffers there."""
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(embedded_model("default"), directory, dirs_exist_ok=True)
        file = Path(directory) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": MAX_CONTEXT + 1024}))
        config = EngineConfig(
            model=directory, skip_tokenizer_init=True, compile_ahead="minimal", multi_step=1, **options
        )
        engine = DrivenEngine(config)
    # Only the measured program, besides those for one token and for a full step.
    decode = min(bucket for bucket in engine.schedule.buckets() if bucket >= engine.schedule.max_num_seqs)
    engine.replicas[0].executor.programs._compile([StepShape(decode)])
    return engine


def measure(start: Start, rows: int, context: int, queue: int, num_steps: int) -> Point:
    """Return medians over steps in which all rows decode, starting at length `context`."""
    num_tokens = 2 * num_steps + rows + rows * context // PREFILL_TOKENS  # the first row must outlast the last prefill
    engine = start(
        max_num_seqs=rows,
        max_num_batched_tokens=rows + PREFILL_TOKENS,
        page_size=PAGE_SIZE,
        num_pages=rows * (-(-(context + num_tokens) // PAGE_SIZE) + 1),
    )
    before_bytes = psutil.Process().memory_info().rss
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for index, prompt in zip(range(rows), prompts(context, seed=0), strict=False):
        engine.add_request(f"row {index}", [i % 4096 for i in prompt], params)
    while engine.last_step is None or engine.last_step.num_decode_tokens < rows:
        engine.step()
    for index, prompt in zip(range(queue), prompts(PAGE_SIZE, seed=1), strict=False):
        engine.add_request(f"waiting {index}", [i % 4096 for i in prompt], params)
    gc.collect()
    wall_ms, cpu_us = zip(*(timed(engine) for _ in range(num_steps)), strict=True)
    step = engine.last_step
    return {
        "rows": rows,
        "context": context,
        "queue": queue,
        "step_ms": float(np.median(wall_ms)),
        "host_us": float(np.median(cpu_us)),
        "flops": step.flops,
        "read_bytes": step.weight_bytes + step.kv_bytes,
        "requests_bytes": psutil.Process().memory_info().rss - before_bytes,
    }


def timed(engine: DrivenEngine) -> tuple[float, float]:
    """Return wall milliseconds and this thread's CPU microseconds for one step."""
    started, started_cpu = time.perf_counter_ns(), time.thread_time_ns()
    engine.step()
    return (time.perf_counter_ns() - started) / 1e6, (time.thread_time_ns() - started_cpu) / 1e3


def peak_rates() -> dict[str, float]:
    """Return floating-point operations and bytes read per second, the best of several numpy runs."""
    a, big = np.ones((1024, 1024), np.float32), np.ones(2**26, np.float32)
    return {"flops_per_s": 2 * 1024**3 / best_s(lambda: a @ a), "bytes_per_s": big.nbytes / best_s(big.sum)}


def best_s(run: Callable[[], Any]) -> float:
    """Return the shortest of several times, in seconds."""
    times = []
    for _ in range(10):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def roofline_ms(points: list[Point], rates: dict[str, float]) -> list[float]:
    """Return the minimum time per step: its FLOPs or its bytes at their peak rate."""
    return [1e3 * max(p["flops"] / rates["flops_per_s"], p["read_bytes"] / rates["bytes_per_s"]) for p in points]


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw host above, device below; the dotted line grows linearly from the first point."""
    figure = Figure(figsize=(15, 8), layout="constrained")
    axes = figure.subplots(2, 3)
    for axis, (name, points) in zip(axes.flat, result["curves"].items(), strict=False):
        part, over = name.split(" over ")
        x = [max(p[over], 1) for p in points]
        y = [p["host_us"] / 1e3 if part == "host" else p["step_ms"] for p in points]
        bound = roofline_ms(points, result["peak_rates"]) if part == "device" else y
        axis.loglog(x, y, "o-", label="measured")
        if part == "device":
            axis.loglog(x, bound, "--", label="roofline")
        axis.loglog(x, [y[0] * v / x[0] for v in x], ":", color="grey", label="linear")
        axis.set(title=name, xlabel=over, ylabel="ms per step", ylim=(min(*y, *bound) / 2, max(y) * 2))
        axis.legend()
    queue = result["curves"]["host over queue"]
    axes.flat[5].semilogx([max(p["queue"], 1) for p in queue], [p["requests_bytes"] / 2**20 for p in queue], "o-")
    axes.flat[5].set(title="memory over queue", xlabel="queue", ylabel="MiB of process growth")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="name of the files, without suffix")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--max-rows", type=int, default=256, help="most rows on the device")
    parser.add_argument("--max-context", type=int, default=MAX_CONTEXT, help="longest context on the device")
    args = parser.parse_args()
    device_rows = [rows for rows in DEVICE_ROWS if rows <= args.max_rows]
    contexts = [context for context in CONTEXTS if context <= args.max_context]
    grid: dict[str, tuple[Start, list[tuple[int, int, int]]]] = {
        "host over rows": (start_host, [(rows, 64, 0) for rows in HOST_ROWS]),
        "host over context": (start_host, [(8, context, 0) for context in CONTEXTS]),
        "host over queue": (start_host, [(64, 64, queue) for queue in QUEUES]),
        "device over rows": (start_device, [(rows, 64, 0) for rows in device_rows]),
        "device over context": (start_device, [(4, context, 0) for context in contexts]),
    }
    versions = {"jax": jax.__version__, "python": platform.python_version(), "device": jax.devices()[0].device_kind}
    result: dict[str, Any] = {"bench": "scaling", **versions, "peak_rates": peak_rates(), "curves": {}}
    for name, (start, cases) in grid.items():
        result["curves"][name] = []
        for case in cases:
            point = measure(start, *case, args.steps)
            result["curves"][name].append(point)
            print(json.dumps({"bench": "scaling", "curve": name, **point, **versions}), flush=True)
    args.output.with_suffix(".json").write_text(json.dumps(result, indent=1))
    draw(result, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
