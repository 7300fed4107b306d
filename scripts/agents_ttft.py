"""Time to the first token of agents' turns in real time, with a small pool: without a tier, with a disk, and vLLM's.

    python scripts/agents_ttft.py MODEL --python vllm=~/vllm/bin/python
    python scripts/agents_ttft.py MODEL --workload scripts/workloads/agents-8.json --num-pages 90 --rounds 2

Each engine runs alone, in a process of its own, and serves the sessions of the workload: a turn arrives after the end
of the one before and the pause of a tool, and no round has prompts in common with another. vLLM has its prefix cache,
whose blocks hold as many tokens as the pool. Prints one JSON line per engine: times from a turn's arrival to its first
token, cached tokens over prompt tokens, and the time of a round. MODEL is a checkpoint; prompts are random token ids.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import groupby
from typing import Any, NamedTuple

VOCAB_SIZE = 5_000  # token ids in prompts
VLLM_BLOCK = 32  # tokens; its attention on CPUs takes multiples
ENGINES = ("jaxserve", "jaxserve-disk", "vllm")


class Reply(NamedTuple):
    """A turn's end.

    Attributes:
        ttft_s: time to its first token.
        num_prompt: prompt tokens.
        num_cached: those that were cached.
    """

    ttft_s: float
    num_prompt: int
    num_cached: int


class Jaxserve:
    """jaxserve, with a tier if there is a directory for it."""

    def __init__(self, args: argparse.Namespace, max_len: int, path: str | None) -> None:
        from jaxserve import LLM, SamplingParams  # noqa: PLC0415 - vLLM's Python lacks it

        self._params = SamplingParams
        options = {} if path is None else {"kv_offloading_path": path}
        sizes = {"num_pages": args.num_pages, "page_size": args.page_size, "max_num_seqs": args.max_num_seqs}
        self._llm = LLM(args.model, skip_tokenizer_init=True, max_model_len=max_len, **sizes, **options)

    def serve(self, prompt: list[int], output_len: int) -> Reply:
        """Serve a turn; called by a thread per session."""
        params = self._params(temperature=0, max_tokens=output_len, ignore_eos=True)
        started_s, ttft_s, output = time.perf_counter(), None, None
        for output in self._llm.stream({"prompt_token_ids": prompt}, params):
            if ttft_s is None and output.outputs[0].token_ids:
                ttft_s = time.perf_counter() - started_s
        return Reply(ttft_s, len(prompt), output.num_cached_tokens)


class VLLM:
    """vLLM's asynchronous engine, with its event loop on a thread."""

    def __init__(self, args: argparse.Namespace, max_len: int) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
        import vllm  # noqa: PLC0415 - only in its own Python
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        self._params = lambda output_len: vllm.SamplingParams(
            temperature=0,
            max_tokens=output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        engine_args = AsyncEngineArgs(
            args.model,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=max_len,
            max_num_seqs=args.max_num_seqs,
            block_size=VLLM_BLOCK,
            num_gpu_blocks_override=args.num_pages * args.page_size // VLLM_BLOCK + 1,  # one is never used
            enable_prefix_caching=True,
            enforce_eager=args.vllm_eager,
        )
        self._loop, self._numbers = asyncio.new_event_loop(), iter(range(1 << 30))
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._llm = self._wait(self._start(AsyncLLM, engine_args))

    async def _start(self, engine: Any, engine_args: Any) -> Any:
        return engine.from_engine_args(engine_args)

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def serve(self, prompt: list[int], output_len: int) -> Reply:
        """Serve a turn; called by a thread per session."""
        return self._wait(self._serve(prompt, output_len, time.perf_counter()))

    async def _serve(self, prompt: list[int], output_len: int, started_s: float) -> Reply:
        ttft_s = output = None
        name = str(next(self._numbers))
        async for output in self._llm.generate({"prompt_token_ids": prompt}, self._params(output_len), name):
            if ttft_s is None and output.outputs[0].token_ids:
                ttft_s = time.perf_counter() - started_s
        return Reply(ttft_s, len(prompt), output.num_cached_tokens or 0)


def run_session(engine: Any, turns: list[dict[str, Any]], name: str, start_s: float, replies: list[Reply]) -> None:
    """Serve a session's turns, one after the other."""
    draw = random.Random(name)
    history = [draw.randrange(5, VOCAB_SIZE) for _ in range(max(turn["prompt_len"] for turn in turns))]
    time.sleep(max(start_s + turns[0]["arrival_s"] - time.perf_counter(), 0))
    for turn in turns:
        time.sleep(turn["pause_s"])
        system = random.Random(f"{name.rpartition(' ')[0]} system {turn['prefix_id']}")
        prefix = [system.randrange(5, VOCAB_SIZE) for _ in range(turn["prefix_len"])]
        replies.append(engine.serve([*prefix, *history[turn["prefix_len"] : turn["prompt_len"]]], turn["output_len"]))


def run_round(engine: Any, sessions: list[list[dict[str, Any]]], number: int) -> tuple[list[Reply], float]:
    """Serve all sessions; return the replies and the elapsed time."""
    replies: list[Reply] = []
    start_s = time.perf_counter()
    threads = [
        threading.Thread(target=run_session, args=(engine, turns, f"round {number} {index}", start_s, replies))
        for index, turns in enumerate(sessions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return replies, time.perf_counter() - start_s


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Serve rounds with one engine, and return the figures of each after the first, which warms up."""
    with open(args.workload, encoding="utf-8") as file:
        requests = json.load(file)["requests"]
    sessions = [list(turns) for _, turns in groupby(requests, key=lambda turn: turn["session_id"])]
    max_len = max(turn["prompt_len"] + turn["output_len"] for turn in requests)
    max_len = -(-max_len // args.page_size) * args.page_size
    figures: dict[str, Any] = {"engine": args.engine, "num_turns": len(requests), "rounds": []}
    with tempfile.TemporaryDirectory() as path:
        if args.engine == "vllm":
            engine: Any = VLLM(args, max_len)
        else:
            engine = Jaxserve(args, max_len, path if args.engine == "jaxserve-disk" else None)
        run_round(engine, [turns[:3] for turns in sessions[:4]], 0)
        for number in range(1, args.rounds + 1):
            replies, wall_s = run_round(engine, sessions, number)
            ttft_ms = sorted(1e3 * reply.ttft_s for reply in replies)
            percentiles = statistics.quantiles(ttft_ms, n=100)
            figures["rounds"].append(
                {
                    "ttft_ms": {
                        "mean": round(statistics.mean(ttft_ms), 1),
                        **{f"p{each}": round(percentiles[each - 1], 1) for each in (50, 90, 99)},
                    },
                    "hits": round(sum(r.num_cached for r in replies) / sum(r.num_prompt for r in replies), 4),
                    "wall_s": round(wall_s, 1),
                }
            )
        print(json.dumps(figures), flush=True)
        os._exit(0)  # neither engine has anything to save, and both would wait for their threads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--engine", choices=ENGINES, help="measure only this one, in this process")
    parser.add_argument("--python", action="append", default=[], metavar="vllm=PATH")
    parser.add_argument("--workload", default="scripts/workloads/agents-8.json")
    parser.add_argument("--vllm-eager", action="store_true", help="start vLLM sooner, without compiled programs")
    parser.add_argument("--num-pages", type=int, default=90)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    if args.engine is not None:
        measure(args)
    from baselines.registry import ENGINES as BASELINES  # noqa: PLC0415 - vLLM's Python lacks what it imports
    from baselines.registry import worker_environment  # noqa: PLC0415

    pythons = {"jaxserve": sys.executable, "jaxserve-disk": sys.executable}
    pythons |= dict(each.split("=", 1) for each in args.python)
    for engine, python in pythons.items():
        path = os.path.expanduser(python)
        environment = worker_environment(BASELINES.get(engine), path)
        subprocess.run([path, *sys.argv, "--engine", engine], env=environment, check=False)


if __name__ == "__main__":
    main()
