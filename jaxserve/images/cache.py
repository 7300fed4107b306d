"""Prepared images in host memory: a cache, so that the same image is decoded and resized once, and a limit for all."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable

from jaxserve.images.prepared import PreparedImage

Picture = tuple[PreparedImage, ...]  # an image, followed by its crops


class ImageCache:
    """Least recently used prepared images. Thread-safe.

    Args:
        max_bytes: maximum size of all; 0 keeps none.

    Attributes:
        num_bytes: size of all.
        num_queries: number of images sought so far.
        num_hits: number of those that were found.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._images: OrderedDict[Hashable, Picture] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = self.num_queries = self.num_hits = 0

    def get(self, key: Hashable) -> Picture | None:
        with self._lock:
            self.num_queries += 1
            if (picture := self._images.get(key)) is not None:
                self._images.move_to_end(key)
                self.num_hits += 1
            return picture

    def clear(self) -> None:
        with self._lock:
            self._images.clear()
            self.num_bytes = 0

    def put(self, key: Hashable, picture: Picture) -> None:
        """Keep a picture, and drop those used least recently, as many as the limit demands."""
        num_bytes = _num_bytes(picture)
        with self._lock:
            if num_bytes > self._max_bytes or key in self._images:
                return
            self._images[key] = picture
            self.num_bytes += num_bytes
            while self.num_bytes > self._max_bytes:
                _, dropped = self._images.popitem(last=False)
                self.num_bytes -= _num_bytes(dropped)


def _num_bytes(picture: Picture) -> int:
    """Return a picture's bytes, all images together."""
    return sum(image.num_bytes for image in picture)


class LivingImages:
    """Size of all prepared images that a request or a cache still has. Thread-safe.

    Attributes:
        num_bytes: their size.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._lock = threading.RLock()  # an image may be freed while its size is added

    def add(self, image: PreparedImage) -> None:
        """Count an image until it is freed."""
        self._count(image.num_bytes)
        weakref.finalize(image, self._count, -image.num_bytes).atexit = False

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
