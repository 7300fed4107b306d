"""Lines of batches, and runs of them on a fake engine."""

import json
import random
from pathlib import Path

from fake_engine import FakeEngine
from killing import records_by_id

from jaxserve.openai.batch_files import run_batch

CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


def completion(custom_id: str, prompt: object = "Once upon a time", **body: object) -> dict:
    body = {"prompt": prompt, "max_tokens": 5} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def chat(custom_id: str, **body: object) -> dict:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def mixed_requests(count: int) -> list[dict]:
    rng = random.Random(0)
    requests = []
    for i in range(count):
        kind = [completion, chat][rng.randrange(2)]
        requests.append(kind(f"id-{i}", max_tokens=rng.randint(1, 12), n=rng.choice([1, 1, 2])))
        if rng.random() < 0.1:
            requests[-1]["body"]["bad"] = 1
    return requests


def write_lines(path: Path, requests: list) -> Path:
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in requests))
    return path


def run(engine: FakeEngine, folder: Path, requests: list, **options: object) -> dict[str, dict]:
    write_lines(folder / "in.jsonl", requests)
    run_batch(engine, folder / "in.jsonl", folder / "out.jsonl", use_tqdm=False, **options)
    assert not engine.has_unfinished()
    return records_by_id(folder / "out.jsonl")
