"""Plot of the number of requests that fit on each target, by request length. It needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.tools.figures import plotting
from jaxserve.tools.planner.plan import Plan
from jaxserve.tools.planner.report import capacity_curve


def check_plot(path: str) -> None:
    """Check before anything is compiled that a plot can be drawn and written to `path`; ConfigError if not."""
    if (reason := plotting.reason_missing()) is not None:
        raise ConfigError(reason)
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"plot must be a file in an existing directory, got {path!r}")


def draw_capacity(plans: Sequence[Plan], path: str) -> None:
    """Write the plans' capacity curves to one PNG; plans that do not fit have no curve."""
    title = f"{plans[0].model} in {plans[0].dtype}" if plans else "nothing fits"
    with plotting.plotted(path, (7.0, 4.2), title) as figure:
        axes = figure.subplots()
        for plan in plans:
            lengths, counts = zip(*((x, y) for x, y in capacity_curve(plan).items() if y), strict=True)
            axes.plot(lengths, counts, marker=".", label=plan.target.name)
        axes.set(
            xscale="log", yscale="log", xlabel="tokens per request", ylabel="requests in the pool at the same time"
        )
        axes.grid(alpha=0.3)
        if plans:
            axes.legend(fontsize=8)
