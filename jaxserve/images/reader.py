"""ImageReader: a model's images, from prompts with placeholders to spans of expanded prompts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.errors import BusyError, ConfigError, RequestError, brief, error_at, install_extra
from jaxserve.images.cache import ImageCache, LivingImages, Picture
from jaxserve.images.deadline import Deadline
from jaxserve.images.decoding import MAX_PIXELS, Decoders
from jaxserve.images.inputs import ImageInputs
from jaxserve.images.loading import ImageSources
from jaxserve.images.placeholders import Placeholders, TokenIds
from jaxserve.images.prepared import EncodedPrompt, ImageSpan, PreparedImage
from jaxserve.images.processor import DIGEST_SIZE, ImageProcessor, as_rgb, image_from_array
from jaxserve.images.processor_files import replaced

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

MIN_LIVING_BYTES = 2**30  # for prepared images of unfinished requests, in addition to the cache
PROMPT_S = 60.0  # limits the loading and decoding of all files of a prompt
_MAX_PROCESSORS = 16  # kept for different mm_processor_kwargs


@dataclass(frozen=True)
class ImageOptions:
    """Options for images.

    Attributes:
        max_images: maximum number of images per prompt.
        cache_bytes: size of prepared images that are kept.
        adjusted: `mm_processor_kwargs` for all requests.
        sources: allowed sources of files.
    """

    max_images: int = 999
    cache_bytes: int = 4 * 2**30
    adjusted: Mapping[str, Any] = field(default_factory=dict)
    sources: ImageSources = field(default_factory=ImageSources)


class ImageReader:
    """Reads the images of prompts, on any thread.

    Args:
        new_processor: function from `mm_processor_kwargs` to the model's image processor.
        placeholders: the model's tokens for images.
        options: options.

    Attributes:
        placeholders: the model's tokens for images.
        options: options.
        cache: prepared images.
        living: size of these, and of those that unfinished requests have.
    """

    def __init__(
        self,
        new_processor: Callable[[Mapping[str, Any]], ImageProcessor],
        placeholders: Placeholders,
        options: ImageOptions,
    ) -> None:
        self.placeholders, self.options, self._new_processor = placeholders, options, new_processor
        self.cache, self.living = ImageCache(options.cache_bytes), LivingImages()
        self._max_living_bytes = MIN_LIVING_BYTES + 2 * options.cache_bytes
        self._decoders = Decoders()
        self._processors: dict[str, ImageProcessor] = {}
        self._lock = threading.Lock()
        self._processor({})  # a checkpoint's error is one of the start

    def expand(
        self,
        token_ids: TokenIds,
        inputs: ImageInputs,
        namespace: str = "",
        check_len: Callable[[int], None] = lambda num_tokens: None,
    ) -> tuple[TokenIds, tuple[ImageSpan, ...]]:
        """Return a prompt in which each image has all its tokens, and its prepared images.

        Args:
            token_ids: prompt.
            inputs: its images.
            namespace: salt; callers with different ones never find each other's images by name.
            check_len: function that raises an error if a prompt with so many tokens cannot be served; it is called
                before the first image is read, and after each.

        Raises:
            RequestError: an image cannot be read, or there is another number of placeholders.
        """
        placeholders = self.placeholders
        if not inputs.images and placeholders.token_id not in token_ids:
            if inputs.adjusted:
                self._processor(inputs.adjusted)
            return token_ids, ()
        placeholders.check_count(token_ids, len(inputs.images))
        num_tokens, pictures = len(token_ids), list[Picture]()
        check_len(num_tokens)
        is_expanded = token_ids.count(placeholders.token_id) > len(inputs.images)
        for picture in self._each(inputs, namespace):
            pictures.append(picture)
            num_tokens += 0 if is_expanded else sum(len(placeholders.tokens(image)[0]) for image in picture) - 1
            check_len(num_tokens)
        counts = [len(picture) - 1 for picture in pictures]
        has_crops = any(counts) and not is_expanded
        if isinstance(token_ids, EncodedPrompt):
            token_ids = token_ids.encode(counts) if has_crops else list(token_ids)
        elif has_crops:
            token_ids = placeholders.with_crops(token_ids, counts)
        return placeholders.expand(token_ids, list(chain.from_iterable(pictures)))

    def prepare(self, inputs: ImageInputs, namespace: str = "") -> list[PreparedImage]:
        """Return a prompt's images for the tower, each followed by its crops; see `expand`."""
        return list(chain.from_iterable(self._each(inputs, namespace)))

    def _each(self, inputs: ImageInputs, namespace: str) -> Iterator[Picture]:
        """Yield a prompt's images for the tower, each with its crops; see `expand`."""
        if len(inputs.images) > self.options.max_images:
            raise RequestError(
                f"a prompt must have at most {self.options.max_images} images, got {len(inputs.images)}; the engine's "
                "limit_mm_per_prompt allows more"
            )
        if inputs.images and find_spec("PIL") is None:
            raise RequestError(f"images in a prompt need Pillow; {install_extra('images')}")
        processor, deadline = self._processor(inputs.adjusted), Deadline(PROMPT_S)
        own: dict[bytes, int] = {}
        for number, (image, name) in enumerate(zip(inputs.images, inputs.names, strict=True), 1):
            try:
                picture = self._prepare(processor, image, name, namespace, deadline, sum(own.values()))
            except RequestError as error:
                raise error_at(f"image {number} of the prompt", error) from error
            own |= {each.digest: each.num_bytes for each in picture}
            yield picture

    def close(self) -> None:
        """End the decoding processes."""
        self._decoders.close()

    def _processor(self, adjusted: Mapping[str, Any]) -> ImageProcessor:
        """Return the image processor for a request's `mm_processor_kwargs`; RequestError if they are not supported."""
        try:
            key = json.dumps(adjusted, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise RequestError(f"mm_processor_kwargs must be JSON values, got {brief(adjusted)}") from error
        with self._lock:
            if (known := self._processors.get(key)) is not None:
                return known
        try:
            processor = self._new_processor(replaced(self.options.adjusted, adjusted))
        except ConfigError as error:
            if not adjusted:
                raise
            raise RequestError(str(error)) from error
        with self._lock:
            if len(self._processors) >= _MAX_PROCESSORS:
                del self._processors[next(key for key in self._processors if key != "{}")]
            return self._processors.setdefault(key, processor)

    def _prepare(
        self,
        processor: ImageProcessor,
        given: Any,
        name: str | None,
        namespace: str,
        deadline: Deadline,
        own_bytes: int,
    ) -> Picture:
        """Return one image for the tower, with its crops, from the cache if it is there.

        Args:
            processor: its preprocessing.
            given: a Pillow image, an array, the content of a file, a URL, or None for one that was given before.
            name: caller's id, which stands for its content; None without.
            namespace: see `expand`.
            deadline: time limit for the prompt's images.
            own_bytes: bytes that the prompt's earlier images take.
        """
        if name:
            key: Hashable = (processor.key, namespace, name)
        else:
            given = self._loaded(given, deadline)
            key = (processor.key, _content_key(given))
        if (known := self.cache.get(key)) is not None:
            return known
        if given is None:
            raise RequestError(f"must be sent again, as the cache has none with the name {brief(name)}")
        self._check_memory(own_bytes)
        with self._opened(self._loaded(given, deadline), deadline) as image:
            pixels, size = processor.fit(image), (image.height, image.width)
        picture = processor.prepare_all(pixels, size)
        for prepared in picture:
            self.living.add(prepared)
        self.cache.put(key, picture)
        return picture

    def _check_memory(self, own_bytes: int) -> None:
        """Raise BusyError if unfinished requests have so many images that another one must wait for them.

        Args:
            own_bytes: bytes of images in the same prompt, which would wait for itself: it gets a plain RequestError.
        """
        if self.living.num_bytes <= self._max_living_bytes:
            return
        self.cache.clear()
        if own_bytes > self._max_living_bytes:
            raise RequestError(
                f"needs too much memory after the ones before it: they take {own_bytes} bytes, and all unfinished "
                f"requests' images may take {self._max_living_bytes}; send fewer, or raise mm_processor_cache_gb"
            )
        if self.living.num_bytes > self._max_living_bytes:
            raise BusyError(
                f"must wait, as those of unfinished requests take {self.living.num_bytes} bytes, and may take "
                f"{self._max_living_bytes}; try again, or raise mm_processor_cache_gb"
            )

    def _loaded(self, given: Any, deadline: Deadline) -> Any:
        """Return the file that a URL names, a Pillow image whose file is read, or another image unchanged."""
        if hasattr(given, "getexif"):
            if given.width * given.height > MAX_PIXELS:
                raise RequestError(f"must have at most {MAX_PIXELS} pixels, got {given.width} x {given.height}")
            try:
                given.load()
            except (OSError, ValueError, SyntaxError) as error:  # its file is read only now
                raise RequestError(f"must be readable, but: {error}") from error
        return self.options.sources.load(given, deadline) if isinstance(given, str) else given

    @contextmanager
    def _opened(self, given: Any, deadline: Deadline) -> Iterator[Image]:
        """Yield an image as RGB: decoded in another process if it is a file's content."""
        from PIL import Image as pillow  # noqa: N813, PLC0415 - an extra

        if isinstance(given, bytes):
            with self._decoders.decoded(given, deadline) as image:
                yield image
        elif isinstance(given, pillow.Image):
            yield _converted(given)
        else:
            yield image_from_array(_array(given))


def _converted(given: Image) -> Image:
    """Return a Pillow image as RGB; RequestError if its own fields, such as a transparent colour, prevent it."""
    try:
        return as_rgb(given)
    except (OSError, SyntaxError, TypeError, ValueError) as error:
        raise RequestError(f"must be convertible to RGB, but: {error}") from error


def _array(given: Any) -> NDArray[np.generic]:
    """Return an array of numpy, jax or torch as numpy's; RequestError for anything else."""
    if not hasattr(given, "__array__"):
        raise RequestError(
            "must be a Pillow image, an array [rows, columns, channels], the bytes of a file or a URL, got "
            f"{type(given).__name__}"
        )
    return np.asarray(given)


def _content_key(given: Any) -> bytes:
    """Return a digest of an image's content."""
    digest = blake2b(digest_size=DIGEST_SIZE)
    if isinstance(given, bytes):
        digest.update(b"file")
        digest.update(given)
    elif hasattr(given, "getexif"):
        orientation = given.getexif().get(0x0112)
        transparency = given.info.get("transparency")
        digest.update(repr((given.mode, given.size, orientation, given.getpalette(), transparency)).encode())
        digest.update(given.tobytes())
    else:
        array = np.ascontiguousarray(_array(given))
        digest.update(repr((array.shape, array.dtype.str)).encode())
        digest.update(array.tobytes())
    return digest.digest()
