"""Decode steps of one random checkpoint in bfloat16, float16 and float32, each served with default options.

    python scripts/bench_dtypes.py [--shape qwen2.5-0.5b] [--rows 1 8] [--rounds 5] [--json FILE]
    python scripts/bench_dtypes.py --before OTHER_CHECKOUT   # in turns with another version of jaxserve
    python scripts/bench_dtypes.py --vllm ~/vllm/bin/python  # in turns with vLLM, installed for that interpreter

Each dtype and version runs in a separate process, which is stopped while another is measured, so that other load
affects all equally. A figure is the median over rounds of a row's time between two tokens; next to it are the fastest
round and the multi-step program's temporary bytes. `--json` writes all of them.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parent.parent
DTYPES = ("bfloat16", "float16", "float32")
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 4096,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
}
NUM_PROMPT_TOKENS = 8
MULTI_STEP = 8  # steps per dispatch
SERVES_VLLM = "BENCH_DTYPES_SERVES_VLLM"


def write_checkpoint(directory: Path, shape: str, dtype: str) -> None:
    """Write a checkpoint with random weights in one of SHAPES."""
    import jax.numpy as jnp  # noqa: PLC0415 - only the process that writes

    from jaxserve import weights  # noqa: PLC0415
    from jaxserve.models.registry import from_hf_config, param_specs  # noqa: PLC0415

    config = {**SHAPES[shape], "torch_dtype": dtype}
    specs = param_specs(from_hf_config(config))
    weights.save(directory, specs, weights.dummy(specs, 0, jnp.dtype(dtype)), config)


def serve(model: Path, rows: int, num_steps: int) -> None:
    """Measure a round for each line on standard input, and print the seconds per step."""
    from jaxserve import LLM, SamplingParams  # noqa: PLC0415 - of the version that is measured

    sizes = {"max_num_seqs": rows, "max_num_batched_tokens": rows, "max_model_len": 1024, "num_pages": 600}
    options: dict[str, Any] = {"multi_step": MULTI_STEP, "compile_ahead": "minimal", "enable_prefix_caching": False}
    llm = LLM(str(model), skip_tokenizer_init=True, **sizes, **options)
    table = llm.engine.replicas[0].executor.programs.table
    (program,) = table[max(table)]  # of all rows
    memory = program.memory_analysis()
    print(json.dumps({"temp_bytes": memory.temp_size_in_bytes}), flush=True)

    measure_rounds(llm, SamplingParams, rows, num_steps)


def serve_by_vllm(model: Path, rows: int, num_steps: int) -> None:
    """Measure the same with vLLM, in whose environment this runs."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, which can be stopped
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    }
    import vllm  # noqa: PLC0415 - its process alone; it reads the environment

    output, sys.stdout = sys.stdout, sys.stderr  # it prints
    llm = vllm.LLM(
        str(model), skip_tokenizer_init=True, dtype="auto", max_model_len=1024, enable_prefix_caching=False,
        max_num_seqs=rows, max_num_batched_tokens=1024,
    )  # fmt: skip
    sys.stdout = output
    print(json.dumps({"temp_bytes": None}), flush=True)
    measure_rounds(llm, partial(vllm.SamplingParams, detokenize=False), rows, num_steps)


def measure_rounds(llm: Any, params_of: Callable[..., Any], rows: int, num_steps: int) -> None:
    """Print the seconds per step for each line on standard input."""

    def seconds(num_tokens: int) -> float:
        params = params_of(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        prompts = [{"prompt_token_ids": [row + 3] * NUM_PROMPT_TOKENS} for row in range(rows)]
        began_s = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began_s

    seconds(MULTI_STEP)
    for _ in sys.stdin:
        few, many = MULTI_STEP, MULTI_STEP + num_steps
        print(json.dumps({"step_s": (seconds(many) - seconds(few)) / num_steps}), flush=True)


class Contestant:
    """Process that serves one dtype with one version.

    Args:
        root: checkout of the version; None for vLLM.
        python: its interpreter.
        model: checkpoint directory.
        rows: number of rows in the batch.
        num_steps: steps per round.
    """

    def __init__(self, root: Path | None, python: str, model: Path, rows: int, num_steps: int) -> None:
        command = [python, __file__, "--serve", str(model), "--rows", str(rows), "--steps", str(num_steps)]
        environment = {**os.environ, "PYTHONPATH": str(root)} if root else {**os.environ, SERVES_VLLM: "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.temp_bytes = self._read()["temp_bytes"]
        self.steps_s: list[float] = []
        self._process.send_signal(signal.SIGSTOP)

    def measure(self) -> None:
        """Measure a round while all others are stopped."""
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None, "it is a pipe"
        print(file=self._process.stdin, flush=True)
        self.steps_s.append(self._read()["step_s"])
        self._process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it is a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("bench_dtypes.py: error: a process has ended; see its message above")
        found: dict[str, Any] = json.loads(line)
        return found


def compare(args: argparse.Namespace, models: dict[str, Path], rows: int) -> list[dict[str, Any]]:
    """Return a record for each dtype and version with this number of rows."""
    versions: dict[str, tuple[Path | None, str]] = {"now": (ROOT, sys.executable)}
    if args.before:
        versions["before"] = args.before.resolve(), sys.executable
    if args.vllm:
        versions["vllm"] = None, args.vllm
    found: dict[tuple[str, str], Contestant] = {}
    try:
        for dtype, model in models.items():
            for version, (root, python) in versions.items():
                found[dtype, version] = Contestant(root, python, model, rows, args.steps)
        for _ in range(args.rounds):
            for contestant in found.values():
                contestant.measure()
    finally:
        for contestant in found.values():
            contestant.close()
    return [
        {
            "rows": rows,
            "dtype": dtype,
            "version": version,
            "step_ms": round(statistics.median(each.steps_s) * 1e3, 2),
            "quickest_ms": round(min(each.steps_s) * 1e3, 2),
            "temp_mib": None if each.temp_bytes is None else round(each.temp_bytes / 2**20, 2),
            "rounds_ms": [round(step_s * 1e3, 2) for step_s in each.steps_s],
        }
        for (dtype, version), each in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=DTYPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32, help="per round")
    parser.add_argument("--before", type=Path, metavar="DIR", help="a checkout of another version, built in place")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        (serve_by_vllm if SERVES_VLLM in os.environ else serve)(args.serve, args.rows[0], args.steps)
        return
    records = []
    with TemporaryDirectory() as scratch:
        models = {dtype: Path(scratch) / dtype for dtype in args.dtypes}
        for dtype, model in models.items():
            write_checkpoint(model, args.shape, dtype)
        for rows in args.rows:
            for dtype, model in models.items():  # one at a time: all would need more memory than a laptop has
                for record in compare(args, {dtype: model}, rows):
                    records.append(record)
                    print(json.dumps(record), flush=True)
    if args.json:
        report = {"shape": args.shape, "cores": os.cpu_count(), "load": os.getloadavg(), "records": records}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
