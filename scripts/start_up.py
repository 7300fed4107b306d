"""Process start to first token, with an empty and a full cache of compiled programs. One JSON line per start.

    python scripts/start_up.py --rounds 3

A round is one cold start in a fresh cache directory and two warm ones after it; "all" waits until no program is left
to compile, so that the cache holds them all. The clock runs from before the interpreter is started.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from statistics import median

import jax

from jaxserve.execution.roofline import num_cores

PROGRAM = """
import sys, time
from jaxserve import LLM, SamplingParams
llm = LLM(model=sys.argv[2] or None, skip_tokenizer_init=True)
next(iter(llm.stream([11, 12, 13], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))))
print(time.time() - float(sys.argv[1]), flush=True)
if sys.argv[3] == "fill":
    llm.engine.wait_until_warm()
"""


def first_token_s(model: str, cache: str, *, fill: bool) -> float:
    """Start a process that completes a prompt; return the seconds until its first token."""
    environment = os.environ | {"XDG_CACHE_HOME": cache}
    command = [sys.executable, "-c", PROGRAM, str(time.time()), model, "fill" if fill else "exit"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a checkpoint's directory (default: the embedded model)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    starts: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("cold", "warm", "warm"):
                seconds = first_token_s(args.model, cache, fill=kind == "cold")
                starts[kind].append(seconds)
                print(json.dumps({"start": kind, "first_token_s": round(seconds, 2)}), flush=True)
    cold, warm = median(starts["cold"]), median(starts["warm"])
    settings = {"jax": jax.__version__, "python": sys.version.split()[0], "cores": num_cores()}
    print(
        json.dumps(
            {"cold_s": round(cold, 2), "warm_s": round(warm, 2), "warm_of_cold": round(warm / cold, 3), **settings}
        )
    )


if __name__ == "__main__":
    main()
