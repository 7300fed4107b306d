"""Grammars that compute without end, or take all memory: they end, and those of other tenants compile meanwhile."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_tokenizers

from jaxserve.api.structured_outputs import StructuredOutputsParams
from jaxserve.errors import BusyError, FaultError, RequestError
from jaxserve.openai.errors import as_bad_request
from jaxserve.text.structured_output import trial
from jaxserve.text.structured_output.grammar import GrammarCompiler

ENDLESS = {"allOf": [{"type": "string", "pattern": f"a{{1,{index + 3}}}b"} for index in range(60)]}
GROWING = {"allOf": [{"type": "string", "pattern": f"[a-z]{{{i}}}{chr(97 + i % 26)}"} for i in range(60)]}


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[GrammarCompiler]:
    backend = tiny_tokenizers.byte_level(300)
    compiler = GrammarCompiler(backend.to_str(), 300, frozenset({0}))
    yield compiler
    for child in compiler._trials._free:
        child.end()


def compile_form(compiler: GrammarCompiler, tenant: str, **form: Any) -> None:
    compiler.constraint(
        StructuredOutputsParams(**form), allowed_token_ids=None, stop_ids=frozenset({0}), min_tokens=0, tenant=tenant
    )


def children(compiler: GrammarCompiler) -> list[psutil.Process]:
    return [psutil.Process(each._process.pid) for each in compiler._trials._free if each._process is not None]


def test_endless_grammar_is_ended_by_killing_its_process(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "COMPILE_S", 0.2)
    compile_form(compiler, "", regex="a")
    (child,) = children(compiler)
    with pytest.raises(RequestError, match=r"must compile in 0\.2 s"):
        compile_form(compiler, "", json=ENDLESS)
    assert not child.is_running()
    with monkeypatch.context() as patch:
        patch.setattr(trial, "ChildProcess", None)  # the refusal is remembered
        with pytest.raises(RequestError, match=r"must compile in 0\.2 s"):
            compile_form(compiler, "", json=ENDLESS)
    monkeypatch.setattr(trial, "COMPILE_S", 30.0)
    compile_form(compiler, "", regex="b")
    with pytest.raises(RequestError, match="unclosed group"):
        compile_form(compiler, "", regex="(((")


def test_a_grammar_that_takes_all_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "COMPILE_BYTES", 2**24)
    monkeypatch.setattr(trial, "COMPILE_S", 60.0)
    compiler = GrammarCompiler(tiny_tokenizers.byte_level(300).to_str(), 300, frozenset({0}))
    before = psutil.Process().memory_info().rss
    with pytest.raises(RequestError, match="within 16 MiB of memory"):
        compile_form(compiler, "", json=GROWING)
    assert psutil.Process().memory_info().rss - before < 2**26
    compile_form(compiler, "", regex="b")
    compiler._trials._free[-1].end()


def test_a_process_that_does_not_start_is_tried_again(
    compiler: GrammarCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(trial, "_SCRIPT", tmp_path / "absent.py")
        with pytest.raises(FaultError, match="compiled by a process of their own, which ends with status 2; see the"):
            compile_form(compiler, "", regex="a")
    compile_form(compiler, "", regex="a")


@pytest.mark.long
def test_processes_end_with_their_compiler() -> None:
    compiler = GrammarCompiler(tiny_tokenizers.byte_level(300).to_str(), 300, frozenset({0}))
    compile_form(compiler, "", regex="a")
    (child,) = children(compiler)
    del compiler
    gc.collect()
    assert not child.is_running()


def test_a_grammar_that_waits_too_long_may_be_sent_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(trial, "PATIENCE", 0)
        patch.setattr(compiler._trials, "_free", [])
        with pytest.raises(BusyError, match="try again") as caught:
            compile_form(compiler, "", regex="a")
    assert as_bad_request(caught.value).status_code == 503
    compile_form(compiler, "", regex="a")


def test_equal_constraints_are_compiled_once(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    run, begun = compiler._trials.run, []
    everybody = threading.Barrier(5)

    def counted(grammar: str, tenant: str) -> trial.Cost:
        begun.append(tenant)
        return run(grammar, tenant)

    def ask() -> None:
        everybody.wait(60)
        compile_form(compiler, "a", regex="ab*")

    monkeypatch.setattr(compiler._trials, "run", counted)
    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert begun == ["a"]
    assert not compiler._turns
    assert not compiler._num_waiting


@pytest.mark.long
def test_other_tenants_grammars_compile_during_a_flood(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "COMPILE_S", 1.0)
    compile_form(compiler, "other", regex="a")
    errors: list[str] = []

    def flood(index: int) -> None:
        try:
            compile_form(compiler, "flood", json=ENDLESS | {"title": str(index)})
        except RequestError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=flood, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    num_before = []
    for index in range(3):
        compile_form(compiler, "other", regex=f"b{{{index + 1}}}")
        num_before.append(len(errors))
    for thread in threads:
        thread.join(60)
    assert num_before[-1] < 4, "the other tenant has not waited for all of the flood"
    assert len(errors) == 4


def test_the_child_needs_neither_jax_nor_the_package() -> None:
    source = Path(trial.__file__).with_name("child.py").read_text(encoding="utf-8")
    assert "import jax" not in source
    assert "from jaxserve" not in source
