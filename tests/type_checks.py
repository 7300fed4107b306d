"""Type checks of jaxserve's functions, which the option `--jaxtyping-packages` asks for, with little overhead.

`jaxtyping.jaxtyped` compiles two functions for each that it wraps, at import, and binds the signature at every call.
Here a definition is prepared at its first call, and once for all functions that it makes inside an outer function; only
calls of functions with arrays among their annotations remember sizes by name. Functions without arrays, which a
scheduler calls a million times, are checked at their first calls only, except in full runs.

Dimensions in braces and arrays inside a `PyTree`, of which jaxserve has none, are not checked.
"""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import beartype
import jaxtyping

from tests import random_runs

MAX_CALLS = 500  # checked calls of a definition without arrays

_jaxtyped = jaxtyping.jaxtyped
_beartype = beartype.beartype(conf=beartype.BeartypeConf(violation_type=jaxtyping.TypeCheckError))  # it is a TypeError


def install() -> None:
    """Replace the decorator that jaxtyping's import hook puts on every function and class."""
    jaxtyping.jaxtyped = jaxtyped


def jaxtyped(decorated: Any = None, *, typechecker: Any) -> Any:
    """Check the types and shapes of a function's arguments and result, or those that a dataclass is made of."""
    if decorated is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if not inspect.isclass(decorated):
        return decorated if hasattr(decorated, "is_checked") else _checked_at_calls(decorated)
    if dataclasses.is_dataclass(decorated) and "__init__" in vars(decorated):
        decorated.__init__ = _checked_at_calls(decorated.__init__)
    return decorated


def _checked_at_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    checks: _Checks | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal checks
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        if checks is None:
            checks = _checks_of(function)
        if checks.have_arrays:
            with _jaxtyped("context"):  # sizes by name, which the result must have too
                return checks.checked_call(function, args, kwargs)
        if not checks.num_left:
            return function(*args, **kwargs)
        checks.num_left -= 1
        return checks.checked_call(function, args, kwargs)

    call.is_checked = True
    return call


@dataclasses.dataclass(slots=True)
class _Checks:
    """Checks of all functions of one definition."""

    code: types.CodeType  # kept, so that no other has its id: equal ones may differ in types, as those of dataclasses
    annotations: dict[str, Any]
    have_arrays: bool
    parameters: Callable[..., None]
    result: Callable[[Any], Any]
    num_left: int = dataclasses.field(default_factory=lambda: -1 if random_runs.are_full() else MAX_CALLS)

    def checked_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function with checked arguments, and check its result."""
        __tracebackhide__ = True
        self.parameters(*args, **kwargs)
        result = function(*args, **kwargs)
        try:
            self.result(result)
        except jaxtyping.TypeCheckError as error:
            error.add_note(f"This is the result of {function.__module__}.{function.__qualname__}.")
            raise
        return result


_prepared: dict[int, _Checks] = {}  # keys are ids of code


def _checks_of(function: Callable[..., Any]) -> _Checks:
    code, annotations = function.__code__, function.__annotations__
    found = _prepared.get(id(code))
    if found is None or found.annotations != annotations:  # closures may differ in what their annotations stand for
        hints = {name: _resolved(hint, function) for name, hint in annotations.items()}
        parts = [part for hint in hints.values() for part in _classes_in(hint)]
        have_arrays = any(issubclass(part, jaxtyping.AbstractArray) for part in parts)
        result = _check_of_result(hints.pop("return", Any))
        found = _Checks(code, dict(annotations), have_arrays, _check_of_parameters(function, hints), result)
        _prepared[id(code)] = found
    return found


@functools.cache
def _check_of_result(hint: Any) -> Callable[[Any], Any]:
    def check(result: Any) -> Any:
        return result

    check.__annotations__ = {"return": hint}
    checked: Callable[[Any], Any] = _beartype(check)
    return checked


def _check_of_parameters(function: Callable[..., Any], hints: dict[str, Any]) -> Callable[..., None]:
    """Return a function of the same parameters that checks its arguments and does nothing else."""
    empty = inspect.Parameter.empty
    plain = [
        each.replace(annotation=empty, default=empty if each.default is empty else None)
        for each in inspect.signature(function, follow_wrapped=False).parameters.values()
    ]
    names: dict[str, Any] = {}
    exec(f"def stub{inspect.Signature(plain)}: pass", names)
    stub = names["stub"]
    if any(each.default is not empty for each in plain):
        stub.__defaults__, stub.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    stub.__name__, stub.__qualname__, stub.__module__ = function.__name__, function.__qualname__, function.__module__
    stub.__annotations__ = hints
    checked: Callable[..., None] = _beartype(stub)
    return checked


def _resolved(hint: Any, function: Callable[..., Any]) -> Any:
    """Return what an annotation stands for; Any if only static checks know it, as names that nothing imports."""
    holder = types.SimpleNamespace(__annotations__={"hint": hint})
    try:
        return typing.get_type_hints(holder, function.__globals__, include_extras=True)["hint"]
    except (AttributeError, NameError, TypeError):
        return Any


def _classes_in(hint: Any) -> Iterator[type]:
    """Yield the classes of which a hint consists."""
    if inspect.isclass(hint):
        yield hint
    for argument in typing.get_args(hint):
        for part in argument if isinstance(argument, list) else [argument]:
            yield from _classes_in(part)
