"""Image files from outside: decoded as Pillow decodes them, or refused; the decoders always serve the next file."""

import io
import signal
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image, ImageCms

from jaxserve.errors import RequestError
from jaxserve.images import decoding
from jaxserve.images.deadline import Deadline
from jaxserve.images.decoding import Decoders
from jaxserve.images.processor import as_rgb
from jaxserve.system.child_process import ChildProcess

PIXELS = np.random.default_rng(0).integers(0, 256, (23, 31, 3), np.uint8)


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    decoders = Decoders()
    yield decoders
    decoders.close()


def encoded(kind: str, image: Image.Image | None = None, **options: object) -> bytes:
    file = io.BytesIO()
    (Image.fromarray(PIXELS) if image is None else image).save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, data: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def gif(screen: int, frame: int) -> bytes:
    header = struct.pack("<HHBBB", screen, screen, 0x80, 0, 0) + bytes(6)
    return b"GIF89a" + header + struct.pack("<cHHHHB", b",", 0, 0, frame, frame, 0) + b"\x02\x02\x4c\x01\x00;"


def decode(decoders: Decoders, data: bytes) -> Image.Image:
    with decoders.decoded(data, Deadline(60)) as image:
        return image.copy()


def check_serves(decoders: Decoders) -> None:
    assert decode(decoders, encoded("PNG")).tobytes() == PIXELS.tobytes()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_files_are_decoded_like_pillow(decoders, kind):
    data = encoded(kind)
    assert decode(decoders, data).tobytes() == as_rgb(Image.open(io.BytesIO(data))).tobytes()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animations_are_their_first_frame(decoders, kind):
    frames = [Image.new("RGB", (5, 5), colour) for colour in ("white", "black", "red")]
    data = encoded(kind, frames[0], save_all=True, append_images=frames[1:], lossless=True)
    assert set(decode(decoders, data).tobytes()) == {255}


def odd_files() -> dict[str, bytes]:
    """Return whole files with unusual pixels."""
    rgb = Image.fromarray(PIXELS)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()  # colours are read as they are
    return {
        "CMYK": encoded("JPEG", rgb.convert("CMYK")),
        "gray JPEG": encoded("JPEG", rgb.convert("L")),
        "ICC": encoded("PNG", rgb, icc_profile=profile),
        "16 bits": encoded("PNG", Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 257)),
        "1 bit": encoded("PNG", rgb.convert("1")),
        "palette": encoded("PNG", rgb.quantize(7)),
        "transparent": encoded("WEBP", Image.fromarray(np.dstack([PIXELS, PIXELS[..., 0]])), lossless=True),
        "1 pixel": encoded("GIF", Image.new("RGB", (1, 1))),
    }


@pytest.mark.parametrize("name", odd_files())
def test_odd_files_are_decoded_like_pillow(decoders, name):
    data = odd_files()[name]
    assert decode(decoders, data).tobytes() == as_rgb(Image.open(io.BytesIO(data))).tobytes()
    if name == "ICC":
        assert decode(decoders, data).tobytes() == PIXELS.tobytes()


def test_photographs_are_turned_upright(decoders):
    image = Image.fromarray(PIXELS)
    image.getexif()[0x0112] = 6
    assert decode(decoders, encoded("JPEG", image, exif=image.getexif())).size == (23, 31)


def test_huge_and_circular_metadata(decoders):
    """EXIF is read only for the orientation; compressed metadata is no way around the limits."""
    plain = encoded("PNG")

    def beside(name: bytes, content: bytes) -> bytes:
        return plain[:33] + chunk(name, content) + plain[33:]

    def exif(*entries: tuple[int, int, int, int]) -> bytes:
        listed = b"".join(struct.pack(">HHII", *entry) for entry in entries)
        return b"MM\0*\0\0\0\x08" + struct.pack(">H", len(entries)) + listed + struct.pack(">I", 8)

    upright, turned = (31, 23), (23, 31)
    orientation, itself = (0x0112, 3, 1, 6 << 16), (0x8769, 4, 1, 8)
    large = [(tag, 7, 2**22, 8) for tag in range(20)]
    assert decode(decoders, beside(b"eXIf", exif(*large, orientation, itself) + bytes(2**22))).size == turned
    assert decode(decoders, beside(b"eXIf", exif((1, 2, 2**31 - 1, 2**31 - 1)))).size == upright
    bomb = zlib.compress(bytes(2**24))
    for name, head in ((b"zTXt", b"a\0\0"), (b"iTXt", b"a\0\1\0\0\0"), (b"iCCP", b"a\0\0")):
        with pytest.raises(RequestError, match="Decompressed data too large"):
            decode(decoders, beside(name, head + bomb))
    check_serves(decoders)


SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (SVG, "is none of the formats PNG, JPEG, WEBP, GIF"),
        (b"", "is none of the formats"),
        (b"%PDF-1.7\n" + encoded("JPEG"), "is none of the formats"),
        (encoded("TIFF"), "is none of the formats"),
        (encoded("BMP"), "is none of the formats"),
        (encoded("PNG")[:300], "cannot be decoded"),
        (encoded("JPEG")[:-200], "cannot be decoded"),
        (encoded("WEBP")[:100], "decoded|formats"),
        (png(60000, 60000, zlib.compress(b"")), "pixels, and may have|more than"),
        (gif(screen=1, frame=60000), "more than"),
        (gif(screen=60000, frame=1), "more than"),
        (png(8192, 8193, zlib.compress(b"")), "8192 x 8193 pixels"),
        (png(5000, 5000, zlib.compress(bytes(1000))), "cannot be decoded"),
        (png(10, 10, b"no zlib"), "cannot be decoded"),
        (png(0, 10, zlib.compress(b"")), "decoded|formats"),
    ],
)
def test_broken_files_bombs_and_other_formats_are_refused(decoders, data, word):
    with pytest.raises(RequestError, match=word):
        decode(decoders, data)
    check_serves(decoders)


def test_polyglots_are_only_their_pixels(decoders):
    """A file that is also an archive or a script is decoded by its first bytes, and nothing else of it is read."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("x.svg", SVG)
    for appended in (archive.getvalue(), SVG, b"<script>alert(1)</script>"):
        assert decode(decoders, encoded("PNG") + appended).tobytes() == PIXELS.tobytes()


def test_files_that_take_too_long_or_too_much_memory_end_only_their_process(monkeypatch):
    decoders = Decoders()
    monkeypatch.setattr(decoding, "DECODE_BYTES", 2**24)
    with pytest.raises(RequestError, match=r"memory|crash|cannot be decoded"):
        decode(decoders, encoded("PNG", Image.new("RGB", (4000, 4000))))
    decoders.close()
    monkeypatch.setattr(decoding, "DECODE_BYTES", 2**30)
    check_serves(decoders)
    monkeypatch.setattr(decoding, "DECODE_S", 0.0001)
    with pytest.raises(RequestError, match=r"in 0\.0001 s"):
        decode(decoders, encoded("PNG", Image.fromarray(np.tile(PIXELS, (50, 50, 1)))))
    monkeypatch.undo()
    check_serves(decoders)
    decoders.close()


def test_an_interrupted_decoding_answers_no_later_file(decoders, monkeypatch):
    check_serves(decoders)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(ChildProcess, "read_line", interrupt)
        with pytest.raises(KeyboardInterrupt):
            decode(decoders, encoded("PNG", Image.new("RGB", (5, 5))))
    check_serves(decoders)


@pytest.mark.long
def test_processor_time_is_limited_whatever_the_wall_time():
    code = "from jaxserve.images.decoder import _within\nwith _within(0.1):\n    while True: pass"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == -signal.SIGXCPU


def test_files_above_the_size_limit_are_never_sent(decoders, monkeypatch):
    monkeypatch.setattr(decoding, "MAX_FILE_BYTES", 100)
    with pytest.raises(RequestError, match="at most 100 bytes, got"):
        decode(decoders, encoded("PNG"))
