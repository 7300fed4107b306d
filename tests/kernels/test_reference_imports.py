"""The reference of attention is an oracle: it shares no code with a backend, and nothing shipped imports it."""

import ast
import importlib.util
from pathlib import Path

import jaxserve
from jaxserve import pallas_kernels, weights
from jaxserve.pallas_kernels.ragged_paged_attention import BACKENDS

ATTENTION = "jaxserve.pallas_kernels.ragged_paged_attention"
BACKENDS_AND_NATIVE = {"jaxserve.pallas_kernels.native", *(type(backend).__module__ for backend in BACKENDS.values())}


def imported(module):
    """Return the modules of jaxserve and of the tests whose code a module imports, itself included."""
    found, pending = set(), [module]
    while pending:
        if (name := pending.pop()) not in found:
            found.add(name)
            pending += _imports(Path(importlib.util.find_spec(name).origin))
    return found


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name for name in submodules if _is_module(name)] or [node.module]
        else:
            continue
        yield from (name for name in names if name.startswith(("jaxserve.", "tests.")))


def _is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


def test_the_reference_shares_no_code_with_a_backend():
    found = imported("tests.kernels.attention_reference")
    assert f"{ATTENTION}.interface" in found, "the search follows imports"
    assert not {name for name in found for backend in BACKENDS_AND_NATIVE if f"{name}.".startswith(f"{backend}.")}
    assert ATTENTION not in found, "the operation imports every backend"


def test_no_shipped_module_imports_tests():
    for package in (jaxserve, pallas_kernels, weights):
        for path in Path(package.__file__).parent.rglob("*.py"):
            assert not [name for name in _imports(path) if name.startswith("tests.")], path
