"""Step traces from jax.profiler: device activity, and the busy fraction of the time."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxserve.assembly.driven import DrivenEngine


class Span(NamedTuple):
    """An activity, in nanoseconds on the trace's clock."""

    start: float
    end: float


def record(engine: DrivenEngine, num_steps: int, directory: str) -> jax.profiler.ProfileData:
    """Return the trace of `num_steps` steps."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would cost more than the steps themselves
    with jax.profiler.trace(directory, profiler_options=options):
        for _ in range(num_steps):
            engine.step()
    (path,) = Path(directory).rglob("*.xplane.pb")
    return jax.profiler.ProfileData.from_file(str(path))


def busy_share(engine: DrivenEngine, num_steps: int, directory: str) -> tuple[float | None, str]:
    """Return the device's busy fraction over `num_steps` steps, and its source; None and the reason if unknown."""
    try:
        trace = record(engine, num_steps, directory)
    except Exception as error:  # a machine may have no profiler, or forbid it
        return None, f"the step statistics; no trace: {type(error).__name__}: {error}"[:200]
    if kernels := _kernels(trace):
        return _covered(kernels), "kernels in the trace"
    if ran := programs(trace):
        return _covered(ran), "programs in the trace"
    return None, "the step statistics; the trace shows nothing of the device"


def programs(trace: jax.profiler.ProfileData) -> list[Span]:
    """Return the times at which the device ran each program, in order."""
    modules = [e for line in lines(trace, "/device:") if line.name == "XLA Modules" for e in line.events]
    if modules:
        return sorted(Span(e.start_ns, e.end_ns) for e in modules)
    return _cpu_programs(trace)


def _cpu_programs(trace: jax.profiler.ProfileData) -> list[Span]:
    """Return program times: a CPU client thread begins a program, passes parallel work to the Eigen pool and waits for
    its end.

    The executor's nested calls (loops, branches) have the same name, but only the outermost one is waited for.
    """
    found = []
    for line in lines(trace, "/host:CPU"):
        if line.name.startswith("tf_XLAPjRtCpuClient"):
            start = None
            for event in sorted(line.events, key=lambda e: e.start_ns):
                if event.name == "ThunkExecutor::Execute" and start is None:
                    start = event.start_ns
                elif event.name == "ThunkExecutor::Execute (wait for completion)" and start is not None:
                    found.append(Span(start, event.end_ns))
                    start = None
    return sorted(found)


def lines(trace: jax.profiler.ProfileData, plane: str) -> Iterable[Any]:
    return (line for p in trace.planes if p.name.startswith(plane) for line in p.lines)


def _kernels(trace: jax.profiler.ProfileData) -> list[Span]:
    """Return the events on a GPU's streams."""
    streams = (line for line in lines(trace, "/device:GPU") if line.name.startswith("Stream"))
    return sorted(Span(e.start_ns, e.end_ns) for line in streams for e in line.events)


def _covered(spans: Iterable[Span]) -> float:
    """Return the fraction of the time from first to last that sorted spans cover."""
    spans = list(spans)
    ends = itertools.accumulate((span.end for span in spans), max)
    gaps = sum(max(0.0, later.start - end) for end, later in zip(ends, spans[1:], strict=False))
    total = max(span.end for span in spans) - spans[0].start
    return 1 - gaps / total if total else 1.0
