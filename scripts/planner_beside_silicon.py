"""Compare the planner's predictions with times measured on chips, in the data that AIConfigurator ships.

    python -m venv aic && aic/bin/pip install aiconfigurator
    python scripts/planner_beside_silicon.py --aiconfigurator aic/bin/python --json scripts/results/planner-silicon.json

AIConfigurator (https://arxiv.org/abs/2601.06288) adds up vLLM's operators as measured on the chip. The planner's times
are those of the chip's data sheet, a lower bound. The ratio of the two is the share of the data sheet that vLLM's
operators reach, as far as the planner counts the same work. Weights, activations and keys are bfloat16, on one chip.
"""

import argparse
import json
import subprocess
from pathlib import Path
from statistics import median

import jax

from jaxserve.api.config import EngineConfig
from jaxserve.tools.planner.plan import make_plan
from jaxserve.tools.planner.targets import parse_target

SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "a100": "a100_sxm", "l40s": "l40s"}
MODELS = ("meta-llama/Meta-Llama-3.1-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B")
ROWS = (1, 8, 64)
CONTEXT = 1024
ASK = """
import json, sys
from aiconfigurator.cli.api import cli_estimate
asked = json.load(sys.stdin)
found = []
for case in asked:
    try:
        result = cli_estimate(**case)
        found.append({"ttft_ms": result.ttft, "tpot_ms": result.tpot})
    except Exception as error:
        found.append({"error": f"{type(error).__name__}: {error}"[:300]})
print("RESULT" + json.dumps(found))
"""


def ask(python: str, cases: list[dict[str, object]]) -> list[dict[str, float]]:
    """Return AIConfigurator's times by case."""
    done = subprocess.run([python, "-c", ASK], input=json.dumps(cases), capture_output=True, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    found: list[dict[str, float]] = json.loads(line.removeprefix("RESULT"))
    return found


def configs(python: str) -> Path:
    """Return the directory with AIConfigurator's copies of published configurations."""
    code = "import aiconfigurator_core as core; print(core.__path__[0])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.splitlines()[-1]) / "model_configs"


def main() -> None:
    """Print a row per model, chip and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiconfigurator", required=True, metavar="PYTHON", help="interpreter that has it")
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    python, rows = args.aiconfigurator, []
    modes = {"gemm_quant_mode": "bfloat16", "kvcache_quant_mode": "bfloat16", "fmha_quant_mode": "bfloat16"}
    for model in MODELS:
        config = configs(python) / f"{model.replace('/', '--')}_config.json"
        for name, system in SYSTEMS.items():
            engine = EngineConfig(model=str(config), max_model_len=8192, max_num_seqs=256)
            plan = make_plan(engine, parse_target(name), context_tokens=CONTEXT, prompt_tokens=CONTEXT, compiles=False)
            if plan.speed is None:
                continue  # it does not fit
            cases = [
                {"model_path": model, "system_name": system, "backend_name": "vllm", "batch_size": count, "osl": 2}
                | {"mode": "static", "isl": CONTEXT}
                | modes
                | ({"moe_quant_mode": "bfloat16", "moe_tp_size": 1, "moe_ep_size": 1} if "A3B" in model else {})
                for count in ROWS
            ]
            found = ask(python, cases)
            row = {"model": model, "target": name, "what": "prefill", "rows": 1}
            _add(rows, row, plan.speed.ttft_ms, found[0], "ttft_ms")
            for count, times in zip(ROWS, found, strict=True):
                if count in plan.speed.step_ms:
                    row = {"model": model, "target": name, "what": "decode", "rows": count}
                    _add(rows, row, plan.speed.step_ms[count], times, "tpot_ms")
    shares = [row["share"] for row in rows if row["share"] is not None]
    print(json.dumps({"median_share": median(shares), "lowest": min(shares), "highest": max(shares)}))
    if args.json is not None:
        about = {"context": CONTEXT, "backend": "vllm"}
        Path(args.json).write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


def _add(rows: list, row: dict, predicted_ms: float, times: dict, name: str) -> None:
    """Add and print a row."""
    measured = times.get(name)
    row |= {"predicted_ms": round(predicted_ms, 3), "measured_ms": measured and round(measured, 3)}
    row |= {"share": None if not measured else round(predicted_ms / measured, 3)}
    if measured is None:
        row["reason"] = times.get("error")
    rows.append(row)
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
