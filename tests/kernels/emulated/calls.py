"""Calls of the native kernels by an emulated processor, in place of the library's.

`install` makes `native.instruction_sets` name those of 64-bit ARM processors too, and `native.using` use them, so that
the tests of all instruction sets take them along. The fields of problems are those of `native/kernels.h`, and they are
filled as `native/ffi.cc` does.
"""

import ctypes
import functools
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.native.build import BASELINE, FLAGS
from tests.kernels.emulated.machine import Machine

KERNELS = Path(native.__file__).parent
PROCESSORS = {"neon": "generic", "neondot": "neondot"}  # instruction sets of the build
COMPILED_FOR = {"generic": "generic", "neondot": "generic+dotprod"}  # processors as zig calls them
POOL_FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2, "float8_e4m3fn": 3, "uint8": 4}
TERM_FORMATS = {"float32": 0, "bfloat16": 1, "float16": 2}
PANEL_ROWS = 16
ONE_AT_A_TIME = threading.Lock()  # a program may make several calls at the same time, a machine has one memory
INT4_GROUP, INT4_NUMBERS = 64, 4
SPAN_PAGE = 64  # tokens per page of attention over spans

Pointer, Int, Float, Bool, Enum = ctypes.c_uint64, ctypes.c_int64, ctypes.c_float, ctypes.c_bool, ctypes.c_int


def _fields(**types: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for names, kind in types.items() for name in names.split("__")]


class Call(ctypes.Structure):
    _fields_ = [("kernel", Int), ("problem", Pointer)]


class Activations(ctypes.Structure):
    _fields_ = [("data", Pointer), ("is_bfloat16", Bool)]


class Linear(ctypes.Structure):
    _fields_ = [
        *_fields(x=Activations, norm=Pointer, eps=Float, bias=Pointer, residual=Activations, weight=Pointer),
        *_fields(format=Enum, gated=Bool, scales__zeros=Pointer, group_size=Int, input_format=Enum, y=Activations),
        *_fields(num_tokens__num_outputs__num_inputs=Int),
        *_fields(terms__task_terms__rows=Pointer),
    ]


class Terms(ctypes.Structure):
    _fields_ = [
        *_fields(slots__x__a__b=Pointer, format=Enum, gated=Bool, shift__factor__part_ends=Pointer),
        *_fields(num_slots__num_parts__rank__num_inputs=Int),
    ]


class Grouped(ctypes.Structure):
    _fields_ = [("all", Linear), ("group_sizes", Pointer), ("num_groups", Int)]


class Attention(ctypes.Structure):
    _fields_ = [
        *_fields(qkv=Activations, rope__pool=Pointer, format=Enum, scales=Pointer, has_latents=Bool),
        *_fields(kv_lens__page_table__table_row__cu_q_lens__sinks__tree_mask=Pointer, out=Activations),
        *_fields(num_tokens__num_rows__table_width__layer__num_pages__page_size=Int),
        *_fields(num_query_heads__num_kv_heads__head_dim__value_dim=Int, scale__soft_cap=Float),
        *_fields(window__max_queries=Int, sees_all=Bool),
    ]


@functools.cache
def machine(name: str) -> Machine:
    """Compile the kernels for a processor and start them."""
    width, _ = BASELINE
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl", f"-I{KERNELS}", *FLAGS]
    compiler.append("-Wno-unknown-warning-option")  # FLAGS are for GCC
    with tempfile.TemporaryDirectory() as directory:
        objects = []
        for isa in {"generic", PROCESSORS[name]}:  # one without kernels of attention has the plain ones
            objects.append(Path(directory, f"{isa}.o"))
            macros = [f"-DNATIVE_ISA={isa}", f"-DNATIVE_WIDTH={width}", f"-mcpu={COMPILED_FOR[isa]}"]
            macros += [] if isa == "generic" else ["-DNATIVE_PLAIN=generic"]
            subprocess.run([*compiler, *macros, "-c", KERNELS / "isa.cc", "-o", objects[-1]], check=True)
        entry = [f"-DNATIVE_ISA={PROCESSORS[name]}", Path(__file__).with_name("entry.cc")]
        program = Path(directory, "kernels")
        subprocess.run([*compiler, *entry, *objects, "-static", "-s", "-o", program], check=True)
        return Machine(program)


def install() -> None:
    """Make the processors usable as instruction sets of the library."""
    of_library, using = native.instruction_sets, native.using

    @contextmanager
    def using_any(name: str) -> Iterator[None]:
        if name not in PROCESSORS:
            with using(name):
                yield
            return
        call, jax.ffi.ffi_call = jax.ffi.ffi_call, functools.partial(emulated_call, machine(name))
        jax.clear_caches()  # programs hold the calls that they were traced with
        try:
            yield
        finally:
            jax.ffi.ffi_call = call
            jax.clear_caches()

    native.instruction_sets = lambda: [*of_library(), *PROCESSORS]
    native.using = using_any


def emulated_call(machine: Machine, target: str, results: Any, **_: Any) -> Callable[..., Any]:
    """Return what `jax.ffi.ffi_call` returns, for a kernel of the machine."""

    def call(*operands: jax.Array, **attributes: np.generic) -> Any:
        def solve(*arrays: jax.Array) -> Any:
            with ONE_AT_A_TIME:
                return SOLVERS[target](machine, results, attributes, *arrays)

        return jax.pure_callback(solve, results, *operands)

    return call


def _split(operands: Sequence[jax.Array]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return x and a packed matrix, and the operands after them."""
    arrays = [np.asarray(operand) for operand in operands]
    return arrays[:4], arrays[4:]


def run(machine: Machine, kernel: int, problem: ctypes.Structure) -> None:
    call = Call(kernel, machine.place(np.frombuffer(bytes(problem), np.uint8)))
    machine.call(machine.place(np.frombuffer(bytes(call), np.uint8)))


def place_activations(machine: Machine, array: np.ndarray) -> Activations:
    return Activations(machine.place(array), array.dtype.name == "bfloat16")


def read_product(machine: Machine, result: Any, attributes: dict[str, Any], *arrays: np.ndarray) -> Linear:
    x, weight, scales, zeros = arrays
    group_size = x.shape[1]
    if scales.size:
        group_size //= scales.shape[1]
    return Linear(
        x=place_activations(machine, x),
        weight=machine.place(weight),
        scales=machine.place(scales),
        zeros=machine.place(zeros),
        y=place_activations(machine, np.full(result.shape, np.nan, result.dtype)),
        num_tokens=len(x),
        num_inputs=x.shape[1],
        num_outputs=result.shape[1],
        gated=weight.shape[2] == 2,
        format=int(attributes["weight_format"]),
        group_size=group_size,
        input_format=int(attributes["input_format"]),
    )


def place_terms(machine: Machine, num_panels: int, *operands: np.ndarray) -> int:
    """Return the address of low-rank terms; 0 in calls without them, or if no token has any."""
    if not operands or not operands[0].any():
        return 0
    slots, a, b, part_ends, shift, factor, x = operands
    terms = Terms(
        slots=machine.place(slots),
        x=machine.place(x),
        a=machine.place(a),
        b=machine.place(b),
        shift=machine.place(shift),
        factor=machine.place(factor),
        part_ends=machine.place(part_ends),
        format=TERM_FORMATS[str(a.dtype)],
        gated=b.shape[2] == 2,
        num_slots=len(b) // num_panels,
        num_parts=len(part_ends),
        rank=b.shape[1],
        num_inputs=a.shape[1],
    )
    return machine.place(np.frombuffer(bytes(terms), np.uint8))


def solve_linear(machine: Machine, result: Any, attributes: dict[str, Any], *operands: jax.Array) -> np.ndarray:
    of_product, (norm, bias, residual, num_live, *terms) = _split(operands)
    machine.clear()
    problem = read_product(machine, result, attributes, *of_product)
    problem.norm, problem.bias = map(machine.place, (norm, bias))
    problem.residual = place_activations(machine, residual)
    problem.eps, problem.terms = attributes["eps"], place_terms(machine, len(of_product[1]), *terms)
    live = min(max(int(num_live[0]), 0), len(of_product[0])) if num_live.size else len(of_product[0])
    problem.num_tokens = live
    if live:
        run(machine, 0, problem)
    y = machine.read(problem.y.data, result.shape, np.dtype(result.dtype)).copy()
    y[live:] = 0
    return y


def solve_grouped(machine: Machine, result: Any, attributes: dict[str, Any], *operands: jax.Array) -> np.ndarray:
    of_product, (group_sizes, *terms) = _split(operands)
    machine.clear()
    problem = read_product(machine, result, attributes, *of_product)
    problem.terms = place_terms(machine, len(of_product[1]), *terms)
    run(machine, 1, Grouped(problem, machine.place(group_sizes), len(group_sizes)))
    return machine.read(problem.y.data, result.shape, np.dtype(result.dtype))


def solve_attention(
    machine: Machine, results: Sequence[Any], attributes: dict[str, Any], *operands: jax.Array
) -> list[np.ndarray]:
    qkv, pool, scales, layer, kv_lens, page_table, table_row, cu_q_lens, num_rows, sinks, rope, *tree_mask = map(
        np.asarray, operands
    )
    machine.clear()
    out, rank = results[0], int(attributes["rank"])
    head_dim = qkv.shape[2]
    num_vectors = qkv.shape[1] - out.shape[1]  # vectors per token
    num_parts = 1
    if not rank:
        stored = head_dim
        if pool.dtype == np.uint8:
            group = head_dim if head_dim % INT4_GROUP else INT4_GROUP
            stored = head_dim // 2 + head_dim // group * INT4_NUMBERS
        num_parts = pool.shape[2] * pool.shape[4] // (num_vectors * stored)
    problem = Attention(
        qkv=place_activations(machine, qkv),
        rope=machine.place(rope),
        pool=machine.place(pool),
        format=POOL_FORMATS[str(pool.dtype)],
        scales=machine.place(scales),
        has_latents=rank > 0,
        kv_lens=machine.place(kv_lens),
        page_table=machine.place(page_table),
        table_row=machine.place(table_row),
        cu_q_lens=machine.place(cu_q_lens),
        sinks=machine.place(sinks),
        tree_mask=machine.place(tree_mask[0]) if tree_mask else 0,
        out=place_activations(machine, np.zeros(out.shape, out.dtype)),
        num_tokens=len(qkv),
        num_rows=int(num_rows.reshape(())),
        table_width=page_table.shape[1],
        layer=int(layer.reshape(())),
        num_pages=pool.shape[1] * num_parts,
        page_size=pool.shape[2 if rank else 3],
        num_query_heads=out.shape[1],
        num_kv_heads=1 if rank else num_vectors // 2,
        head_dim=head_dim,
        value_dim=rank or head_dim,
        **{name: attributes[name].item() for name in ("scale", "soft_cap", "window", "max_queries")},
    )
    run(machine, 2, problem)
    addresses = [problem.out.data, problem.pool, problem.scales]
    return [
        machine.read(address, to.shape, np.dtype(to.dtype)) for address, to in zip(addresses, results, strict=False)
    ]


def solve_span_attention(machine: Machine, result: Any, attributes: dict[str, Any], *operands: jax.Array) -> np.ndarray:
    qkv, rope, spans = map(np.asarray, operands)
    machine.clear()
    num_tokens, num_heads, head_dim = result.shape
    starts = [0]
    while starts[-1] < num_tokens and spans[1, starts[-1]] > starts[-1]:
        starts.append(int(spans[1, starts[-1]]))
    lengths = np.diff(starts).astype(np.int32)
    num_pages = -(-lengths // SPAN_PAGE)
    table = np.zeros((max(1, len(lengths)), max(1, *num_pages, 1)), np.int32)
    for row, (first, count) in enumerate(zip(np.cumsum(num_pages) - num_pages, num_pages, strict=True)):
        table[row, :count] = np.arange(first, first + count)
    problem = Attention(
        qkv=place_activations(machine, qkv),
        rope=machine.place(rope),
        pool=machine.place(np.zeros((int(num_pages.sum()), num_heads, 2, SPAN_PAGE * head_dim), np.float32)),
        format=POOL_FORMATS["float32"],
        kv_lens=machine.place(lengths),
        page_table=machine.place(table),
        cu_q_lens=machine.place(np.array(starts, np.int32)),
        out=place_activations(machine, np.zeros(result.shape, np.float32)),
        num_tokens=num_tokens,
        num_rows=len(lengths),
        table_width=table.shape[1],
        num_pages=int(num_pages.sum()),
        page_size=SPAN_PAGE,
        num_query_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        scale=attributes["scale"].item(),
        sees_all=True,
    )
    run(machine, 2, problem)
    return machine.read(problem.out.data, result.shape, np.dtype(np.float32))


def solve_zeros(machine: Machine, result: Any, attributes: dict[str, Any]) -> np.ndarray:
    return np.zeros(result.shape, result.dtype)


SOLVERS = {
    native.LINEAR: solve_linear,
    native.GROUPED_LINEAR: solve_grouped,
    native.ATTENTION: solve_attention,
    native.SPAN_ATTENTION: solve_span_attention,
    native.ZEROS: solve_zeros,
}
