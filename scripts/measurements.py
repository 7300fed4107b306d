"""Measure the tables in scripts/README.md: parity per family, padding, page waste, compiles, quality, suite time.

    python scripts/measurements.py                  # everything; needs the test extra
    python scripts/measurements.py --part serving   # one part

Prints one JSON line per part and, last, the rows of the table.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.assembly.generation_defaults import build_arch
from jaxserve.assembly.memory import select_backend
from jaxserve.assembly.parameters import build_params
from jaxserve.execution.paged_attention import PagedAttention
from jaxserve.execution.state import new_pool
from jaxserve.layers.token_context import TokenContext
from jaxserve.models import decoder
from jaxserve.pallas_kernels import packed_linear
from jaxserve.pallas_kernels.ragged_paged_attention import RaggedRows
from jaxserve.tools.bench.workloads import load_workload, token_ids

ROOT = Path(__file__).parent.parent
CONFIGS_PER_FAMILY = 5
PAGE_SIZE = 16

Row = tuple[str, str]


def parity() -> tuple[dict[str, Any], list[Row]]:
    """Return the largest logit difference from transformers in float32, over random checkpoints of each family."""
    sys.path.insert(0, str(ROOT))
    from tests import checkpoints, random_configs  # noqa: PLC0415 - the oracle needs torch

    errors: dict[str, float] = {}
    backends: dict[str, set[str]] = {}
    for family in checkpoints.FAMILIES:
        errors[family], backends[family] = 0.0, set()
        for seed, overrides in enumerate(random_configs.random_configs(family, CONFIGS_PER_FAMILY, seed=7)):
            with tempfile.TemporaryDirectory() as path:
                model = checkpoints.write_checkpoint(Path(path), family, seed, **overrides)
                ids = np.random.default_rng(seed).integers(0, model.config.vocab_size, 100).astype(np.int32)
                logits, backend = served_logits(path, ids)
                difference = logits - checkpoints.reference_logits(model, ids)
            errors[family] = max(errors[family], float(np.abs(difference).max()))
            backends[family].add(backend)
    matrices = "packed" if packed_linear.unsupported("float32", jax.default_backend()) is None else "plain"
    by = {name: f"{' or '.join(sorted(used))} attention, {matrices} matrices" for name, used in backends.items()}
    rows = [(f"max logit error against transformers, {name}", f"{errors[name]:.1e}, {by[name]}") for name in errors]
    record = {"part": "parity", "max_logit_error": errors, "kernels": by, "configs_per_family": CONFIGS_PER_FAMILY}
    return record, rows


def served_logits(path: str, ids: np.ndarray) -> tuple[np.ndarray, str]:
    """Return logits [T, V] for one sequence in one step, computed as by an engine here, and the attention backend."""
    config = EngineConfig(model=path, dtype="float32", page_size=PAGE_SIZE)
    arch = build_arch(config)
    params = build_params(config, arch)
    backend = select_backend(config, arch, jnp.dtype("float32"))
    num_pages, num_groups = -(-len(ids) // PAGE_SIZE), len(arch.kv_layout.windows)
    attention = PagedAttention(
        backend,
        kv_pages=new_pool(arch, num_groups * num_pages, PAGE_SIZE, kv_dtype=jnp.float32, backend=backend),
        groups=tuple(
            RaggedRows(
                kv_lens=jnp.array([len(ids)], jnp.int32),
                page_table=jnp.arange(group * num_pages, (group + 1) * num_pages, dtype=jnp.int32)[None],
                cu_q_lens=jnp.array([0, len(ids)], jnp.int32),
                num_rows=jnp.int32(1),
            )
            for group in range(num_groups)
        ),
    )
    hidden, _ = decoder.forward(params, arch, jnp.asarray(ids), TokenContext(jnp.arange(len(ids)), attention))
    return np.asarray(decoder.compute_logits(params, arch, hidden)), backend


def serving() -> tuple[dict[str, Any], list[Row]]:
    """Measure the mixed-64 workload on the default model: machine-independent counts, and its rate here."""
    workload = load_workload("mixed-64")
    llm = LLM(skip_tokenizer_init=True, page_size=PAGE_SIZE, compile_ahead="all")
    prompts = token_ids(workload, llm.engine.arch.vocab_size)
    params = [
        SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True) for request in workload.requests
    ]
    started = time.monotonic()
    outputs = llm.generate(prompts, params)
    seconds = time.monotonic() - started
    stats, num_output = llm.engine.stats, sum(len(o.outputs[0].token_ids) for o in outputs)
    llm.engine.check_integrity()
    slack = stats.page_slack_share(PAGE_SIZE)
    record = {
        "part": "serving",
        "steps": stats.num_steps,
        "padding_share": stats.padding_share,
        "page_slack_share": slack,
        "compiles_after_warm_up": stats.num_compiles,
        "wasted_tokens": stats.num_wasted_tokens,
        "output_tokens_per_s": num_output / seconds,
    }
    return record, [
        ("padding, fraction of computed tokens (mixed-64)", f"{stats.padding_share:.1%}"),
        (f"allocated but unused positions, pages of {PAGE_SIZE} (mixed-64)", f"{slack:.1%}"),
        ("compiles after warm-up", str(stats.num_compiles)),
    ]


def quality() -> tuple[dict[str, Any], list[Row]]:
    """Measure bits per byte of the default model on held-out modules, and xz's, with eval_bpb.py."""
    lines = subprocess.run(
        [sys.executable, ROOT / "scripts/eval_bpb.py", "--quantization", "int8"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    entries = [json.loads(line) for line in lines]
    bpb = {entry["name"]: entry["bits_per_byte"] for entry in entries if "name" in entry}
    agreement = next(entry["greedy_agreement"] for entry in entries if "greedy_agreement" in entry)
    record = {"part": "quality", "bits_per_byte": bpb, "greedy_agreement": agreement}
    return record, [
        *((f"bits per byte on held-out modules, {name}", f"{value:.3f}") for name, value in bpb.items()),
        ("greedy agreement of the draft with the default model", f"{agreement:.1%}"),
    ]


def suite() -> tuple[dict[str, Any], list[Row]]:
    """Measure the wall time of the test suite."""
    started = time.monotonic()
    run = subprocess.run([sys.executable, "-m", "pytest"], cwd=ROOT, check=False, capture_output=True, text=True)
    seconds = time.monotonic() - started
    summary = run.stdout.strip().splitlines()[-1]
    record = {"part": "suite", "seconds": seconds, "exit_status": run.returncode, "summary": summary}
    return record, [("test-suite", f"{seconds:.0f} s ({summary.split(' in ')[0]})")]


PARTS: dict[str, Callable[[], tuple[dict[str, Any], list[Row]]]] = {
    "parity": parity,
    "serving": serving,
    "quality": quality,
    "suite": suite,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="measure only this; may be repeated")
    machine = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "python": platform.python_version()}
    table: list[Row] = []
    for name in parser.parse_args().part or PARTS:
        record, rows = PARTS[name]()
        print(json.dumps({**record, **machine}), flush=True)
        table += rows
    print("\n".join(f"| {what} | {value} |" for what, value in table))


if __name__ == "__main__":
    main()
