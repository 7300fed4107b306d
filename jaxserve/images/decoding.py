"""Decoding: image files from outside are decoded in processes of their own, which time and memory limits can end."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.errors import BusyError, RequestError, install_extra
from jaxserve.images.deadline import Deadline
from jaxserve.system.child_process import ChildProcess

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_FILE_BYTES = 2**25  # per image file
MAX_PIXELS = 2**26  # per image, before it is resized
DECODE_S = 5.0  # processor time per image
PATIENCE = 4  # wall time may be this many times as long, as processors are shared
DECODE_BYTES = 2**30  # memory per image, beyond its file
NUM_PROCESSES = 2  # concurrent decoding, which bounds the memory of decoded images
START_S = 60.0

_SCRIPT = Path(__file__).with_name("decoder.py")


class Decoders:
    """Processes that decode image files; they start with the first file. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[ChildProcess | None] = [None] * NUM_PROCESSES
        self._changed = threading.Condition()

    @contextmanager
    def decoded(self, data: bytes, deadline: Deadline) -> Iterator[Image]:
        """Yield a file's image, upright and as RGB; others wait while it is in use, as it may take much memory.

        Args:
            data: file content.
            deadline: time limit for its prompt's images.

        Raises:
            RequestError: the file is no such image, or exceeds a limit; a BusyError if no process is free in time; a
                FaultError if none can start.
        """
        from PIL import Image as pillow  # noqa: N813, PLC0415 - an extra

        if len(data) > MAX_FILE_BYTES:
            raise RequestError(f"an image file must have at most {MAX_FILE_BYTES} bytes, got {len(data)}")
        with self._process(deadline) as process:
            width, height, pixels = _decode(process, data)
            yield pillow.frombuffer("RGB", (width, height), pixels, "raw", "RGB", 0, 1)

    def close(self) -> None:
        """End the idle processes; later files start new ones."""
        with self._changed:
            for process in self._free:
                if process is not None:
                    process.kill()
            self._free = [None for _ in self._free]

    @contextmanager
    def _process(self, deadline: Deadline) -> Iterator[ChildProcess]:
        """Wait for a free process, and yield it for its use inside the context."""
        with self._changed:
            with deadline.waiting():
                is_free = self._changed.wait_for(lambda: self._free, deadline.left_s(PATIENCE * DECODE_S))
            if not is_free:
                raise BusyError("images of others are being decoded; try again")
            process = self._free.pop()
        try:
            if process is None or process.status is not None:
                process = None
                process = _new_process()
            yield process
        finally:
            if process is not None and process.status is not None:
                process.kill()  # closes its pipes
                process = None
            with self._changed:
                self._free.append(process)
                self._changed.notify()


def _new_process() -> ChildProcess:
    """Start a decoding process; see `ChildProcess.started`."""
    limits = {"max_pixels": MAX_PIXELS, "max_bytes": DECODE_BYTES, "max_s": DECODE_S}
    line, advice = json.dumps(limits).encode() + b"\n", f", or {install_extra('images')}"
    return ChildProcess.started(_SCRIPT, line, START_S, "images are decoded by", advice=advice)


def _decode(process: ChildProcess, data: bytes) -> tuple[int, int, bytes]:
    """Return an image file's width, height and RGB pixels, decoded by a process; RequestError if it is refused."""
    try:
        process.write(str(len(data)).encode() + b"\n" + data)
        line = process.read_line(PATIENCE * DECODE_S)
        answer = {} if line is None else json.loads(line)
        pixels = None
        if "width" in answer:
            process.write(b"\n")
            pixels = process.read(3 * answer["width"] * answer["height"], PATIENCE * DECODE_S)
    except BaseException:  # its answers would be taken for those to the next file
        process.kill()
        raise
    if reason := answer.get("reason"):
        raise RequestError(f"an image must be a whole file within limits, but it {reason}")
    if pixels is None:
        is_late = process.status in (None, -signal.SIGXCPU, -signal.SIGKILL)
        process.kill()
        raise RequestError(
            f"an image must be decoded {f'in {DECODE_S:g} s' if is_late else 'without a crash'}; reduce it"
        )
    return answer["width"], answer["height"], pixels
