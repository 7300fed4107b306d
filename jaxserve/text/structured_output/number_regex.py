"""Regular expressions for decimal numbers below or above a bound with any number of digits."""

from __future__ import annotations

from decimal import Decimal

_ANY, _FRACTION = "(0|[1-9][0-9]*)", r"(\.[0-9]+)?"


def bounded(keyword: str, bound: Decimal, *, is_integer: bool) -> list[str]:
    """Return alternative regular expressions for the numbers that obey a JSON schema keyword; none if no number does.

    Args:
        keyword: "minimum", "exclusiveMinimum", "maximum" or "exclusiveMaximum".
        bound: value of the keyword.
        is_integer: True for integers only.
    """
    is_strict, size = keyword.startswith("exclusive"), bound.copy_abs()  # `abs` would round
    free = _ANY if is_integer else _ANY + _FRACTION
    if keyword.endswith("inimum"):
        if bound >= 0:
            return _at_least(size, is_strict=is_strict, is_integer=is_integer)
        return [f"-{each}" for each in _at_most(size, is_strict=is_strict, is_integer=is_integer)] + [free]
    if bound < 0 or (bound == 0 and is_strict):
        return [f"-{each}" for each in _at_least(size, is_strict=is_strict, is_integer=is_integer)]
    return [*_at_most(size, is_strict=is_strict, is_integer=is_integer), f"-{free}"]


def _parts(bound: Decimal) -> tuple[int, str]:
    """Return a bound's integer part, and the digits of its fraction without trailing zeros."""
    whole, _, digits = format(bound, "f").partition(".")
    return int(whole), digits.rstrip("0")


def _at_least(bound: Decimal, *, is_strict: bool, is_integer: bool) -> list[str]:
    """Return alternative regular expressions for the numbers from a bound >= 0 upwards, without the bound if strict."""
    whole, digits = _parts(bound)
    if is_integer:
        return [_whole_at_least(str(whole + bool(digits or is_strict)))]
    same = _FRACTION if not digits and not is_strict else rf"\.{_digits_at_least(digits, is_strict=is_strict)}"
    return [_whole_at_least(str(whole + 1)) + _FRACTION, f"{whole}{same}"]


def _at_most(bound: Decimal, *, is_strict: bool, is_integer: bool) -> list[str]:
    """Return alternative regular expressions for the numbers from 0 up to a bound, without the bound if strict."""
    whole, digits = _parts(bound)
    if is_integer:
        whole -= is_strict and not digits
        return [_whole_at_most(str(whole))] if whole >= 0 else []
    found = [_whole_at_most(str(whole - 1)) + _FRACTION] if whole else []
    if digits:
        found.append(rf"{whole}(\.{_digits_at_most(digits, is_strict=is_strict)})?")
    elif not is_strict:
        found.append(rf"{whole}(\.0+)?")
    return found


def _whole_at_least(number: str) -> str:
    """Return a regular expression for the integers that are at least `number`, which is written in digits."""
    if number == "0":
        return _ANY
    found = [number, f"[1-9][0-9]{{{len(number)},}}"]
    for index, digit in enumerate(number):
        if digit != "9":
            found.append(f"{number[:index]}[{int(digit) + 1}-9][0-9]{{{len(number) - index - 1}}}")
    return f"({'|'.join(found)})"


def _whole_at_most(number: str) -> str:
    """Return a regular expression for the integers from 0 to `number`, which is written in digits."""
    found = [number] if len(number) == 1 else [number, "0", f"[1-9][0-9]{{0,{len(number) - 2}}}"]
    for index, digit in enumerate(number):
        first = int(index == 0 and len(number) > 1)
        if int(digit) > first:
            found.append(f"{number[:index]}[{first}-{int(digit) - 1}][0-9]{{{len(number) - index - 1}}}")
    return f"({'|'.join(found)})"


# Alternatives repeat common prefixes, as nested groups for many digits would exceed llguidance's maximum depth.


def _digits_at_least(digits: str, *, is_strict: bool) -> str:
    """Return a regular expression for the fractions that are at least 0.`digits`, as digits after the point."""
    found = [digits + ("[0-9]*[1-9][0-9]*" if is_strict else "[0-9]*")]
    for index, digit in enumerate(digits):
        if digit != "9":
            found.append(f"{digits[:index]}[{int(digit) + 1}-9][0-9]*")
    return f"({'|'.join(found)})"


def _digits_at_most(digits: str, *, is_strict: bool) -> str:
    """Return a regular expression for the fractions that are at most 0.`digits`, as digits after the point.

    The last of `digits` is not 0.
    """
    found = [digits[:length] for length in range(1, len(digits))]
    for index, digit in enumerate(digits):
        if digit != "0":
            found.append(f"{digits[:index]}[0-{int(digit) - 1}][0-9]*")
    if not is_strict:
        found.append(f"{digits}0*")
    return f"({'|'.join(found)})"
