"""`jaxserve batch` as a program over the real engine: killed ten times, it ends as if nothing had happened."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import killing
from conftest import SIZES

NUM_LINES = 120


def requests() -> list[dict[str, Any]]:
    """Greedy and sampled, with and without a seed, several samples, logprobs, penalties, and some that are wrong."""
    lines = []
    for i in range(NUM_LINES):
        body: dict[str, Any] = {"prompt": f"Once upon {i}", "max_tokens": 4 + i % 20, "temperature": (i % 3) * 0.7}
        body |= {"seed": i} if i % 2 else {}
        body |= {"n": 2} if i % 7 == 0 else {}
        body |= {"presence_penalty": 0.5, "logprobs": 2} if i % 5 == 0 else {}
        body |= {"no_such_parameter": 1} if i % 11 == 10 else {}
        lines.append({"custom_id": f"request-{i}", "method": "POST", "url": "/v1/completions", "body": body})
    return lines


def records(path: Path) -> dict[str, Any]:
    """What must not depend on the run: log probabilities and cache hits vary with the batch a request was in."""
    found = killing.records_by_id(path)
    for record in found.values():
        body = record["response"]["body"]
        for choice in body.get("choices", ()):
            choice.pop("logprobs")
        body.get("usage", {}).pop("prompt_tokens_details", None)
    return found


def test_ten_kills_lose_and_repeat_nothing(llama: Path, tmp_path: Path) -> None:
    source, whole, killed = tmp_path / "in.jsonl", tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in requests()))
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages", "compile_ahead")
    flags = [f"--{name.replace('_', '-')}={SIZES[name]}" for name in names]
    cache = f"--compilation-cache-dir={tmp_path / 'xla'}"
    command = [sys.executable, "-m", "jaxserve", "batch", f"--model={llama}", *flags, cache, str(source)]
    first = subprocess.run([*command, str(whole)], check=False, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    num_kills = killing.run_with_kills([*command, str(killed)], killed, 10, 3, most_bytes=whole.stat().st_size // 9)
    assert num_kills == 10
    expected = records(whole)
    assert len(expected) == NUM_LINES
    assert records(killed) == expected
