"""An engine with a separate core process compared with one in this process, while Python is idle or busy.

    python scripts/bench_process.py --rows 32 --rounds 5

Both engines serve the same requests in turns, after one warm-up round each. "idle": one call of `generate`. "streams":
a thread per request, which reads its stream with log probabilities. "spinning": `generate` while another thread
computes in Python. Prints one JSON line: median output tokens per second, milliseconds per step and time to first
token, and the processor time for packing, pickling and reading a step's message.
"""

import argparse
import json
import pickle
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxserve.api.metrics import EngineStats, Occupancy
from jaxserve.api.outputs import RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.core.deltas import Delta, StepDelta
from jaxserve.core.process_messages import FromCore, pack_delta, stats_values, unpack_delta
from jaxserve.core.status import CoreStatus, MemoryState
from jaxserve.offline.llm import LLM
from jaxserve.scheduling.executor_protocol import StepResult

Round = tuple[float, float, float]  # tokens per second, milliseconds per step, milliseconds to the first token


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    """Complete all prompts in one call."""
    return llm.generate(prompts, params, use_tqdm=False)


def stream(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    """Complete each prompt by a stream in its own thread."""
    params = params.clone({"logprobs": 20})

    def read(prompt: list[int]) -> RequestOutput:
        for part in llm.stream(prompt, params):
            for table in part.outputs[0].logprobs or ():
                json.dumps({token: entry.logprob for token, entry in table.items()})
        return part

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(read, prompts))


def spin(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    """Complete all prompts in one call while another thread keeps Python busy."""
    ends = threading.Event()

    def compute() -> None:
        while not ends.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        return generate(llm, prompts, params)
    finally:
        ends.set()
        thread.join()


WAYS: dict[str, Callable[..., list[RequestOutput]]] = {"idle": generate, "streams": stream, "spinning": spin}


def measure(llm: LLM, way: str, prompts: list[list[int]], params: SamplingParams) -> Round:
    """Return the figures of one round."""
    before, began_s = llm.engine.stats.num_steps, time.perf_counter()
    outputs = WAYS[way](llm, prompts, params)
    seconds = time.perf_counter() - began_s
    first_ms = statistics.median((output.outputs[0].metrics.ttft_s or 0) * 1e3 for output in outputs)
    num_tokens = sum(output.outputs[0].metrics.num_output_tokens for output in outputs)
    return num_tokens / seconds, seconds * 1e3 / max(llm.engine.stats.num_steps - before, 1), first_ms


def transport_us(num_rows: int) -> dict[str, float]:
    """Return the processor time of a step's message on either side."""
    result = StepResult(np.zeros((num_rows, 1), np.int32), np.ones(num_rows, np.int32), 1.0)
    delta = Delta(1.0, step=StepDelta([*range(num_rows)], [[index] for index in range(num_rows)], {}, [], result))
    status = CoreStatus(10, True, Occupancy(num_rows, 0, 100, 1000), 0, None, MemoryState(), True)
    stats = stats_values(EngineStats())

    def sent() -> bytes:
        return pickle.dumps(FromCore([pack_delta(delta)], status, stats, []), pickle.HIGHEST_PROTOCOL)

    def received(data: bytes) -> None:
        for packed in pickle.loads(data).deltas:
            unpack_delta(packed)

    def timed(call: Callable[[], Any], count: int = 2000) -> float:
        began_s = time.thread_time()
        for _ in range(count):
            call()
        return round((time.thread_time() - began_s) / count * 1e6, 1)

    data = sent()
    status_data = pickle.dumps(FromCore([], status, stats, []), pickle.HIGHEST_PROTOCOL)
    sizes = {"message_bytes": len(data), "status_bytes": len(status_data)}
    return {"send_us": timed(sent), "receive_us": timed(lambda: received(data)), **sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a checkpoint; the embedded model by default")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    options: dict[str, Any] = {"compile_ahead": "all", "max_num_seqs": args.rows, "max_model_len": 512}
    engines = {name: LLM(args.model, engine_process=name == "process", **options) for name in ("thread", "process")}
    params = SamplingParams(temperature=0, max_tokens=args.output_tokens, ignore_eos=True)
    rounds: dict[str, list[Round]] = {f"{way}_{name}": [] for way in WAYS for name in engines}
    for index in range(args.rounds + 1):
        ids = np.random.default_rng(index).integers(3, 250, (args.rows, args.prompt_tokens)).tolist()
        for way in WAYS:
            for name, llm in list(engines.items())[:: -1 if index % 2 else 1]:  # neither always comes after the other
                llm.reset_prefix_cache()
                found = measure(llm, way, ids, params)
                if index:
                    rounds[f"{way}_{name}"].append(found)
    result: dict[str, Any] = {"bench": "process", "rows": args.rows, "rounds": args.rounds, **transport_us(args.rows)}
    for name, values in rounds.items():
        medians = [round(statistics.median(column), 2) for column in zip(*values, strict=True)]
        result[name] = dict(zip(("tok_s", "step_ms", "first_token_ms"), medians, strict=True))
    for way in WAYS:
        pairs = zip(rounds[f"{way}_process"], rounds[f"{way}_thread"], strict=True)
        result[f"{way}_ratio"] = round(statistics.median(a[0] / b[0] for a, b in pairs), 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
