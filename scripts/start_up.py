"""Process start to first token, with an empty and a full cache of compiled programs. One JSON line per start.

    python scripts/start_up.py --rounds 3

A round is one cold start in a fresh cache directory and two warm ones after it; "fill" waits until no program is left
to compile, so that the cache holds them all. The clock runs from before the interpreter is started; phases are the
interpreter, imports, the engine and the first token.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version

PROGRAM = """
import json, sys, time
seconds = {}
def ended(phase):
    seconds[phase] = time.time() - float(sys.argv[1]) - sum(seconds.values())
ended("python")
from jaxserve import LLM, SamplingParams
ended("imports")
llm = LLM(model=sys.argv[2] or None, skip_tokenizer_init=sys.argv[3] == "ids")
ended("engine")
next(iter(llm.stream([11, 12, 13], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))))
ended("token")
print(json.dumps(seconds), flush=True)
if sys.argv[4] == "fill":
    llm.engine.wait_until_warm()
"""
PHASES = ("python", "imports", "engine", "token")


def start(model: str, cache: str, *, prompts: str, fill: bool) -> dict[str, float]:
    """Start a process that completes a prompt; return the seconds of each phase until its first token."""
    environment = os.environ | {"XDG_CACHE_HOME": cache}
    command = [sys.executable, "-c", PROGRAM, str(time.time()), model, prompts, "fill" if fill else "exit"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a checkpoint's directory (default: the embedded model)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=2, help="warm starts after each cold one")
    parser.add_argument("--cache", help="a directory whose programs are kept: warm starts only, from the second on")
    parser.add_argument("--prompts", choices=("text", "ids"), default="ids", help="text loads the tokenizer too")
    args = parser.parse_args()
    starts: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(args.rounds):
        with contextlib.nullcontext(args.cache) if args.cache else tempfile.TemporaryDirectory() as cache:
            for kind in (["cold"] if args.cache is None else []) + ["warm"] * args.warm:
                seconds = start(args.model, cache, prompts=args.prompts, fill=kind == "cold")
                starts[kind].append(seconds)
                print(json.dumps({"start": kind, **_rounded(seconds), "first_token_s": _total(seconds)}), flush=True)
    for kind, results in starts.items():
        if results:
            middle = sorted(results, key=_total)[len(results) // 2]
            print(json.dumps({"median": kind, **_rounded(middle), "first_token_s": _total(middle)}))
    print(json.dumps({"jax": version("jax"), "python": sys.version.split()[0], "cores": os.cpu_count()}))


def _total(seconds: dict[str, float]) -> float:
    return round(sum(seconds.values()), 3)


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {f"{phase}_s": round(seconds[phase], 3) for phase in PHASES}


if __name__ == "__main__":
    main()
