"""The check: requests run alone, then by every axis, on one engine after another."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxserve.api.config import EngineConfig
from jaxserve.api.outputs import RequestOutput
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.errors import ConfigError
from jaxserve.system.environment import xla_flags
from jaxserve.tools.invariance.axes import AXES, Axis, alone, baseline_options
from jaxserve.tools.invariance.comparison import Agreement, compare
from jaxserve.tools.invariance.workload import Job, Sizes, make_jobs


@dataclass(frozen=True, slots=True)
class Finding:
    """Result for an axis.

    Attributes:
        axis: name of the axis.
        agreement: comparison with the requests run alone; None if the axis could not run.
        detail: evidence that the requests ran by this axis, or the reason why they did not.
    """

    axis: str
    agreement: Agreement | None
    detail: str

    @property
    def grade(self) -> str:
        """Result in a word: "bitwise", "ids", "differs" or "not run"."""
        return "not run" if self.agreement is None else self.agreement.grade


def provide_two_devices() -> None:
    """Divide a CPU into two virtual devices, unless XLA's flags set their number.

    Call this before jax's backend starts.
    """
    if "xla_force_host_platform_device_count" not in xla_flags():
        jax.config.update("jax_num_cpu_devices", 2)


def check_invariance(
    options: Mapping[str, Any],
    sizes: Sizes,
    axes: Sequence[Axis] = AXES,
    report: Callable[[Finding], None] = lambda finding: None,
) -> list[Finding]:
    """Run the requests alone and by each axis; return the results, and report each one immediately.

    Args:
        options: engine options for all runs, such as the model; `baseline_options` replace them.
        sizes: sizes of the requests.
        axes: ways to run them.
        report: function that gets each finding.

    Raises:
        ConfigError: the model cannot be served with these options.
    """
    baseline = {**options, **baseline_options(sizes)}
    with contextlib.closing(_Engines()) as engines:
        engine = engines.get(baseline)
        jobs = make_jobs(sizes, engine.arch.vocab_size, engine.arch.eos_ids)
        expected = alone(engine, jobs)
        findings = []
        for axis in axes:
            findings.append(_check(axis, engines, {**baseline, **axis.options(sizes)}, jobs, expected))
            report(findings[-1])
    return findings


def _check(
    axis: Axis, engines: "_Engines", options: dict[str, Any], jobs: Sequence[Job], expected: Sequence[RequestOutput]
) -> Finding:
    """Run `jobs` by an axis on an engine with `options`; return how they compare with the `expected` outputs."""
    try:
        engine = engines.get(options)
    except ConfigError as error:
        return Finding(axis.name, None, str(error))
    before = dataclasses.replace(engine.stats)
    found = axis.run(engine, jobs)
    evidence = axis.evidence(engine.stats.since(before))
    if not evidence:
        return Finding(axis.name, None, "the requests ran otherwise; try more requests, longer prompts or more tokens")
    return Finding(axis.name, compare(jobs, found, expected), evidence)


class _Engines:
    """The engine that was used last; there is one at a time, as a second one would not fit on an accelerator."""

    def __init__(self) -> None:
        self._options: dict[str, Any] = {}
        self._engine: DrivenEngine | None = None

    def get(self, options: dict[str, Any]) -> DrivenEngine:
        """Return an engine with these options, a new one if the last one has others."""
        if self._engine is None or options != self._options:
            self.close()
            self._engine, self._options = DrivenEngine(EngineConfig(**options)), options
        return self._engine

    def close(self) -> None:
        """Close the engine, if there is one."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
