"""Decoder: the process that decodes image files, within limits. It runs as a script.

It reads a line of JSON with the limits, and then for each image a line with its number of bytes, and the bytes. It
answers each with a line: why it is refused, or its size; then it reads another line, and writes the RGB pixels.
"""

import contextlib
import io
import json
import math
import os
import sys
import warnings
from typing import Any

from PIL import Image, UnidentifiedImageError

from jaxserve.images.processor import as_rgb

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # animated ones: their first frame


def main() -> None:
    """Read the limits and images from stdin until it ends; decode and answer each image."""
    limits = json.loads(sys.stdin.buffer.readline())
    Image.MAX_IMAGE_PIXELS = limits["max_pixels"]
    warnings.simplefilter("ignore")
    _restrict(limits["max_bytes"])
    _answer({"ready": True})
    while line := sys.stdin.buffer.readline():
        with _within(limits["max_s"]):
            _decode(sys.stdin.buffer.read(json.loads(line)), limits["max_pixels"])


def _decode(data: bytes, max_pixels: int) -> None:
    """Decode an image file, and answer with its size and its RGB pixels, or with the reason for refusing it."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as file:
            width, height = file.size
            if width * height > max_pixels:
                _answer({"reason": f"has {width} x {height} pixels, and may have {max_pixels}"})
                return
            image = as_rgb(file)
        pixels = image.tobytes()
    except UnidentifiedImageError:
        _answer({"reason": f"is none of the formats {', '.join(FORMATS)}"})
    except Image.DecompressionBombError:
        _answer({"reason": f"has more than {max_pixels} pixels"})
    except MemoryError:
        _answer({"reason": "needs too much memory to be decoded"})
    except Exception as error:  # any exception, raised by a decoder: the file is broken
        _answer({"reason": f"cannot be decoded: {str(error)[:200] or type(error).__name__}"})
    else:
        _answer({"width": image.width, "height": image.height})
        sys.stdin.buffer.readline()  # the reader of the line has nothing of the pixels
        sys.stdout.buffer.write(pixels)
        sys.stdout.buffer.flush()


def _restrict(max_bytes: int) -> None:
    """Limit this process's memory to `max_bytes` more than it has now."""
    with contextlib.suppress(ImportError, OSError):
        import resource  # noqa: PLC0415 - not on Windows

        with open("/proc/self/statm", encoding="ascii") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + max_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


@contextlib.contextmanager
def _within(max_s: float) -> Any:
    """Limit the processor time inside the context; the system kills a process that takes longer."""
    with contextlib.suppress(ImportError):
        import resource  # noqa: PLC0415 - not on Windows

        used = math.ceil(sum(os.times()[:2]) + max_s)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (used if hard == resource.RLIM_INFINITY else min(used, hard), hard))
    yield


def _answer(content: dict[str, Any]) -> None:
    """Write a JSON line to stdout."""
    sys.stdout.buffer.write(json.dumps(content).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
