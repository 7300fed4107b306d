"""ImageCache: prepared images in host memory, so that the same image is decoded and resized once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

from jaxserve.images.prepared import PreparedImage


class ImageCache:
    """Least recently used prepared images. Thread-safe.

    Args:
        max_bytes: maximum size of all; 0 keeps none.

    Attributes:
        num_bytes: size of all.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._images: OrderedDict[Hashable, PreparedImage] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def get(self, key: Hashable) -> PreparedImage | None:
        with self._lock:
            if (image := self._images.get(key)) is not None:
                self._images.move_to_end(key)
            return image

    def put(self, key: Hashable, image: PreparedImage) -> None:
        """Keep an image, and drop those used least recently, as many as the limit demands."""
        with self._lock:
            if image.num_bytes > self._max_bytes or key in self._images:
                return
            self._images[key] = image
            self.num_bytes += image.num_bytes
            while self.num_bytes > self._max_bytes:
                _, dropped = self._images.popitem(last=False)
                self.num_bytes -= dropped.num_bytes
