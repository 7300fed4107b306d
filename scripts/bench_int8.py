"""Decode steps with int8 weights against float32 ones, on the same checkpoint and in the same run.

    python scripts/bench_int8.py [--model DIRECTORY] [--rounds 7]

Both engines take turns, so that other load affects both equally. A step is timed from one token to the next, with all
rows decoding; each engine's figure is the median over its steps, and over the fastest of each round.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from synthetic.random_model import write_random_model

NUM_PROMPT_TOKENS = 8


def start(model: Path, rows: int, quantization: str | None) -> DrivenEngine:
    """Return an engine for decode steps with this number of rows."""
    sizes = {"max_num_seqs": rows, "max_num_batched_tokens": rows, "max_model_len": 512, "multi_step": 1}
    return DrivenEngine(
        EngineConfig(str(model), skip_tokenizer_init=True, quantization=quantization, compile_ahead="minimal", **sizes)
    )


def decode_times(engine: DrivenEngine, rows: int, num_steps: int) -> list[float]:
    """Return the seconds of each step in which all rows decode."""
    params = SamplingParams(temperature=0, max_tokens=num_steps + 2 * NUM_PROMPT_TOKENS * rows, ignore_eos=True)
    for row in range(rows):
        engine.add_request(str(row), [row + 3] * NUM_PROMPT_TOKENS, params)
    times: list[float] = []
    while len(times) < num_steps:
        began = time.perf_counter()
        engine.step()
        if engine.last_step and engine.last_step.num_decode_tokens == rows:
            times.append(time.perf_counter() - began)
    for row in range(rows):
        engine.abort(str(row))
    engine.reset_prefix_cache()
    return times[2:]  # the first two may have waited for a prefill


def compare(model: Path, rows: int, rounds: int, num_steps: int) -> dict[str, float]:
    """Measure decode steps with both weight formats in turns; return medians and ratios."""
    engines = {q or "float32": start(model, rows, q) for q in (None, "int8")}
    times: dict[str, list[list[float]]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            times[name].append(decode_times(engine, rows, num_steps))
    median = {name: statistics.median(s for r in times[name] for s in r) for name in engines}
    quickest = {name: statistics.median(min(r) for r in times[name]) for name in engines}
    return {
        "rows": rows,
        **{f"{name}_ms": round(seconds * 1e3, 2) for name, seconds in median.items()},
        "speedup": round(median["float32"] / median["int8"], 3),
        "speedup_of_quickest": round(quickest["float32"] / quickest["int8"], 3),
        "weight_bytes_ratio": round(
            engines["int8"].last_step.weight_bytes / engines["float32"].last_step.weight_bytes, 3
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; random numbers, 110.9M, by default")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30, help="per round")
    args = parser.parse_args()
    print(json.dumps({"jax": jax.__version__, "device": jax.devices()[0].device_kind}))
    with TemporaryDirectory() as scratch:
        model = args.model or write_random_model(Path(scratch))
        for rows in args.rows:
            print(json.dumps(compare(model, rows, args.rounds, args.steps)), flush=True)


if __name__ == "__main__":
    main()
