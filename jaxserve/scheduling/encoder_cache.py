"""EncoderCache: which images' embeddings are on the devices, where, and which images a plan encodes.

The device array has a row per embedding, allocated in blocks. Before a step, the vision tower encodes the images that
the step's tokens need and that are not cached; content and salt identify an image, so that one that appears again, also
in another request, is encoded once. A request holds an image from the plan that computes its first token to the plan
after the one that computes its last; an image that nobody holds stays until others need its blocks, the least recently
used first.

Limits. A chunk ends before an image that cannot be encoded in this plan: because its blocks are held, or because the
plan's encoder runs would cost more than the tokens that a plan may have. A run costs as many tokens as have its FLOPs,
padding included, so that runs delay decoding rows by no more than a step. A plan may always encode one image whose
run costs no more than a step. Nobody starves: a row that waits for an image has passed all earlier ones and holds none,
and a row that holds an image can compute its tokens.

Parts. While rows decode, an image whose run costs more than a step is encoded in parts, each with as many of the
tower's layers as the plan can pay for, or one. There is one such image at a time, and tenants take turns. If its part
leaves no budget for another request's smaller images, these have the next plan.

Whole images. If tokens of an image see the whole image, one step computes them: a chunk ends before an image that it
does not hold, and is extended to hold one that it begins with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import RequestError
from jaxserve.images.prepared import ImageSpan, PreparedImage
from jaxserve.scheduling.request import Request, RequestStatus
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.step_plan import EncoderRun

BLOCK_ROWS = 16  # embeddings per block

ImageKey = tuple[bytes, bytes]  # digest and salt


@dataclass(slots=True, eq=False)
class _Entry:
    """A cached image."""

    blocks: list[int]
    rows: NDArray[np.int32]
    num_holders: int = 0


@dataclass(slots=True, eq=False)
class _Job:
    """An image that is encoded in parts, held until a request holds it."""

    request: Request
    image: PreparedImage
    entry: _Entry
    num_layers: int
    """Layers computed in plans so far."""


class EncoderCache:
    """Rows of the devices' encoder cache.

    Args:
        num_rows: capacity in embeddings; 0 without images.
        max_whole: maximum tokens of an image that one step computes whole; None if chunks may split images.
        sizes: sizes of a shard's steps, and costs of encoder runs; None to count an image's embeddings.

    Attributes:
        num_rows: capacity in embeddings.
        unsent: runs in plans that had no rows, for the next plan.
    """

    def __init__(
        self,
        num_rows: int,
        max_whole: int | None = None,
        sizes: ScheduleConfig | None = None,
    ) -> None:
        self._max_whole = max_whole
        self._costs = () if sizes is None else sizes.encoder_costs
        self._budget = 0 if sizes is None else sizes.max_num_batched_tokens
        self._num_layers = 1 if sizes is None else sizes.num_encoder_layers
        self._sizes_in_parts = frozenset(() if sizes is None else sizes.sizes_in_parts)
        self.num_rows = num_rows // BLOCK_ROWS * BLOCK_ROWS
        self.restart()

    def restart(self) -> None:
        """Forget all images, after a failure."""
        self._free = list(range(self.num_rows // BLOCK_ROWS - 1, -1, -1))
        self._entries: dict[ImageKey, _Entry] = {}  # the least recently held first
        self._forgotten: list[_Entry] = []  # entries that requests hold, and that no other request may find
        self._passed: list[tuple[Request, int]] = []  # images whose last tokens the current plan computes
        self._num_encoded = 0  # cost of the current plan's encoder runs, in tokens
        self.unsent: list[EncoderRun] = []
        self._job: _Job | None = None
        self._decode_waits = False  # True if decoding rows wait for the current plan's step
        self._yields = False  # True if a part has left too little budget to other images
        self._waiting: list[tuple[Request, PreparedImage]] = []  # images to encode in parts
        self._turns: dict[str, int] = {}  # tenant -> number of its last job
        self._num_jobs = 0

    def check_fits(self, request: Request) -> None:
        """Raise RequestError if one of a request's images is larger than the cache."""
        largest = max((span.image.num_embeddings for span in request.images), default=0)
        if largest > self.num_rows:
            raise RequestError(
                f"an image may have at most {self.num_rows} tokens, the size of the encoder cache, got {largest}; "
                "take a smaller image or raise encoder_cache_size"
            )
        longest = max((span.end - span.first for span in request.images), default=0)
        if self._max_whole is not None and longest > self._max_whole:
            raise RequestError(
                f"a step must hold an image, whose tokens see each other, and each other row's token: at most "
                f"{self._max_whole} tokens, got {longest}; raise max_num_batched_tokens or lower max_num_seqs"
            )

    def cost(self, image: PreparedImage) -> int:
        """Return the cost of encoding an image, in tokens of the text model."""
        costs = (cost for size, cost in self._costs if len(image.patches) <= size)
        return next(costs, image.num_embeddings)

    def begin_plan(self) -> None:
        """Release the images whose last tokens the previous plan has computed."""
        for request, index in self._passed:
            if index in request.image_rows:
                self._release(request, index)
        self._passed.clear()
        self._num_encoded = 0

    def advance(self, num_tokens: int, max_tokens: int, *, decode_waits: bool) -> list[EncoderRun]:
        """Return the runs with which the current plan continues an image that is encoded in parts.

        Args:
            num_tokens: tokens of decoding rows in the plan.
            max_tokens: maximum other tokens, so that these rows meet their deadlines.
            decode_waits: True if decoding rows wait for the plan's step; otherwise the image is finished.
        """
        runs, self.unsent = self.unsent, []
        self._waiting.clear()
        self._decode_waits, yields, self._yields = decode_waits, self._yields and decode_waits, False
        job = self._job
        if job is not None and (job.request.status is RequestStatus.FINISHED or job.image in _held(job.request)):
            self._end_job()
            return runs
        has_no_row = decode_waits and not num_tokens  # decoding rows are all in plans in flight
        if job is None or self._is_complete(job) or yields or has_no_row:
            return runs
        start, cost = job.num_layers, -(-self.cost(job.image) // self._num_layers)
        budget = min(self._budget - num_tokens, max_tokens)
        count = max(budget // cost, 1) if decode_waits else self._num_layers
        job.num_layers = min(start + count, self._num_layers)
        self._num_encoded += cost * (job.num_layers - start)
        layers, is_last = (start, job.num_layers), self._is_complete(job)
        return [*runs, EncoderRun(job.image, job.entry.rows, layers, is_last)]

    def begin_next(self) -> list[EncoderRun]:
        """Complete the current plan: return the run that prepares for the next image that is encoded in parts."""
        job = self._job
        if not self._waiting or (job is not None and not self._is_complete(job)):
            return []
        request, image = min(self._waiting, key=lambda each: self._turns.get(each[0].tenant, 0))
        if job is not None:  # its request could not start
            self._end_job()
        num_blocks = _num_blocks(image.num_embeddings)
        if num_blocks > self._num_available:
            return []
        entry = self._new_entry(image)
        entry.num_holders = 1
        self._entries[image.digest, request.salt] = entry
        self._job = _Job(request, image, entry, 0)
        self._num_jobs += 1
        self._turns[request.tenant] = self._num_jobs
        return [EncoderRun(image, entry.rows, (0, 0), is_last=False)]

    def _is_complete(self, job: _Job) -> bool:
        """Return whether plans have encoded the whole image."""
        return job.num_layers == self._num_layers

    def _end_job(self) -> None:
        """Stop holding the image that is encoded in parts; drop it if it is incomplete."""
        job, self._job = self._job, None
        assert job is not None, "it is ended once"
        job.entry.num_holders -= 1
        if not self._is_complete(job):
            del self._entries[job.image.digest, job.request.salt]
            self._free += job.entry.blocks

    def num_computable(
        self, request: Request, start: int, num_tokens: int, max_encoded: int, max_tokens: int | None = None
    ) -> int:
        """Return how many of a request's next `num_tokens` tokens the current plan can compute, given its images.

        Args:
            request: running request, or one that starts.
            start: its first token to compute.
            num_tokens: tokens wanted.
            max_encoded: maximum cost of the plan's encoder runs in tokens, except for its first image.
            max_tokens: maximum tokens, to hold an image that must be whole; None for `num_tokens`.
        """
        if not request.images or not num_tokens:
            return num_tokens
        stop = start + num_tokens
        if self._max_whole is not None:
            stop = _without_parts(request, start, stop, start + max(num_tokens, max_tokens or 0))
        num_encoded, num_blocks = self._num_encoded, self._num_available
        for index, span in _touched(request, start, stop):
            if index in request.image_rows:
                continue
            size, entry = span.image.num_embeddings, self._entries.get(_key(request, span))
            num_blocks -= _num_blocks(size) if entry is None or not entry.num_holders else 0
            cost = self.cost(span.image) if entry is None else 0
            is_short = num_blocks < 0 or bool(cost and num_encoded and num_encoded + cost > max_encoded)
            if entry is None and self._decode_waits and self._has_parts(span.image):
                self._waiting.append((request, span.image))
                is_short = True
            elif is_short and self._job is not None:
                self._yields = True
            if is_short or (self._job is not None and entry is self._job.entry and not self._is_complete(self._job)):
                stop = max(span.first, start)
                break
            num_encoded += cost
        return max(stop - start, 0)

    def compute(self, request: Request, start: int, stop: int) -> list[EncoderRun]:
        """Hold the images of tokens that the current plan computes; return those that it must encode first.

        Args:
            request: running request.
            start: its first token in the plan.
            stop: token after the last one in the plan.
        """
        if not request.images:
            return []
        runs, touched = list[EncoderRun](), _touched(request, start, stop)
        new = [(index, span) for index, span in touched if index not in request.image_rows]
        # First those that are cached, whose blocks the others could take.
        for index, span in sorted(new, key=lambda each: _key(request, each[1]) not in self._entries):
            runs += self._hold(request, index, span)
        self._passed += [(request, index) for index, span in touched if stop >= span.end]
        return runs

    def stop(self, request: Request) -> None:
        """Release the images of a request that no longer runs."""
        for index in list(request.image_rows):
            self._release(request, index)

    @property
    def _num_available(self) -> int:
        """Blocks that are free or whose images nobody holds."""
        return len(self._free) + sum(len(each.blocks) for each in self._entries.values() if not each.num_holders)

    def _hold(self, request: Request, index: int, span: ImageSpan) -> list[EncoderRun]:
        """Hold an image for a request; return the run that encodes it if it is not cached."""
        key = _key(request, span)
        entry, runs = self._entries.pop(key, None), list[EncoderRun]()
        if entry is None:
            entry = self._new_entry(span.image)
            runs.append(EncoderRun(span.image, entry.rows))
            self._num_encoded += self.cost(span.image)
        self._entries[key] = entry
        entry.num_holders += 1
        request.image_rows[index] = entry.rows
        return runs

    def _has_parts(self, image: PreparedImage) -> bool:
        """Return whether an image's encoder run costs more than a step."""
        sizes = (size for size, _ in self._costs if len(image.patches) <= size)
        return next(sizes, 0) in self._sizes_in_parts

    def _new_entry(self, image: PreparedImage) -> _Entry:
        """Return an entry with blocks for an image."""
        blocks = self._take(_num_blocks(image.num_embeddings))
        rows = np.add.outer(np.array(blocks) * BLOCK_ROWS, np.arange(BLOCK_ROWS)).ravel()[: image.num_embeddings]
        return _Entry(blocks, rows.astype(np.int32))

    def _take(self, num_blocks: int) -> list[int]:
        """Return free blocks, after dropping images that nobody holds until there are enough."""
        idle = iter([key for key, entry in self._entries.items() if not entry.num_holders])
        while len(self._free) < num_blocks:
            self._free += self._entries.pop(next(idle)).blocks
        return [self._free.pop() for _ in range(num_blocks)]

    def _release(self, request: Request, index: int) -> None:
        """Stop holding an image for a request."""
        rows, entry = request.image_rows.pop(index), self._entries.get(_key(request, request.images[index]))
        if entry is None or entry.rows is not rows:
            entry = next(each for each in self._forgotten if each.rows is rows)
        entry.num_holders -= 1
        if entry in self._forgotten:
            self._drop_forgotten()

    def forget(self) -> None:
        """Forget all images, as after a change of weights; requests keep those that they hold."""
        if self._job is not None:
            self._end_job()
        self.unsent.clear()
        self._forgotten += self._entries.values()
        self._entries.clear()
        self._drop_forgotten()

    def _drop_forgotten(self) -> None:
        """Free the blocks of forgotten images that nobody holds."""
        for entry in [each for each in self._forgotten if not each.num_holders]:
            self._forgotten.remove(entry)
            self._free += entry.blocks

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Assert that blocks are conserved and that each image is held by the running requests that have its rows."""
        entries = [*self._entries.values(), *self._forgotten]
        blocks = [*self._free, *(block for entry in entries for block in entry.blocks)]
        assert sorted(blocks) == list(range(self.num_rows // BLOCK_ROWS)), f"blocks are lost or shared: {blocks}"
        held = [id(rows) for request in running for rows in request.image_rows.values()]
        held += [] if self._job is None else [id(self._job.entry.rows)]
        counts = {id(entry.rows): entry.num_holders for entry in entries if entry.num_holders}
        assert counts == Counter(held), f"images are held {Counter(held)}, counted as {counts}"
        for request in running:
            for index, rows in request.image_rows.items():
                entry = self._entries.get(_key(request, request.images[index]))
                known = [each.rows for each in [entry, *self._forgotten] if each is not None]
                assert any(each is rows for each in known), f"{request.request_id} has another image's rows"


def _key(request: Request, span: ImageSpan) -> ImageKey:
    """Return the key of a request's image: requests with different salts share nothing."""
    return span.image.digest, request.salt


def _held(request: Request) -> list[PreparedImage]:
    """Return the images that a request holds."""
    return [request.images[index].image for index in request.image_rows]


def _num_blocks(num_rows: int) -> int:
    """Return the blocks for a number of embeddings."""
    return -(-num_rows // BLOCK_ROWS)


def _touched(request: Request, start: int, stop: int) -> list[tuple[int, ImageSpan]]:
    """Return a request's images that have embeddings among its tokens [start, stop), with their indices."""
    return [(index, span) for index, span in enumerate(request.images) if span.first < stop and start < span.end]


def _without_parts(request: Request, start: int, stop: int, limit: int) -> int:
    """Return the end of a chunk that holds no part of an image: `stop`, or the image's first token or its end.

    Args:
        request: the request.
        start: the chunk's first token; if it is inside an image, the tokens before it are cached.
        stop: its wanted end.
        limit: its maximum end.
    """
    for _, span in _touched(request, start, stop):
        if stop < span.end:
            return span.first if span.first > start else span.end if span.end <= limit else start
    return stop
