"""Kill a program at random moments and start it again, as spot machines do."""

import json
import random
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path


def run_with_kills(command: Sequence[str], out_path: Path, num_kills: int, seed: int, most_bytes: int) -> int:
    """Run `command` until it ends by itself, having sent it SIGKILL up to `num_kills` times before.

    A kill comes up to 5 ms after the output has grown by up to `most_bytes`; one in five comes before that, within the
    first 0.3 s. Return the number of kills; fail unless the program ends with 0.
    """
    rng = random.Random(seed)
    for kills in range(num_kills):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if _wait_for_growth(process, out_path, rng, most_bytes):
            assert process.wait(60) == 0
            return kills
        process.kill()
        process.wait()
    subprocess.run(command, check=True, capture_output=True)
    return num_kills


def _wait_for_growth(process: "subprocess.Popen[bytes]", path: Path, rng: random.Random, most_bytes: int) -> bool:
    """Return whether the program ended before the deadline."""
    target = _size(path) + rng.randint(1, most_bytes)
    deadline = time.monotonic() + (rng.uniform(0, 0.3) if rng.random() < 0.2 else 60)
    while process.poll() is None and _size(path) < target and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.005))
    return process.poll() is not None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def records_by_id(path: Path) -> dict[str, object]:
    """Return records of a batch output by line id, without what differs between runs; fail on a duplicate."""
    records: dict[str, object] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        record["response"]["body"].pop("created", None)
        assert record["id"] not in records
        records[record["id"]] = record
    return records
