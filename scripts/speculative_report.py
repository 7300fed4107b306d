"""Measure speculative decoding one row at a time, compared with plain decoding and a random draft.

    python scripts/speculative_report.py --out report                # the embedded model with its draft and heads
    python scripts/speculative_report.py --out report --model M --draft D --medusa H --prompts prompts.jsonl

Writes a folder: `metrics.json`, `steps-CASE.jsonl` with one line per dispatch in the last round, plots, and
`index.html`, which shows all of it and needs no other file. Cases take turns in each round; speeds are medians. Prints
a Markdown table.
"""

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path

import jax

from jaxserve import SamplingParams
from jaxserve.api.config import DEFAULT_DRAFTS
from jaxserve.api.embedded import embedded_model
from jaxserve.api.speculation_config import TREE_METHODS, SpeculationConfig
from jaxserve.tools.figures.plotting import reason_missing
from speculative.page import markdown, table, write_page
from speculative.runs import measure_nodes, run_round, start, write_random_draft

TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
WIDE_TREE = [*((n,) for n in range(6)), *((0, n) for n in range(4)), (1, 0), (1, 1), (2, 0), (0, 0, 0), (0, 1, 0)]
HEADS = {"medusa": "Medusa heads", "eagle3": "EAGLE-3 layer"}
PROMPTS = Path(__file__).parent / "speculative" / "prompts.jsonl"


def main() -> int:
    """Run the command line; 1 if a random draft is accepted more often than chance allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--model", help="directory of the model (default: the embedded one)")
    parser.add_argument("--draft", type=Path, help="directory of the draft model (default: the embedded one)")
    for method, name in HEADS.items():
        parser.add_argument(f"--{method}", help=f"directory of its {name} (default: that of the embedded model)")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help='JSON lines with a "prompt" each')
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--num-drafts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text(encoding="utf-8").splitlines() if line]
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=True, seed=1)
    draft = args.draft or embedded_model(DEFAULT_DRAFTS["draft_model"])
    options = {"model": args.model, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    heads = [each for each in HEADS.items() if args.model is None or getattr(args, each[0]) is not None]
    k, fixed = args.num_drafts, {"num_speculative_tokens": args.num_drafts, "adaptive": False}
    with tempfile.TemporaryDirectory() as scratch:
        random = write_random_draft(draft, Path(scratch) / "random")
        configs = {
            "plain": None,
            f"draft model, k = {k}": SpeculationConfig(model=str(draft), **fixed),
            "draft model, adaptive": SpeculationConfig(model=str(draft), num_speculative_tokens=k),
            "tree of 3 levels": SpeculationConfig(model=str(draft), speculative_token_tree=TREE, adaptive=False),
            **{f"{name}, k = {k}": SpeculationConfig(method, getattr(args, method), **fixed) for method, name in heads},
            **{
                f"{name}, wide tree": SpeculationConfig(
                    method, getattr(args, method), speculative_token_tree=WIDE_TREE, adaptive=False
                )
                for method, name in heads
                if method in TREE_METHODS
            },
            f"n-gram, k = {k}": SpeculationConfig(method="ngram", prompt_lookup_min=2, **fixed),
            "n-gram, adaptive": SpeculationConfig(method="ngram", prompt_lookup_min=2, num_speculative_tokens=k),
            f"random draft, k = {k}": SpeculationConfig(model=str(random), **fixed),
        }
        cases = [start(name, config, **options) for name, config in configs.items()]
        for _ in range(args.rounds):
            for case in cases:
                run_round(case, prompts, params)
        for case in cases:
            if case.tree is not None:
                measure_nodes(case, prompts, params, **options)
    if args.temperature == 0:
        texts = [[token for token, _ in tokens] for tokens in cases[0].tokens]
        assert all([[token for token, _ in t] for t in case.tokens] == texts for case in cases), "greedy tokens differ"
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {"model": args.model or "embedded", "jax": jax.__version__, "device": jax.devices()[0].device_kind}
    settings |= {"machine": platform.machine(), "prompts": len(prompts), "tokens of each": args.max_tokens}
    settings |= {"rounds": args.rounds, "temperature": args.temperature}
    summaries = [case.summary() for case in cases]
    (args.out / "metrics.json").write_text(json.dumps({"facts": settings, "cases": summaries}, indent=2) + "\n")
    for case in cases:
        name = "".join(c if c.isalnum() else "-" for c in case.name)
        lines = "".join(json.dumps(step) + "\n" for step in case.steps)
        (args.out / f"steps-{name}.jsonl").write_text(lines)
    if (reason := reason_missing()) is not None:
        print(reason, file=sys.stderr)
    else:
        write_page(cases, settings, args.out)
    print(markdown(table(cases)))
    if summaries[-1]["acceptance"] > 0.2:
        print("a random draft is accepted too often: the measurement is wrong", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
