"""Command lines of scripts: nothing of the repository is written by mistake, and wrong sizes are named."""

import runpy
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize("name", ["api_reference", "data_flow"])
def test_help_writes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    monkeypatch.setattr(Path, "write_text", lambda self, *_: pytest.fail(f"{self} was written"))
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")


def test_a_shorter_training_does_not_replace_the_embedded_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import train_default

    monkeypatch.setattr("sys.argv", ["train_default.py", "--steps", "1"])
    monkeypatch.setattr(train_default, "train", lambda *_: pytest.fail("trained"))
    with pytest.raises(SystemExit, match="2"):
        train_default.main()
    assert "--out" in capsys.readouterr().err


def test_a_limit_below_one_line_is_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import eval_bpb

    monkeypatch.setattr("sys.argv", ["eval_bpb.py", "--limit", "2"])
    with pytest.raises(SystemExit, match="2"):
        eval_bpb.main()
    assert "--limit must have room" in capsys.readouterr().err
