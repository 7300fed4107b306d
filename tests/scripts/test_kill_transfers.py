"""Kills around a transfer between processes; `tests/server/test_kv_transfer_over_http.py` has stand-ins that die."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_transfers.py"


@pytest.mark.full
@pytest.mark.exhaustive  # three servers start, and four times one of them again
def test_replies_survive_killed_producers_and_consumers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = ["--rounds=1", "--ttl-s=20", f"--port={port}", "--option=--compile-ahead=minimal"]
    command = [sys.executable, str(SCRIPT), *options, f"--json={tmp_path / 'out.json'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["outcomes"] == {fault: {"same": 1} for fault in ("none", "before", "in", "after", "consumer")}
    assert found["transferred"] > 0
    assert found["pages_after_ttl"] == 0
