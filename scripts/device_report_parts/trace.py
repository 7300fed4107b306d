"""Share of the time that a device computes, from a trace by jax.profiler."""

import itertools
from collections.abc import Iterable

import jax

import profile_step
from jaxserve.engine.engine import Engine
from profile_step import Span


def busy_share(engine: Engine, num_steps: int, directory: str) -> tuple[float | None, str]:
    """Share of so many steps in which something ran on the device, and by what it was told; None and why not."""
    try:
        trace = profile_step.record(engine, num_steps, directory)
    except Exception as error:  # a machine may have no profiler, or keep it from us
        return None, f"the account of steps; no trace: {type(error).__name__}: {error}"[:200]
    if kernels := _kernels(trace):
        return _covered(kernels), "kernels in the trace"
    if programs := profile_step.programs(trace):
        return _covered(programs), "programs in the trace"
    return None, "the account of steps; the trace shows nothing of the device"


def _kernels(trace: jax.profiler.ProfileData) -> list[Span]:
    """Return the events on the streams of a GPU."""
    streams = (line for line in profile_step.lines(trace, "/device:GPU") if line.name.startswith("Stream"))
    return sorted(Span(e.start_ns, e.end_ns) for line in streams for e in line.events)


def _covered(spans: Iterable[Span]) -> float:
    """Share of the time from the first to the last that at least one covers; they are sorted."""
    spans = list(spans)
    ends = itertools.accumulate((span.end for span in spans), max)
    gaps = sum(max(0.0, later.start - end) for end, later in zip(ends, spans[1:], strict=False))
    total = max(span.end for span in spans) - spans[0].start
    return 1 - gaps / total if total else 1.0
