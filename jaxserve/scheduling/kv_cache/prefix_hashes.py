"""PrefixHashes: the hash chain by which pages are found in any tier."""

from __future__ import annotations

from hashlib import blake2b
from struct import calcsize, pack
from typing import NamedTuple

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.token_ids import TokenIds
from jaxserve.images.prepared import ImageSpan
from jaxserve.scheduling.request import Request

DIGEST_SIZE = 16
_TOKEN_BYTES = calcsize("i")
_NEW_HASH = blake2b(digest_size=DIGEST_SIZE, person=b"page")  # copying takes half the time of creating


class CachedSequence(NamedTuple):
    """Tokens of a sequence, and all that its pages depend on.

    Attributes:
        token_ids: its tokens.
        salt: prefix cache namespace.
        images: images in it; they need no patches.
        adapter: digest of the LoRA adapter; empty for the base model.
        adapter_start: first token with the adapter.
    """

    token_ids: TokenIds
    salt: bytes
    images: tuple[ImageSpan, ...] = ()
    adapter: str = ""
    adapter_start: int = 0


class PrefixHashes:
    """Page hashes, each covering all tokens up to the page's last one.

    A page's hash also covers the previous page's hash (the salt, for the first page); the first page that has a token
    with an adapter covers the adapter and that token's index; a page with tokens of images covers these images and
    their indices. Equal hashes thus mean equal salts, token prefixes, adapters and images, on which keys and values
    depend.

    Args:
        page_size: tokens per page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        # The latest prompt: samples for one prompt arrive in sequence, and hash it only once.
        self._last_prompt: TokenIds = []
        self._last_key: tuple[object, ...] = (b"", "", 0, ())
        self._last_hashes: list[bytes] = []  # its full pages' hashes

    def full_pages(self, request: Request) -> list[bytes]:
        """Return the hashes of a request's full pages with known tokens, which are also kept in `page_hashes`."""
        hashes, size = request.page_hashes, self._page_size
        num_full = (len(request.prompt_token_ids) + len(request.output_token_ids)) // size
        if len(hashes) < num_full:
            if not hashes:
                hashes += self._prompt_hashes(request)
            self._extend(hashes, request, num_full)
        return hashes

    def sequence_pages(self, sequence: CachedSequence) -> list[bytes]:
        """Return the hashes of a sequence's full pages."""
        fields = sequence._asdict()
        token_ids = fields.pop("token_ids")
        request = Request("", token_ids, SamplingParams(), 0, len(token_ids) + 1, **fields)
        return self.full_pages(request)[: len(token_ids) // self._page_size]

    def last_page(self, request: Request, num_tokens: int) -> bytes:
        """Return the hash of the partly filled page that holds token `num_tokens - 1`."""
        block, hashes = num_tokens // self._page_size, self.full_pages(request)
        previous = hashes[block - 1] if block else _salt_hash(request.salt)
        previous = self._with_adapter(previous, request, block, num_tokens)
        previous = _with_images(previous, self._named_images(request, block, block + 1).get(block))
        return _page_hash(previous, _packed(request.tokens(block * self._page_size, num_tokens)))

    def _prompt_hashes(self, request: Request) -> list[bytes]:
        """Return the hashes of a prompt's full pages, computed once for consecutive requests with the same prompt."""
        prompt, key = request.prompt_token_ids, (request.salt, request.adapter, request.adapter_start, _images(request))
        if key != self._last_key or (prompt is not self._last_prompt and prompt != self._last_prompt):
            self._last_prompt, self._last_key, self._last_hashes = prompt, key, []
            self._extend(self._last_hashes, request, len(prompt) // self._page_size)
        return self._last_hashes

    def _extend(self, hashes: list[bytes], request: Request, num_pages: int) -> None:
        """Append hashes for the request's next pages, up to `num_pages` in all."""
        previous = hashes[-1] if hashes else _salt_hash(request.salt)
        first, size = len(hashes), self._page_size
        token_ids = _packed(request.tokens(first * size, num_pages * size))
        size *= _TOKEN_BYTES
        images = self._named_images(request, first, num_pages)
        for index in range(num_pages - first):
            if request.adapter:
                block = first + index
                previous = self._with_adapter(previous, request, block, (block + 1) * self._page_size)
            previous = _with_images(previous, images.get(first + index))
            previous = _page_hash(previous, token_ids[index * size : (index + 1) * size])
            hashes.append(previous)

    def _with_adapter(self, previous: bytes, request: Request, block: int, num_tokens: int) -> bytes:
        """Return the hash before a page, which covers the adapter if the page is the first that has a token with it.

        Args:
            previous: hash of the previous page, or of the salt.
            request: the request.
            block: index of the page.
            num_tokens: number of tokens up to the page's last one.
        """
        start = request.adapter_start
        if not request.adapter or block != start // self._page_size or num_tokens <= start:
            return previous
        # Two requests may have the same tokens in a page, some generated, and begin their adapters at different ones.
        named = request.adapter.encode() + pack("i", start)
        return blake2b(previous + named, digest_size=DIGEST_SIZE, person=b"lora").digest()

    def _named_images(self, request: Request, first: int, end: int) -> dict[int, bytes]:
        """Return the digests of a request's images, each with the index of its first token, by page with such tokens.

        Args:
            request: the request.
            first: index of the first page.
            end: index after the last page.
        """
        named: dict[int, bytes] = {}
        for digest, start, stop in _images(request):
            for block in range(max(first, start // self._page_size), min(end, -(-stop // self._page_size))):
                named[block] = named.get(block, b"") + digest + pack("i", start)
        return named


def _with_images(previous: bytes, named: bytes | None) -> bytes:
    """Return the hash before a page, which covers the images that have tokens in it: see `_named_images`."""
    return previous if named is None else blake2b(previous + named, digest_size=DIGEST_SIZE, person=b"image").digest()


def _images(request: Request) -> tuple[tuple[bytes, int, int], ...]:
    """Return each image's digest, and the indices of its first token and after its last."""
    return tuple((span.image.digest, span.first, span.end) for span in request.images)


def _salt_hash(salt: bytes) -> bytes:
    """Return the hash of a salt, which precedes the first page's."""
    # Its personalisation differs from a page's, so that no chosen salt can imitate a page hash.
    return blake2b(salt, digest_size=DIGEST_SIZE, person=b"salt").digest()


def _packed(token_ids: TokenIds) -> bytes:
    """Return token ids as int32 bytes."""
    return pack(f"{len(token_ids)}i", *token_ids)


def _page_hash(previous: bytes, token_ids: bytes) -> bytes:
    """Return the hash of a page with these packed token ids, after the page with hash `previous`."""
    page_hash = _NEW_HASH.copy()
    page_hash.update(previous + token_ids)
    return page_hash.digest()
