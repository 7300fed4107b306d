"""Input of a batch, and the wait for its first output."""

import json
from pathlib import Path

from tests.waiting import until


def batch_input(path: Path, count: int, **body: object) -> str:
    body = {"prompt": "Once", "max_tokens": 5} | body
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    path.write_text("".join(json.dumps(line | {"custom_id": str(i)}) + "\n" for i in range(count)))
    return str(path)


def wait_for(path: Path) -> None:
    until(lambda: path.exists() and path.stat().st_size)
