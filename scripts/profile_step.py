"""Profile a decode-only stream: host functions, device, and the gap between two device programs.

    python scripts/profile_step.py                          # the embedded default model, 1 row and 8 rows
    python scripts/profile_step.py --multi-step 8 --steps 50     # eight decode steps per dispatch
    python scripts/profile_step.py --model DIR --rows 64 --json profile.json

All times come from one jax.profiler trace and are medians over dispatches, of one step or several each. `gap` is the
time from one device program's end to the next one's start, while the device waits for the host. Tracing itself slows
small programs: `untraced_step_ms` is the step just before the trace began.
"""

import argparse
import itertools
import json
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from device_report.trace import Span, lines, programs, record
from jaxserve import SamplingParams
from jaxserve.api.config import EngineConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.core.growing_outputs import RequestGroup
from jaxserve.execution.runner import RunningStep

WARM_UP_STEPS = 20
PROMPT = "def function_{}(arguments):\n    "


def annotate(owner: Any, method: str, label: str) -> None:
    """Make every call of `method` appear in the trace as `label`."""
    function: Callable[..., Any] = getattr(owner, method)

    def annotated(*args: Any, **kwargs: Any) -> Any:
        with jax.profiler.TraceAnnotation(label):
            return function(*args, **kwargs)

    setattr(owner, method, annotated)


def annotate_engine(engine: DrivenEngine) -> None:
    """Make the host functions of each step appear in the trace."""
    annotate(engine, "step", "host:step")
    annotate(engine.replicas[0].scheduler, "schedule", "host:schedule")
    annotate(engine.replicas[0].executor.packer, "pack", "host:pack")
    annotate(engine.replicas[0].executor, "launch", "host:dispatch")
    annotate(engine.replicas[0].scheduler, "update", "host:update")
    annotate(engine.replicas[0].step_stats, "write", "host:statistics")


def host_ms(trace: jax.profiler.ProfileData) -> dict[str, float]:
    """Return milliseconds per step for each annotated function: the median over steps of its total time."""
    spans = defaultdict(list)
    for line in lines(trace, "/host:"):
        for event in line.events:
            if event.name.startswith("host:"):
                spans[event.name.removeprefix("host:")].append(Span(event.start_ns, event.end_ns))
    steps = spans.pop("step")
    inside = {
        name: statistics.median(
            sum(s.end - s.start for s in calls if step.start <= s.start < step.end) for step in steps
        )
        for name, calls in spans.items()
    }
    return {name: ns / 1e6 for name, ns in inside.items()}


def profile(engine: DrivenEngine, num_rows: int, num_steps: int) -> dict[str, Any]:
    """Return the summary of one stream with `num_rows` rows."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for row in range(num_rows):
        engine.add_request(f"{num_rows} rows, {row}", PROMPT.format(row), params)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    started = time.perf_counter()
    for _ in range(num_steps // 2):
        engine.step()
    untraced_ms = (time.perf_counter() - started) / (num_steps // 2) * 1e3
    with tempfile.TemporaryDirectory() as directory:
        trace = record(engine, num_steps, directory)
    if not engine.has_unfinished():
        longest = engine.schedule.max_model_len
        raise SystemExit(f"the stream must outlast the trace, but ended at max_model_len {longest}; lower --steps")
    for row in range(num_rows):
        engine.abort(f"{num_rows} rows, {row}")
    return {"rows": num_rows, "steps": num_steps, "untraced_step_ms": untraced_ms} | summary(trace)


def summary(trace: jax.profiler.ProfileData) -> dict[str, Any]:
    """Return medians over traced steps, without the first and last programs, which the trace may cut."""
    ran = programs(trace)[1:-1]
    if len(ran) < 2:
        raise RuntimeError(
            f"a profile needs at least 4 device programs in the trace, got {len(ran) + 2}; use more --steps"
        )
    gap_ms = statistics.median(b.start - a.end for a, b in itertools.pairwise(ran)) / 1e6
    period_ms = statistics.median(b.start - a.start for a, b in itertools.pairwise(ran)) / 1e6
    return {
        "host_ms": host_ms(trace),
        "device_ms": statistics.median(p.end - p.start for p in ran) / 1e6,
        "gap_ms": gap_ms,
        "step_ms": period_ms,
        "gap_share": gap_ms / period_ms,
    }


def table(result: dict[str, Any]) -> str:
    """Return the summary as text."""
    rows = [(f"host {name}", ms) for name, ms in result["host_ms"].items()]
    rows += [(name, result[f"{name}_ms"]) for name in ("device", "gap", "step", "untraced_step")]
    text = [f"{result['rows']} rows, median of {result['steps']} steps"]
    text += [f"  {name:<18}{ms:9.3f} ms" for name, ms in rows]
    return "\n".join([*text, f"  {'gap / step':<18}{result['gap_share']:9.1%}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="DIR", help="Hugging Face checkpoint; the embedded default without")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=100, help="calls of DrivenEngine.step in the trace")
    parser.add_argument("--multi-step", type=int, default=1, help="most decode steps per dispatch; 1 is the plain loop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summaries there too")
    args = parser.parse_args()
    config = EngineConfig(
        args.model,
        compile_ahead="all",
        multi_step=args.multi_step,
        max_num_seqs=max(args.rows),
        max_num_batched_tokens=max(64, *args.rows),
    )
    engine = DrivenEngine(config)
    annotate_engine(engine)
    annotate(RunningStep, "result", "host:fetch")
    annotate(RequestGroup, "append", "host:detokenise")
    versions = {"jax": jax.__version__, "python": platform.python_version(), "device": jax.devices()[0].device_kind}
    results = [
        profile(engine, num_rows, args.steps) | {"multi_step": args.multi_step} | versions for num_rows in args.rows
    ]
    for result in results:
        print(table(result), json.dumps(result), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
