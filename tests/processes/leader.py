"""One of several processes: `leader.py ADDRESS COUNT ID MODEL WORKLOADS OUTPUTS OPTIONS`. The first one leads.

With the option `strays` the process plans other steps than the others.
"""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

from jaxserve import LLM
from jaxserve.distributed import peers, processes
from jaxserve.scheduling.scheduler import Scheduler
from tests.e2e.workloads import run
from tests.soon_compiled import few_programs, soon_compiled


def main() -> None:
    """Run each list of jobs from an empty cache, and write their outputs and the engine's counts."""
    peers.GRACE_S = 2.0  # less than in use, so that tests take less time
    address, count, index, model, workloads, outputs, options = sys.argv[1:]
    processes.initialize(address, int(count), int(index))
    given = json.loads(options)
    if given.pop("strays", False):
        Scheduler.schedule = straying(Scheduler.schedule)
    with soon_compiled(), few_programs():
        engine = LLM(model, **given).engine  # only the first process returns
    results = []
    for weights, jobs in pickle.loads(Path(workloads).read_bytes()):
        engine.reset_prefix_cache()
        if weights is not None:
            engine.update_weights(weights)
        results.append(run(engine, jobs))
    Path(outputs).write_bytes(pickle.dumps((results, engine.stats)))


def straying(schedule: Any) -> Any:
    """Return other slots than the scheduler has given."""

    def plan(*args: Any, **options: Any) -> Any:
        plan = schedule(*args, **options)
        if plan is not None:
            plan.slots = [slot + 1 for slot in plan.slots]
        return plan

    return plan


main()
