"""The profile of a step names what it measured."""

import json
from pathlib import Path

import pytest

import profile_step


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_profile_has_the_time_of_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, method in [(profile_step.RunningStep, "result"), (profile_step.RequestGroup, "append")]:
        monkeypatch.setattr(owner, method, getattr(owner, method))  # restores what `main` wraps
    target = tmp_path / "profile.json"
    monkeypatch.setattr("sys.argv", ["profile_step.py", "--rows", "1", "--steps", "10", "--json", str(target)])
    profile_step.main()
    (profile,) = json.loads(target.read_text())
    parts = {"schedule", "pack", "dispatch", "update", "statistics", "fetch", "detokenise"}
    assert profile["host_ms"].keys() == parts
    assert min(profile["step_ms"], profile["device_ms"], profile["untraced_step_ms"]) > 0  # medians of noisy times
