"""JSON report of a benchmark: setup, environment and figures. Keys end in their units."""

import dataclasses
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from jaxserve import __version__
from jaxserve.assembly.memory import pool_dtype
from jaxserve.assembly.parameters import compute_dtype, storage_name
from jaxserve.models import registry
from jaxserve.tools.bench.remote import Server
from jaxserve.tools.bench.summary import Json
from jaxserve.tools.bench.workloads import Workload

if TYPE_CHECKING:
    from jaxserve.assembly.driven import DrivenEngine

FORMAT = "jaxserve-bench-2"


def build_report(engine: "DrivenEngine", kind: str, workload: Workload, load: Json) -> Json:
    """Return the JSON report of a benchmark on an engine in this process, still without runs.

    Args:
        engine: engine whose device, model and configuration are described.
        kind: "offline" or "serve".
        workload: workload whose sizes are described.
        load: entries that describe the arrivals.
    """
    device = engine.describe_device()
    dtype = compute_dtype(engine.config, engine.arch, on_cpu=device.platform == "cpu")
    return _head(kind) | {
        "device": dataclasses.asdict(device),
        "peak_rates": dataclasses.asdict(engine.peak_rates()),
        "model": {
            "path": str(engine.config.model_path),
            "architecture": engine.arch.architecture,
            "num_params": registry.num_params(engine.arch),
            "dtype": dtype.name,
            "stored": storage_name(engine.config, engine.arch, on_cpu=device.platform == "cpu"),
            "kv_dtype": pool_dtype(engine.config, dtype).name,
        },
        "config": dataclasses.asdict(dataclasses.replace(engine.config, kv_store=None))
        | {"kv_store": engine.config.store and repr(engine.config.store)},  # credentials are left out
        "schedule": dataclasses.asdict(engine.schedule),
        "workload": _described(workload) | load,
        "runs": [],
    }


def build_remote_report(server: Server, kind: str, workload: Workload, load: Json) -> Json:
    """Return the JSON report of a benchmark on a server, still without runs; arguments as for `build_report`."""
    described = {"url": server.url, "model": server.model}
    return _head(kind) | {"server": described, "workload": _described(workload) | load, "runs": []}


def _head(kind: str) -> Json:
    """Return the entries that every report begins with: format, kind, time and package versions."""
    return {
        "format": FORMAT,
        "kind": kind,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {
            "jaxserve": __version__,
            "jax": version("jax"),
            "jaxlib": version("jaxlib"),
            "numpy": version("numpy"),
            "python": platform.python_version(),
        },
    }


def _described(workload: Workload) -> Json:
    """Return a workload's name, seed, and numbers of requests and tokens."""
    return {
        "name": workload.name,
        "seed": workload.seed,
        "num_requests": len(workload.requests),
        "num_prompt_tokens": workload.num_prompt_tokens,
        "num_output_tokens": workload.num_output_tokens,
    }


def offered_rate(run: Json) -> float | None:
    """Return the requests per second at which a run's requests arrived; None for the workload's arrival times.

    Infinity is a string in JSON.
    """
    return None if run["rate_per_s"] is None else float(run["rate_per_s"])


def median_run(runs: Sequence[Json]) -> Json:
    """Return the run with the median output rate, or the slower of the middle two."""
    return sorted(runs, key=lambda run: run["output_tok_per_s"])[(len(runs) - 1) // 2]
