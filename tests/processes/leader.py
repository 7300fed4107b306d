"""One of several processes: `leader.py ADDRESS COUNT ID MODEL WORKLOADS OUTPUTS OPTIONS`. The first one leads.

OPTIONS has the options of several engines, of which all but the last must be refused. With the option `strays` the
process plans other steps than the others. After the workloads the engine serves until a process is lost.
"""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

from jaxserve import LLM
from jaxserve.api.config import EngineConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.distributed import peers, processes
from jaxserve.errors import ConfigError
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.system.whole_file import write_whole
from tests.e2e.workloads import Job, run
from tests.soon_compiled import few_programs, soon_compiled


def main() -> None:
    """Run each list of jobs from an empty cache, and write their outputs and the engine's counts."""
    peers.GRACE_S = 2.0  # less than in use, so that tests take less time
    address, count, index, model, workloads, outputs, options = sys.argv[1:]
    processes.initialize(address, int(count), int(index))
    *refused, given = json.loads(options)
    for each in refused:
        try:
            LLM(model, **each)
        except ConfigError as error:
            print(error, flush=True)  # it may be killed
        else:
            raise AssertionError(each)
    if given.pop("strays", False):
        Scheduler.schedule = straying(Scheduler.schedule)
    with soon_compiled(), few_programs():
        engine = DrivenEngine(EngineConfig(model, **given))
        LLM.over(engine)  # only the first process returns
    results: list[Any] = []
    jobs: list[Job] = []
    for weights, jobs in pickle.loads(Path(workloads).read_bytes()):
        engine.reset_prefix_cache()
        if weights is not None:
            engine.update_weights(weights)
        results.append(run(engine, jobs))
    write_whole(Path(outputs), pickle.dumps((results, engine.stats)))
    while True:
        run(engine, jobs)


def straying(schedule: Any) -> Any:
    """Return other slots than the scheduler has given."""

    def plan(*args: Any, **options: Any) -> Any:
        plan = schedule(*args, **options)
        if plan is not None:
            plan.slots = [slot + 1 for slot in plan.slots]
        return plan

    return plan


main()
