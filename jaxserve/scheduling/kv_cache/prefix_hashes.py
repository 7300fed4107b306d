"""PrefixHashes: the chain of hashes by which pages are found, in whatever tier they are."""

from __future__ import annotations

from hashlib import blake2b
from struct import calcsize, pack

from jaxserve.api.token_ids import TokenIds
from jaxserve.scheduling.request import Request

DIGEST_SIZE = 16
_TOKEN_BYTES = calcsize("i")
_NEW_HASH = blake2b(digest_size=DIGEST_SIZE, person=b"page")  # a copy takes half the time of a new one


class PrefixHashes:
    """Hashes of pages, each of everything up to the page's last token.

    A page's hash covers the hash of the page before it (the salt, for the first), so that equal hashes mean equal salts
    and equal token prefixes, which is what keys and values depend on.

    Args:
        page_size: tokens per page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        # The prompt hashed last: the samples of one prompt come one after the other, and need it hashed but once.
        self._last_prompt: TokenIds = []
        self._last_salt = b""
        self._last_hashes: list[bytes] = []  # hashes of the prompt's full pages

    def full_pages(self, request: Request) -> list[bytes]:
        """Return the hashes of a request's full pages of known tokens; kept on the request, and extended with these."""
        hashes, size = request.page_hashes, self._page_size
        num_full = (len(request.prompt_token_ids) + len(request.output_token_ids)) // size
        if len(hashes) < num_full:
            if not hashes:
                hashes += self._prompt_hashes(request)
            self._extend(hashes, request, num_full)
        return hashes

    def last_page(self, request: Request, num_tokens: int) -> bytes:
        """Return the hash of the page, partly filled, that the first `num_tokens` of a request end in."""
        block, hashes = num_tokens // self._page_size, self.full_pages(request)
        previous = hashes[block - 1] if block else _root_hash(request.salt)
        return _page_hash(previous, _packed(request.tokens(block * self._page_size, num_tokens)))

    def _prompt_hashes(self, request: Request) -> list[bytes]:
        """Hashes of the full pages of the request's prompt; computed once for requests in a row with one prompt."""
        prompt, salt = request.prompt_token_ids, request.salt
        if salt != self._last_salt or (prompt is not self._last_prompt and prompt != self._last_prompt):
            self._last_prompt, self._last_salt, self._last_hashes = prompt, salt, []
            self._extend(self._last_hashes, request, len(prompt) // self._page_size)
        return self._last_hashes

    def _extend(self, hashes: list[bytes], request: Request, num_pages: int) -> None:
        """Hash the request's pages that follow those of `hashes`, up to `num_pages` in all."""
        previous = hashes[-1] if hashes else _root_hash(request.salt)
        first, size = len(hashes), self._page_size
        token_ids = _packed(request.tokens(first * size, num_pages * size))
        size *= _TOKEN_BYTES
        for start in range(0, (num_pages - first) * size, size):
            previous = _page_hash(previous, token_ids[start : start + size])
            hashes.append(previous)


def _root_hash(salt: bytes) -> bytes:
    # Hashed under another personalisation than pages: no salt that a user chooses can pose as a page's hash.
    return blake2b(salt, digest_size=DIGEST_SIZE, person=b"salt").digest()


def _packed(token_ids: TokenIds) -> bytes:
    return pack(f"{len(token_ids)}i", *token_ids)


def _page_hash(previous: bytes, token_ids: bytes) -> bytes:
    page_hash = _NEW_HASH.copy()
    page_hash.update(previous + token_ids)
    return page_hash.digest()
