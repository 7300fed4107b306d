"""Agents' sessions in virtual time: hints and a tier raise the hits that the pool alone has."""

import gzip
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from agentic_cache import run
from simulate import modelled

OPTIONS: dict[str, Any] = {
    "workload": "agentic",
    "num_requests": None,
    "speed": 1.0,
    "sessions": 4,
    "gap": 20.0,
    "others": 2.0,
    "fraction": 0.5,
    "disk": None,
    "model": "llama-3.1-8b",
    "target": "h200",
    "page_size": 512,
    "max_model_len": 32_768,
}


def figures(hints: str = "none", **options: Any) -> Any:
    return run(Namespace(**OPTIONS | options), hints)


def test_the_pool_has_the_pages_that_were_asked_for() -> None:
    _, executor = modelled(OPTIONS["model"], OPTIONS["target"], page_size=64, num_pages=100)
    assert executor.schedule.num_pages == 100


@pytest.mark.long
def test_hints_save_computation() -> None:
    plain, hinted = figures(), figures("pause")
    assert plain["num_prompt_tokens"] == hinted["num_prompt_tokens"]
    assert plain["hits"] < hinted["hits"]
    assert plain["recomputed_tokens"] > hinted["recomputed_tokens"]


def test_a_tier_saves_computation() -> None:
    load = {"gap": 0.1, "others": 0.0}
    plain, tiered = figures(**load), figures(**load, disk=20.0)
    assert plain["num_prompt_tokens"] == tiered["num_prompt_tokens"]
    assert plain["hits"] < tiered["hits"]
    assert tiered["hits_on_disk"] > 0
    assert tiered["hits"] == pytest.approx(tiered["hits_on_device"] + tiered["hits_on_disk"], abs=2e-4)


def test_a_trace_hits_the_blocks_that_it_names_again(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * index, "input_length": 1000, "output_length": 4, "hash_ids": [0, 1 + index % 2]}
        for index in range(6)
    ]
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    trace = figures(workload=str(path), fraction=2.0, page_size=64)
    assert trace["num_prompt_tokens"] == 6000
    assert trace["hits"] == round((512 + 4 * 960) / 6000, 4)  # whole pages, before the last token
