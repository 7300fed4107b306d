"""ImageInputs: images as prompts give them, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.errors import RequestError, brief

PROMPT_KEYS = frozenset({"multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"})
IMAGE = "image"
_OTHERS = "audio and video are not supported; leave them out"


@dataclass(frozen=True)
class ImageInputs:
    """A prompt's images and their options.

    Attributes:
        images: images in the order of their placeholders: Pillow images, arrays, file contents, URLs, or None for one
            that its name finds in the cache.
        names: caller's ids for the images, None for those identified by their content.
        adjusted: `mm_processor_kwargs`.
    """

    images: Sequence[Any] = ()
    names: Sequence[str | None] = ()
    adjusted: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_prompt(cls, prompt: object) -> ImageInputs:
        """Read a prompt's images; RequestError if one of its fields is malformed."""
        if not isinstance(prompt, Mapping) or not prompt.keys() & PROMPT_KEYS:
            return NO_IMAGES
        data = _images(prompt.get("multi_modal_data"), "multi_modal_data")
        given = _images(prompt.get("multi_modal_uuids"), "multi_modal_uuids")
        images = [None] * len(_listed(given)) if data is None else _listed(data)
        names = [None] * len(images) if given is None else _listed(given)
        if len(names) != len(images) or not all(isinstance(name, str | None) for name in names):
            raise RequestError(
                f"multi_modal_uuids must have a string or None per image, got {brief(names)} for {len(images)} images"
            )
        if any(isinstance(image, list | tuple) for image in images):
            raise RequestError("an image in multi_modal_data must be an array, not nested lists; convert it with numpy")
        if any(image is None and not name for image, name in zip(images, names, strict=True)):
            raise RequestError("multi_modal_data may have None only for an image with a name in multi_modal_uuids")
        adjusted = prompt.get("mm_processor_kwargs") or {}
        if not isinstance(adjusted, Mapping) or not all(isinstance(name, str) for name in adjusted):
            raise RequestError(f"mm_processor_kwargs must be a dict, got {brief(adjusted)}")
        return cls(images, names, dict(adjusted))

    def in_prompt(self) -> dict[str, Any]:
        """Return the fields of a prompt that `from_prompt` reads."""
        names = {"multi_modal_data": {IMAGE: list(self.images)}, "multi_modal_uuids": {IMAGE: list(self.names)}}
        return {**(names if self.images else {}), "mm_processor_kwargs": self.adjusted}


NO_IMAGES = ImageInputs()


def _images(given: object, name: str) -> Any:
    """Return the entry for images in the field `name`; RequestError for other media."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise RequestError(f'{name} must be a dict, such as {{"image": ...}}, got {brief(given)}')
    if others := sorted(str(key) for key, value in given.items() if key != IMAGE and _is_given(value)):
        raise RequestError(f"{name} must have only the key {IMAGE!r}, got also {others}: {_OTHERS}")
    return given.get(IMAGE)


def _is_given(media: object) -> bool:
    """Return whether an entry has any media: arrays have no truth value."""
    return media is not None and not (isinstance(media, list | tuple | Mapping) and not media)


def _listed(images: Any) -> list[Any]:
    """Return one image, a list of them, or an array [images, ...] as a list."""
    if images is None:
        return []
    are_several = isinstance(images, list | tuple) or getattr(images, "ndim", 0) == 4
    return list(images) if are_several else [images]
