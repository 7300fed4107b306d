import os
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

from jaxserve.execution import program_store as programs
from jaxserve.execution.program_store import ProgramStore
from jaxserve.layers.mlp import geglu, swiglu
from jaxserve.models import registry
from tests.checkpoints import FAMILIES, MIXTURES, hf_dict


def compile_double():
    return jax.jit(lambda x: 2 * x, donate_argnums=0).lower(jnp.arange(3.0)).compile()


class Compiler:
    """Compiles the same program and counts."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self):
        self.num_calls += 1
        return compile_double()


@pytest.fixture
def compiler(no_xla_cache):
    return Compiler()


@pytest.fixture
def xla_cache(no_xla_cache, tmp_path):
    """The process has set up a cache of XLA's."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "xla"))


@pytest.mark.usefixtures("xla_cache")
def test_programs_from_xlas_cache_are_not_stored_again(tmp_path, compiler):
    """Such a program is serialised by jax 0.10.2 to something that does not run."""
    for facts in (["a"], ["b"], ["b"]):
        program = ProgramStore(tmp_path / "programs", facts).get("x", compiler)
        assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert compiler.num_calls == 3
    assert len(list((tmp_path / "programs").iterdir())) == 1


@pytest.mark.usefixtures("xla_cache")
def test_programs_that_jax_already_loaded_are_not_stored_either(tmp_path):
    """jax hands out what it has in memory without asking XLA."""
    double = jax.jit(lambda x: 2 * x)
    programs = []
    for facts in (["a"], ["b"], ["c"], ["c"]):
        if facts == ["b"]:
            jax.clear_caches()  # pretends that the first one is of another process
        programs.append(
            ProgramStore(tmp_path / "programs", facts).get("x", lambda: double.lower(jnp.arange(3.0)).compile())
        )
        assert programs[-1](jnp.ones(3)).tolist() == [2, 2, 2]
    assert len(list((tmp_path / "programs").iterdir())) == 1


def test_a_stored_program_is_not_compiled_again(tmp_path, compiler):
    for _ in range(3):
        x = jnp.arange(3.0)
        program = ProgramStore(tmp_path, ["model"]).get("double", compiler)
        assert program(x).tolist() == [0, 2, 4]
        assert x.is_deleted()  # donated, by the loaded program too
    assert compiler.num_calls == 1


def test_key_parts_and_names_distinguish_programs(tmp_path, compiler):
    for facts, name in [(["a"], "x"), (["b"], "x"), (["a"], "y"), (["a", "b"], "x")]:
        ProgramStore(tmp_path, facts).get(name, compiler)
    assert compiler.num_calls == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_described_alike_in_every_process(family):
    described = programs.described(registry.from_hf_config(hf_dict(family)))
    assert " at 0x" not in described
    functions = {*re.findall("<function (.*?)>", described)}
    assert functions <= {f"{each.__module__}.{each.__name__}" for each in (swiglu, geglu)}
    assert len(functions) == (family in MIXTURES and family != "gpt_oss"), "whose activation has fields"


@dataclass
class Fact:
    content: object


def function_of(module):
    """Return a function `f` as a module of this name would define it."""
    names = {"__name__": module}
    exec("def f(x):\n    return x", names)
    return names["f"]


@pytest.mark.parametrize("put", [lambda f: f, lambda f: (1, {"act": [f]}), lambda f: Fact(Fact(f))])
def test_functions_are_distinguished_by_their_modules(put):
    one, again, other = (programs.described(put(function_of(module))) for module in ("one", "one", "other"))
    assert one == again != other
    assert "<function one.f>" in one


def test_jax_settings_distinguish_programs(tmp_path, compiler):
    for precision in ("highest", "default"):
        with jax.default_matmul_precision(precision):
            ProgramStore(tmp_path, []).get("x", compiler)
    assert compiler.num_calls == 2


def test_without_a_directory_nothing_is_stored(compiler):
    for _ in range(2):
        ProgramStore(None, []).get("x", compiler)
    assert compiler.num_calls == 2


@pytest.mark.parametrize("spoil", [lambda content: content[:100], lambda content: b"", lambda content: content[::-1]])
def test_a_spoilt_file_is_replaced(tmp_path, compiler, spoil, caplog):
    ProgramStore(tmp_path, []).get("x", compiler)
    (path,) = tmp_path.iterdir()
    path.write_bytes(spoil(path.read_bytes()))
    for _ in range(2):
        assert ProgramStore(tmp_path, []).get("x", compiler)(jnp.ones(3)).tolist() == [2, 2, 2]
    assert compiler.num_calls == 2
    assert "compiled again" in caplog.text


def test_a_directory_that_cannot_be_written_is_no_reason_to_fail(tmp_path, compiler, caplog):
    (tmp_path / "file").touch()
    program = ProgramStore(tmp_path / "file" / "below", []).get("x", compiler)
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert "cannot be kept" in caplog.text


def test_the_longest_unused_go_first(tmp_path):
    for age, name in enumerate(["new.program", "older.program", "oldest.program", "no program of ours"]):
        path = tmp_path / name
        path.write_bytes(b"x" * 100)
        os.utime(path, (1e9 - age, 1e9 - age))
    programs.prune(tmp_path, "*.program", 250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.program", "no program of ours", "older.program"]


@pytest.mark.parametrize("loosen", ["directory", "file"])
def test_files_writable_by_others_are_not_read(tmp_path, compiler, caplog, loosen):
    """A program is code: reading it runs it."""
    directory = tmp_path / "programs"
    ProgramStore(directory, []).get("x", compiler)
    (path,) = directory.iterdir()
    (directory if loosen == "directory" else path).chmod(0o777)
    for name in ("x", "y"):
        ProgramStore(directory, []).get(name, compiler)
    assert compiler.num_calls == 3
    assert caplog.text.count("must be writable by this user alone") == 1


def test_a_directory_that_cannot_be_written_is_one_warning(tmp_path, compiler, caplog):
    (tmp_path / "file").touch()
    for name in ("x", "y", "z"):
        ProgramStore(tmp_path / "file" / "below", []).get(name, compiler)
    assert caplog.text.count("cannot be kept") == 1
