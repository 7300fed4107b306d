"""Complete prompts on many devices: one model over several, several replicas, or one model over many processes.

    python scripts/sharded_generate.py "def main():" "import os" --tensor-parallel-size 2 --data-parallel-size 2

With many processes run it in each, with the coordinator's address, the number of processes and this one's index:

    python scripts/sharded_generate.py "def main():" --tensor-parallel-size 16 --processes head:1234 2 0

or with `--processes auto` under SLURM, Open MPI and on TPU pods. Prints a JSON line for each completion, and one with
figures. To try it on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count=4
"""

import argparse
import dataclasses
import json
import time

import jax

from jaxserve import LLM, SamplingParams
from jaxserve.distributed import processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--model", metavar="DIR", help="checkpoint; the embedded default without")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="INT")
    parser.add_argument("--expert-parallel-size", type=int, default=1, metavar="INT")
    parser.add_argument("--enable-dp-attention", action="store_true")
    parser.add_argument("--data-parallel-size", type=int, default=1, metavar="INT")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="INT")
    parser.add_argument("--processes", nargs="+", metavar=("HOST:PORT", "COUNT"), help="HOST:PORT COUNT ID, or auto")
    args = parser.parse_args()

    if args.processes == ["auto"]:
        processes.initialize()
    elif args.processes is not None:
        if len(args.processes) != 3:
            parser.error("--processes takes HOST:PORT COUNT ID, or auto")
        address, count, process_id = args.processes
        processes.initialize(address, int(count), int(process_id))
    names = ("tensor_parallel_size", "expert_parallel_size", "enable_dp_attention", "data_parallel_size")
    sizes = {name: getattr(args, name) for name in names}
    llm = LLM(args.model, **sizes)  # all processes except the first serve that one here, and then end
    started = time.monotonic()
    for output in llm.generate(args.prompts, SamplingParams(temperature=0, max_tokens=args.max_tokens)):
        print(json.dumps({"prompt": output.prompt, "text": output.outputs[0].text}))
    figures = {
        "device": jax.devices()[0].device_kind,
        "num_devices": len(jax.devices()),
        "num_processes": jax.process_count(),
        **sizes,
        "elapsed_s": round(time.monotonic() - started, 3),
        "stats": dataclasses.asdict(llm.engine.stats),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
