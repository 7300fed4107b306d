"""lm-eval: log-likelihoods and texts over HTTP, compared with those in `task.jsonl` from transformers and offline
calls.
"""

import functools
import json
from typing import Any

from checks import Target, check, run
from lm_eval import simple_evaluate


@functools.cache
def samples(target: Target, kind: str) -> list[dict[str, Any]]:
    """Return lm-eval's results per record, for multiple choice or generated text."""
    task: dict[str, Any] = {
        "task": f"local_{kind}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(target.directory / "task.jsonl")}},
        "test_split": "test",
        "output_type": kind,
        "doc_to_text": "{{query}}",
    }
    if kind == "multiple_choice":
        task |= {"doc_to_target": "{{gold}}", "doc_to_choice": "{{choices}}", "metric_list": [{"metric": "acc"}]}
        task |= {"target_delimiter": ""}
    else:
        task |= {"doc_to_target": "{{text}}", "metric_list": [{"metric": "exact_match"}]}
        task |= {"generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": 16, "temperature": 0}}
    found = simple_evaluate(
        model="local-completions",
        model_args={
            "model": target.model,
            "base_url": f"{target.url}/v1/completions",
            "tokenizer": str(target.directory),
            "tokenizer_backend": "huggingface",
            "num_concurrent": 4,
            "max_retries": 1,
            "max_length": 512,
        },
        tasks=[task],
        batch_size=4,
        bootstrap_iters=0,
        log_samples=True,
    )
    return sorted(found["samples"][task["task"]], key=lambda sample: sample["doc_id"])


def likelihoods(target: Target, name: str) -> list[tuple[float, float]]:
    """Return pairs of log-likelihoods: lm-eval's, and the record's under a name."""
    pairs = []
    for sample in samples(target, "multiple_choice"):
        got = [float(response[0][0]) for response in sample["resps"]]
        pairs += list(zip(got, sample["doc"][name], strict=True))
    assert pairs
    return pairs


@check
def loglikelihoods_are_those_of_offline_requests(target: Target) -> None:
    assert all(abs(a - b) < 1e-6 * max(1, abs(b)) for a, b in likelihoods(target, "offline"))


@check
def loglikelihoods_are_those_of_transformers(target: Target) -> None:
    assert all(abs(a - b) < 1e-4 * max(1, abs(b)) for a, b in likelihoods(target, "transformers"))


@check
def generated_texts_are_those_of_offline_requests(target: Target) -> None:
    for sample in samples(target, "generate_until"):
        assert sample["resps"][0][0] == sample["doc"]["text"], json.dumps(sample["doc"])


run("lm-eval")
