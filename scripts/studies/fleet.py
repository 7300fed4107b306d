"""Parts that the studies share: a small replica, random arrivals, and the output of a figure."""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.step_time import Rates
from jaxserve.tools.simulator.simulation import Simulation
from jaxserve.tools.simulator.step_times import FittedTimes
from jaxserve.tools.simulator.traces import TracedRequest

# About an 8B model on one H100, in steps of up to 16 rows: the studies are about ratios, not about a chip.
SCHEDULE = ScheduleConfig(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=1024, page_size=16, num_pages=800)
TIMES = FittedTimes(Rates(prefill_step_s=0.012, decode_step_s=0.010, prefill_token_s=4e-5, decode_token_s=2e-4))


def arrivals(seed: int, rate: float, count: int, prompt_len: int = 256, output_len: int = 8) -> Iterator[TracedRequest]:
    """Yield requests at random times with random lengths up to these."""
    draw, now_s = Random(seed), 0.0
    for _ in range(count):
        now_s += draw.expovariate(rate)
        yield TracedRequest(now_s, draw.randrange(1, prompt_len), draw.randrange(1, output_len))


def capacity(count: int = 800, **lengths: int) -> float:
    """Return the requests per second that one replica serves if its queue is never empty."""
    simulation = Simulation(SCHEDULE, TIMES)
    simulation.run(arrivals(0, 1e9, count, **lengths))
    return count / simulation.now_s


def parse(argv: Sequence[str], doc: str | None, **defaults: Any) -> argparse.Namespace:
    """Return the flags: --json, and a flag of the same type for each default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figure to this file")
    for name, default in defaults.items():
        kind = type(default)
        metavar = kind.__name__.upper()
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=f"(default: {default})")
    return parser.parse_args(argv)


class Figure:
    """A study's rows, printed as they come and written at the end."""

    def __init__(self, path: str | None) -> None:
        self._path, self.rows, self._start_s = path, [], time.monotonic()

    def add(self, **row: Any) -> None:
        """Add and print a row."""
        row = {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def write(self, **about: Any) -> None:
        """Write the figure, if a file is given."""
        about["wall_s"] = round(time.monotonic() - self._start_s, 1)
        print(json.dumps(about))
        if self._path is not None:
            Path(self._path).write_text(json.dumps(about | {"rows": self.rows}, indent=1) + "\n", encoding="utf-8")
