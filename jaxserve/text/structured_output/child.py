"""Child: the process that first compiles each grammar, within limits. It runs as a script, without the package.

It reads JSON lines: first the tokenizer and the limits, then one grammar per line. It answers each with a line: why the
grammar is refused, its processor time and its memory. Exceeding a limit ends the process.
"""

import json
import math
import os
import resource
import sys
from typing import Any

import llguidance


def main() -> None:
    """Compile grammars until the input ends."""
    start = json.loads(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(start["tokenizer"], n_vocab=start["vocab_size"], eos_token=start["eos_ids"])
    limits = llguidance.LLParserLimits(**start["limits"])
    before_bytes = _pages(1)
    num_words = -(-start["vocab_size"] // 32)
    if address_space := _pages(0):
        _limit(resource.RLIMIT_AS, address_space + start["max_bytes"])
    os.nice(start["niceness"])
    _answer({"ready": True})
    for line in sys.stdin:
        begun_s, begun_bytes = _cpu_s(), _pages(1)  # memory freed by earlier grammars may be reused
        _limit(resource.RLIMIT_CPU, math.ceil(begun_s + start["max_s"]))
        reason = _compile(tokenizer, limits, num_words, json.loads(line))
        _answer(
            {
                "reason": reason,
                "cpu_s": _cpu_s() - begun_s,
                "num_bytes": _pages(1) - begun_bytes,
                "kept_bytes": _pages(1) - before_bytes,
            }
        )


def _limit(kind: int, value: int) -> None:
    """Set a limit for this process, as high as the system allows."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _compile(tokenizer: Any, limits: Any, num_words: int, grammar: str) -> str:
    """Return why a grammar is refused, or an empty string."""
    try:
        matcher: Any = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        words = bytearray(4 * num_words)
        address = _address(words)
        matcher.unsafe_compute_mask_ptr(address, len(words))  # parts may be compiled on first use
        return matcher.get_error() if matcher.is_error() else ""
    except Exception as error:
        return str(error) or repr(error)


def _address(buffer: bytearray) -> int:
    import ctypes  # noqa: PLC0415 - not needed to check the syntax

    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _answer(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _pages(field: int) -> int:
    """Return the bytes in this process's address space (0) or resident memory (1); 0 if the system hides them."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[field]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    main()
