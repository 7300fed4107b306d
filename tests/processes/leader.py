"""One of several processes: `leader.py ADDRESS COUNT ID MODEL WORKLOADS OUTPUTS OPTIONS`. The first does the work."""

import json
import pickle
import sys
from pathlib import Path

from jaxserve import LLM, distributed
from tests.e2e.workloads import run


def main() -> None:
    """Run each list of jobs from an empty cache, and write down what came of it and of what the engine counts."""
    address, count, index, model, workloads, outputs, options = sys.argv[1:]
    distributed.initialize(address, int(count), int(index))
    engine = LLM(model, **json.loads(options)).engine  # only the first process comes back
    results = []
    for weights, jobs in pickle.loads(Path(workloads).read_bytes()):
        engine.reset_prefix_cache()
        if weights is not None:
            engine.update_weights(weights)
        results.append(run(engine, jobs))
    Path(outputs).write_bytes(pickle.dumps((results, engine.stats)))


main()
