"""Child: the process that first compiles each grammar, within limits. It runs as a script, without the package.

It reads JSON lines: first the tokenizer and the limits, then one grammar per line. It answers each with a line: why the
grammar is refused, its processor time and its memory. Exceeding a limit ends the process.
"""

import ctypes
import json
import math
import os
import resource
import sys
from typing import Any

import llguidance


def main() -> None:
    """Read the tokenizer, the limits and grammars from stdin until it ends; compile and answer each grammar."""
    start = json.loads(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(start["tokenizer"], n_vocab=start["vocab_size"], eos_token=start["eos_ids"])
    limits = llguidance.LLParserLimits(**start["limits"])
    before_bytes = _memory_bytes(1)
    num_words = -(-start["vocab_size"] // 32)
    if address_space := _memory_bytes(0):
        _limit(resource.RLIMIT_AS, address_space + start["max_bytes"])
    os.nice(start["niceness"])
    _answer({"ready": True})
    for line in sys.stdin:
        begun_s, begun_bytes = _cpu_s(), _memory_bytes(1)  # memory freed by earlier grammars may be reused
        _limit(resource.RLIMIT_CPU, math.ceil(begun_s + start["max_s"]))
        reason = _compile(tokenizer, limits, num_words, json.loads(line))
        _answer(
            {
                "reason": reason,
                "cpu_s": _cpu_s() - begun_s,
                "num_bytes": _memory_bytes(1) - begun_bytes,
                "kept_bytes": _memory_bytes(1) - before_bytes,
            }
        )


def _limit(kind: int, value: int) -> None:
    """Set this process's limit on a resource to `value`, or as high as the system allows."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _compile(tokenizer: Any, limits: Any, num_words: int, grammar: str) -> str:
    """Compile a grammar and its first token mask; return why it is refused, or an empty string."""
    try:
        matcher: Any = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        words = (ctypes.c_char * (4 * num_words))()
        matcher.unsafe_compute_mask_ptr(ctypes.addressof(words), len(words))  # parts may be compiled on first use
        return matcher.get_error() if matcher.is_error() else ""
    except Exception as error:
        return str(error) or repr(error)


def _answer(content: dict[str, Any]) -> None:
    """Write a line of JSON to stdout."""
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def _cpu_s() -> float:
    """Return this process's processor time so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _memory_bytes(field: int) -> int:
    """Return the bytes in this process's address space (field 0) or resident memory (field 1); 0 if they are hidden."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[field]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    main()
