"""A 64-bit ARM processor, emulated by Unicorn, that runs a static program of Linux."""

import struct
from pathlib import Path

import numpy as np
from unicorn import UC_ARCH_ARM64, UC_HOOK_BLOCK, UC_HOOK_INTR, UC_MODE_ARM, Uc
from unicorn.arm64_const import (
    UC_ARM64_REG_CPACR_EL1,
    UC_ARM64_REG_PC,
    UC_ARM64_REG_SP,
    UC_ARM64_REG_X0,
    UC_ARM64_REG_X1,
    UC_ARM64_REG_X2,
    UC_ARM64_REG_X8,
    UC_CPU_ARM64_MAX,
)

PAGE = 4096
STACK, STACK_SIZE = 0x7000_0000_0000, 16 << 20
HEAP, HEAP_SIZE = 0x5000_0000_0000, 1 << 30  # memory that the program maps
DATA, DATA_SIZE = 0x6000_0000_0000, 1 << 30  # problems and their arrays
ALIGNMENT = 64
NEXT_CALL = 5000  # entry.cc
LOAD, PHDR = 1, 6  # types of a program's segments
WRITE, EXIT, EXIT_GROUP, SET_TID_ADDRESS, MUNMAP, MMAP = 64, 93, 94, 96, 215, 222  # system calls of Linux
ERROR_NOSYS = -38


class Machine:
    """A program that has started and waits for calls."""

    num_instructions: int  # executed by the calls so far

    def __init__(self, program: Path) -> None:
        self.num_instructions = 0
        self._uc = Uc(UC_ARCH_ARM64, UC_MODE_ARM)
        self._uc.ctl_set_cpu_model(UC_CPU_ARM64_MAX)
        self._heap = HEAP
        self._failure: str | None = None
        for start, size in ((STACK - STACK_SIZE, STACK_SIZE), (HEAP, HEAP_SIZE), (DATA, DATA_SIZE)):
            self._uc.mem_map(start, size)
        self._uc.reg_write(UC_ARM64_REG_CPACR_EL1, 3 << 20)  # vectors are enabled
        self._uc.hook_add(UC_HOOK_INTR, self._system_call)
        self._uc.hook_add(UC_HOOK_BLOCK, self._count)
        self._uc.reg_write(UC_ARM64_REG_PC, self._load(program.read_bytes()))
        self._run()
        self.clear()

    def clear(self) -> None:
        """Forget all arrays."""
        self._data = DATA

    def place(self, array: np.ndarray) -> int:
        """Copy an array to the memory of the machine and return its address; 0 for an empty array."""
        if array.size == 0:
            return 0
        address = self._data
        self._data += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        assert self._data <= DATA + DATA_SIZE, "the arrays of a call take more than the machine has"
        self._uc.mem_write(address, np.ascontiguousarray(array).tobytes())
        return address

    def read(self, address: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array in the memory of the machine."""
        size = int(np.prod(shape)) * dtype.itemsize
        return np.frombuffer(bytes(self._uc.mem_read(address, size)) if size else b"", dtype).reshape(shape)

    def call(self, argument: int) -> None:
        """Let the program solve what lies at an address, until it asks for more."""
        self._uc.reg_write(UC_ARM64_REG_X0, argument)
        self._run()

    def _run(self) -> None:
        self._uc.emu_start(self._uc.reg_read(UC_ARM64_REG_PC), 0)
        assert self._failure is None, self._failure

    def _load(self, program: bytes) -> int:
        """Map a program's segments, lay out its stack as Linux does, and return its first address."""
        entry, headers = struct.unpack_from("<QQ", program, 24)
        header_size, num_headers = struct.unpack_from("<HH", program, 54)
        in_memory = 0
        for i in range(num_headers):
            kind, _, offset, address, _, in_file, size, _ = struct.unpack_from(
                "<IIQQQQQQ", program, headers + i * header_size
            )
            if kind == PHDR:
                in_memory = address
            if kind == LOAD:
                start, end = address // PAGE * PAGE, -(-(address + size) // PAGE) * PAGE
                self._uc.mem_map(start, end - start)
                self._uc.mem_write(address, program[offset : offset + in_file])
                if offset <= headers < offset + in_file:
                    in_memory = in_memory or address + headers - offset
        random = STACK - 64
        auxiliary = {3: in_memory, 4: header_size, 5: num_headers, 6: PAGE, 9: entry, 25: random, 0: 0}
        words = [0, 0, 0, *(word for pair in auxiliary.items() for word in pair)]  # no arguments, no environment
        stack = (random - 8 * len(words)) // 16 * 16
        self._uc.mem_write(stack, struct.pack(f"<{len(words)}Q", *words))
        self._uc.reg_write(UC_ARM64_REG_SP, stack)
        return entry

    def _count(self, uc: Uc, address: int, size: int, data: object) -> None:
        self.num_instructions += size // 4

    def _system_call(self, uc: Uc, number: int, data: object) -> None:
        name = uc.reg_read(UC_ARM64_REG_X8)
        first, second, third = map(uc.reg_read, (UC_ARM64_REG_X0, UC_ARM64_REG_X1, UC_ARM64_REG_X2))
        if number != 2:  # not a system call
            self._failure = f"the program failed at {uc.reg_read(UC_ARM64_REG_PC):#x}: exception {number}"
            uc.emu_stop()
        elif name == NEXT_CALL:
            uc.emu_stop()
        elif name in (EXIT, EXIT_GROUP):
            self._failure = f"the program ended with status {first}"
            uc.emu_stop()
        elif name == MMAP:
            address, self._heap = self._heap, self._heap + -(-second // PAGE) * PAGE
            assert self._heap <= HEAP + HEAP_SIZE
            uc.reg_write(UC_ARM64_REG_X0, address)
        elif name == WRITE:
            print(bytes(uc.mem_read(second, third)).decode())
            uc.reg_write(UC_ARM64_REG_X0, third)
        elif name in (MUNMAP, SET_TID_ADDRESS):
            uc.reg_write(UC_ARM64_REG_X0, 0)
        else:
            uc.reg_write(UC_ARM64_REG_X0, ERROR_NOSYS)
