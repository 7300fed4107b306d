"""`jaxserve convert`: its output serves by itself, with the same tokens."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxserve import LLM, SamplingParams, cli
from jaxserve.api.config import DEFAULT_MODEL
from jaxserve.api.embedded import embedded_model
from tests.e2e.sizes import EMBEDDED
from tests.soon_compiled import few_programs

PROMPTS = ["def binary_search(items, target):", "import os\n"]


@pytest.fixture(autouse=True)
def devices() -> Iterator[None]:
    """Keep jax's devices for other tests: the command restricts jax to CPUs."""
    jax.devices()
    platforms = jax.config.jax_platforms
    yield
    jax.config.update("jax_platforms", platforms)


def answers(model: str | None) -> list[tuple[str, tuple[int, ...]]]:
    with few_programs():
        llm = LLM(model, **EMBEDDED)
    params = [SamplingParams(temperature=0, max_tokens=12), SamplingParams(seed=3, max_tokens=12)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(output.outputs[0].text, tuple(output.outputs[0].token_ids)) for output in outputs]


@pytest.mark.long
def test_both_directions_serve_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    assert cli.main(["convert", str(embedded_model(DEFAULT_MODEL)), there]) == 0
    assert cli.main(["convert", there, back]) == 0
    assert not list(Path(there).rglob("*.safetensors"))
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")
    assert answers(there) == answers(back) == answers(None)


def test_errors_take_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(embedded_model(DEFAULT_MODEL))
    for source, target, text in [
        (str(tmp_path / "nowhere"), "target", "must be a local directory"),
        (str(tmp_path), "target", "must contain config.json"),
        (model, model, "must be absent or an empty directory"),
    ]:
        assert cli.main(["convert", source, str(tmp_path / target)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("jaxserve: error: ")
        assert text in line
