"""Speed of look-ups for text that repeats itself, compared with plain decoding.

    python scripts/bench_copying.py --rows 1 2 4 --rounds 3

A model with a 0.5B model's layers (float32) continues random texts that repeat with edits. Engines take turns in each
round. Prints one JSON line: tokens per second and accepted tokens per round by number of rows, and whether all engines
sampled the same tokens.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve import LLM, SamplingParams
from synthetic.copying_model import HALF_BILLION, num_codes, write_copying_model

PERIOD, PROMPT_LEN, NUM_TOKENS = 12, 60, 64
METHODS: dict[str, Any] = {"plain": None, "look-ups": {"method": "ngram"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    texts = [rng.permutation(num_codes(HALF_BILLION))[:PERIOD] for _ in range(max(args.rows))]
    prompts = [np.resize(text, PROMPT_LEN).tolist() for text in texts]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    speeds: dict[tuple[str, int], list[float]] = {(name, rows): [] for name in METHODS for rows in args.rows}
    token_ids: dict[tuple[str, int], Any] = {}
    with tempfile.TemporaryDirectory() as path:
        model = str(write_copying_model(Path(path), HALF_BILLION))
        sizes = {"max_model_len": 256, "max_num_seqs": max(args.rows), "skip_tokenizer_init": True}
        llms = {name: LLM(model, speculative_config=each, **sizes) for name, each in METHODS.items()}
        for llm in llms.values():
            llm.generate(prompts, params, use_tqdm=False)  # programs are compiled, and step times known
        for _ in range(args.rounds):
            for (name, rows), measured in speeds.items():
                start_s = time.perf_counter()
                outputs = llms[name].generate(prompts[:rows], params, use_tqdm=False)
                measured.append(rows * NUM_TOKENS / (time.perf_counter() - start_s))
                token_ids[name, rows] = [output.outputs[0].token_ids for output in outputs]
        acceptance = llms["look-ups"].engine.stats.acceptance_rate
    medians = {key: statistics.median(values) for key, values in speeds.items()}
    print(
        json.dumps(
            {
                "tokens_per_s": {name: {rows: medians[name, rows] for rows in args.rows} for name in METHODS},
                "ratio": {rows: medians["look-ups", rows] / medians["plain", rows] for rows in args.rows},
                "acceptance": acceptance,
                "tokens_equal": all(token_ids["plain", rows] == token_ids["look-ups", rows] for rows in args.rows),
            }
        )
    )


if __name__ == "__main__":
    main()
