"""Rows with JSON schemas compared with the same number of free rows: cost per token.

    python scripts/bench_structured.py --rows 16 --rounds 5

All ways take turns, after one warm-up round each: free rows, with one step per dispatch and as the engine chooses; rows
with different schemas; such rows with forced tokens appended immediately. All outputs have the same number of tokens,
since the schemas require longer ones. Prints one JSON line: microseconds per token by way, and the medians over rounds
of their ratios to free rows.
"""

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

from jaxserve import LLM, SamplingParams

NAMES = ["name", "kind", "unit price", "amount", "is_open", "created at", "owner", "tags"]


def schema(number: int) -> dict[str, Any]:
    """Return a schema for an array of records that no output finishes."""
    rng = np.random.default_rng(number)
    kinds: list[dict[str, Any]] = [
        {"type": "string", "minLength": 2, "maxLength": 12},
        {"type": "integer", "minimum": 0, "maximum": 10_000},
        {"enum": ["first", "second", "third one", None]},
        {"type": "boolean"},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    ]
    names = rng.permutation(NAMES)[:5].tolist()
    properties = {name: kinds[rng.integers(len(kinds))] for name in names}
    record = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    return {"type": "array", "items": record, "minItems": 1000}


def run(llm: LLM, rows: int, num_tokens: int, seed: int, form: dict[str, Any] | None) -> float:
    """Return the microseconds per token of one call."""
    prompts = np.random.default_rng(seed).integers(3, llm.engine.arch.vocab_size, (rows, 16)).tolist()
    params = [
        SamplingParams(
            seed=row,
            max_tokens=num_tokens,
            ignore_eos=True,
            structured_outputs=None if form is None else form | {"json": schema(row)},
        )
        for row in range(rows)
    ]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took_s = time.perf_counter() - started
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs), "no output ends early"
    return took_s / (rows * num_tokens) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a checkpoint; the embedded model by default")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    engines = {steps: LLM(args.model, max_num_seqs=args.rows, multi_step=steps) for steps in ("auto", 1)}
    plain = {"disable_any_whitespace": True}
    ways: dict[str, tuple[LLM, dict[str, Any] | None]] = {
        "free": (engines["auto"], None),
        "free_single_step": (engines[1], None),
        "constrained": (engines["auto"], plain),
        "forced": (engines["auto"], plain | {"append_forced_tokens": True}),
    }
    for llm in engines.values():
        llm.engine.wait_until_warm()
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(args.rounds + 1):
        for name, (llm, form) in ways.items():
            cost = run(llm, args.rows, args.output_tokens, index, form)
            if index:
                costs[name].append(cost)
    result: dict[str, Any] = {f"{name}_us_per_token": round(statistics.median(each), 1) for name, each in costs.items()}
    for way in ("constrained", "forced"):
        for base in ("free", "free_single_step"):
            pairs = zip(costs[way], costs[base], strict=True)
            result[f"{way}_to_{base}"] = round(statistics.median(a / b for a, b in pairs), 3)
    settings = {"rows": args.rows, "output_tokens": args.output_tokens, "rounds": args.rounds}
    print(json.dumps({"bench": "structured", **settings, **result}))


if __name__ == "__main__":
    main()
