"""Evaluate the PTX that converts elements of matrices, with numpy: the interpreter of kernels does not run it."""

import re

import ml_dtypes
import numpy as np

BFLOAT16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
U32, F16, F32 = np.uint32, np.float16, np.float32


def evaluate(code, registers):
    """Return the 32-bit register $0 for each value of $1 in `registers`, u32[N]."""
    known = {"$1": registers}

    def read(name, dtype=U32):
        value = known[name] if name in known else np.full(len(registers), int(name, 0), U32)
        return np.ascontiguousarray(value).view(dtype)

    for instruction in filter(None, (line.strip(" {}") for line in re.sub(r"\.reg[^;]*;", "", code).split(";"))):
        operation, operands = instruction.split(" ", 1)
        target, *given = re.findall(r"[$\w]+", operands)
        if operands.startswith("{"):  # both halves of a register
            known[target], known[given[0]] = read(given[1], np.uint16).reshape(-1, 2).T.copy()
        elif "{" in operands:
            known[target] = _pairs(*(known[name] for name in given))
        else:
            known[target] = OPERATIONS[operation](read, *given)
    return known["$0"]


def _pairs(low, high):
    return np.stack([low, high], axis=1).copy().view(U32)[:, 0]


def _permuted(read, a, b, order):
    bytes_ = np.concatenate([read(name, np.uint8).reshape(-1, 4) for name in (a, b)], axis=1)
    return bytes_[:, [int(order, 0) >> 4 * i & 7 for i in range(4)]].copy().view(U32)[:, 0]


def _a_and_b_or_c(read, a, b, c, table):
    assert int(table, 0) == 0xEA
    return (read(a) & read(b)) | read(c)


def _computed(function, dtype):
    def compute(read, a, b):
        exact = function(*(read(name, dtype).astype(np.float64) for name in (a, b)))
        return exact.astype(F32).astype(dtype).view(U32)

    return compute


OPERATIONS = {
    "mov.b32": lambda read, a: read(a),
    "shl.b32": lambda read, a, count: read(a) << U32(int(count)),
    "shr.u32": lambda read, a, count: read(a) >> U32(int(count)),
    "and.b32": lambda read, a, b: read(a) & read(b),
    "xor.b32": lambda read, a, b: read(a) ^ read(b),
    "lop3.b32": _a_and_b_or_c,
    "prmt.b32": _permuted,
    "sub.bf16x2": _computed(np.subtract, BFLOAT16),
    "sub.f16x2": _computed(np.subtract, F16),
    "mul.bf16x2": _computed(np.multiply, BFLOAT16),
    "mul.f16x2": _computed(np.multiply, F16),
    "cvt.rn.f16x2.e4m3x2": lambda read, a: read(a, E4M3).astype(F16).view(U32),
    "cvt.f32.f16": lambda read, a: read(a, F16).astype(F32),
    "cvt.rn.bf16x2.f32": lambda read, high, low: _pairs(*(read(x, F32).astype(BFLOAT16) for x in (low, high))),
}
