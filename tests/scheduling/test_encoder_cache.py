"""The encoder cache in random runs: each token reads its own embedding, and images are encoded once."""

import random
from typing import Any

import numpy as np
import pytest

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.errors import RequestError
from jaxserve.images.prepared import ImageSpan, PreparedImage
from jaxserve.scheduling.deadlines import Deadlines
from jaxserve.scheduling.encoder_cache import BLOCK_ROWS, EncoderCache
from jaxserve.scheduling.kv_cache.page_events import BlocksStored, PageEvents
from jaxserve.scheduling.request import FinishReason, Request
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.scheduler import Scheduler

NUM_ROWS, NUM_LAYERS = 4 * BLOCK_ROWS, 8
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "max_model_len": 160, "page_size": 4, "num_pages": 60}


def image(seed: int, size: int) -> PreparedImage:
    return PreparedImage(bytes([seed]) * 16, np.zeros((size, 0), np.float32), (1, size), size)


def request(request_id: str, parts: list[int | PreparedImage], num_tokens: int = 3, **options: Any) -> Request:
    """Return a request whose prompt has, for each part, an image or a number of text tokens."""
    ids, spans = list[int](), list[ImageSpan]()
    for part in parts:
        if isinstance(part, PreparedImage):
            spans.append(ImageSpan(part, len(ids), np.arange(part.num_embeddings, dtype=np.int32)))
            ids += [0] * part.num_embeddings
        else:
            ids += [1 + len(ids) % 7] * part
    params = SamplingParams(max_tokens=num_tokens)
    return Request(request_id, ids, params, 0, len(ids) + num_tokens, images=tuple(spans), **options)


class Device:
    """Rows of the encoder cache as the devices have them, and the plans' encoder runs."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[bytes, int]] = {}
        self.runs: list[bytes] = []
        self.begun: tuple[bytes, int] | None = None  # image that is encoded in parts, and its layers so far

    def run(self, plan: Any) -> None:
        """Encode a plan's images; assert that each of its tokens of an image finds its embedding."""
        for run in plan.encoder_runs:
            if run.layers == (0, 0):
                self.begun = (run.image.digest, 0)
            elif run.layers is not None:
                assert self.begun == (run.image.digest, run.layers[0])
                self.begun = (run.image.digest, run.layers[1])
            if not run.is_last:
                continue
            assert run.layers is None or run.layers[1] == NUM_LAYERS
            self.runs.append(run.image.digest)
            self.rows.update({row: (run.image.digest, index) for index, row in enumerate(run.rows.tolist())})
        for each, start, count in zip(plan.requests, plan.starts, plan.counts, strict=True):
            for number, span in enumerate(each.images):
                for index, position in enumerate(span.positions.tolist()):
                    if start <= position < start + count:
                        row = int(each.image_rows[number][index])
                        assert self.rows[row] == (span.image.digest, index)


def drain(scheduler: Scheduler, device: Device, max_plans: int = 400) -> None:
    """Run plans until all requests have ended; assert that each plan makes progress."""
    for _ in range(max_plans):
        if not scheduler.has_unfinished():
            return
        step(scheduler, device)
    raise AssertionError("requests starve")


def step(scheduler: Scheduler, device: Device) -> Any:
    """Run one plan."""
    plan = scheduler.schedule()
    assert plan is not None, "no plan is in flight, so that one can be made"
    device.run(plan)
    scheduler.update(plan, [[9] * count for count in plan.max_new])
    scheduler.check_integrity()
    return plan


@pytest.mark.parametrize("sees_images", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_find_their_embeddings(seed: int, sees_images: bool) -> None:
    """Also the last token of a prompt, in a step of its own if other rows leave it a single token."""
    rng, device = random.Random(seed), Device()
    sizes = SIZES | {"max_num_batched_tokens": 40 if sees_images or seed % 2 else 5}
    costs: dict[str, Any] = {"encoder_costs": ((10, 7), (35, 90)), "num_encoder_layers": NUM_LAYERS}
    options = {"sees_images": sees_images, **(costs if seed > 1 else {})}
    scheduler = Scheduler(ScheduleConfig(**sizes, num_encoder_rows=NUM_ROWS, **options))
    for number in range(24):
        parts: list[int | PreparedImage] = []
        for _ in range(rng.randrange(4)):
            kind = rng.randrange(8)
            parts += [rng.randrange(3), image(kind, 3 + 4 * kind)]
        salt = rng.choice([b"", b"other"])
        parts += [] if parts and rng.randrange(2) else [rng.randrange(1, 30)]
        scheduler.add(request(str(number), parts, salt=salt))
        for _ in range(rng.randrange(3)):
            if scheduler.has_unfinished():
                plan = step(scheduler, device)
                if sees_images:
                    for each, start, count in zip(plan.requests, plan.starts, plan.counts, strict=True):
                        assert all(not span.first < start + count < span.end for span in each.images)
                if rng.randrange(12) == 0:
                    scheduler.reset_prefix_cache()
                if rng.randrange(6) == 0 and plan.requests[0].status.name != "FINISHED":
                    scheduler.finish(plan.requests[0].request_id, FinishReason.ABORT)
    drain(scheduler, device)


def test_images_are_encoded_once_per_salt() -> None:
    scheduler, device = Scheduler(ScheduleConfig(**SIZES, num_encoder_rows=NUM_ROWS)), Device()
    for number, salt in enumerate([b"a", b"a", b"b", b"a"]):
        scheduler.add(request(str(number), [2 + number, image(1, 20), 3, image(1, 20), 1], salt=salt))
        drain(scheduler, device)
    assert len(device.runs) == 2
    scheduler.reset_prefix_cache()
    scheduler.add(request("again", [3, image(1, 20), 1], salt=b"a"))
    drain(scheduler, device)
    assert len(device.runs) == 3


def test_other_requests_do_not_find_forgotten_images() -> None:
    """After a change of weights a running request keeps its image, and others encode it again."""
    sizes = SIZES | {"max_num_batched_tokens": 8}
    scheduler, device = Scheduler(ScheduleConfig(**sizes, num_encoder_rows=NUM_ROWS)), Device()
    scheduler.add(request("first", [1, image(1, 20), 1]))
    step(scheduler, device)
    scheduler.reset_prefix_cache()
    scheduler.check_integrity()
    scheduler.add(request("second", [3, image(1, 20), 1]))
    drain(scheduler, device)
    scheduler.add(request("third", [4, image(1, 20), 1]))
    drain(scheduler, device)
    assert len(device.runs) == 2


@pytest.mark.parametrize("sees_images", [False, True])
def test_large_images_are_encoded_in_parts_while_rows_decode(sees_images: bool) -> None:
    """A step has at most a budget of encoder work, all rows that decode, and of each tenant's images in turn."""
    sizes = SIZES | {"max_num_batched_tokens": 40, "max_num_seqs": 8, "num_pages": 400}
    options = {"encoder_costs": ((8, 3), (30, 200)), "num_encoder_layers": NUM_LAYERS, "sees_images": sees_images}
    scheduler, device = Scheduler(ScheduleConfig(**sizes, num_encoder_rows=4 * NUM_ROWS, **options)), Device()
    scheduler.add(request("alone", [3, image(99, 25), 2], num_tokens=1))
    assert [run.layers for run in step(scheduler, device).encoder_runs] == [None]
    scheduler.add(decoding := request("decoding", [2], num_tokens=100))
    step(scheduler, device)
    for number in range(3):
        scheduler.add(request(f"a {number}", [2, image(number, 24), 2], num_tokens=1, tenant="a"))
    scheduler.add(request("b", [image(10, 24)], num_tokens=1, tenant="b"))
    scheduler.add(request("ended", [image(11, 24)], num_tokens=1, tenant="c"))
    scheduler.add(request("small", [1, image(12, 3), 40, image(13, 2), 20, image(14, 4), 2], tenant="c"))
    num_steps, begun = 0, list[bytes]()
    while scheduler.num_waiting or scheduler.num_running > 1:
        plan = step(scheduler, device)
        assert decoding in plan.requests
        parts = [run for run in plan.encoder_runs if run.layers not in (None, (0, 0))]
        costs = [-(-200 // NUM_LAYERS) * (run.layers[1] - run.layers[0]) for run in parts]
        costs += [scheduler.encoder.cost(run.image) for run in plan.encoder_runs if run.layers is None]
        assert sum(costs) <= 40 or len(costs) == 1
        begun += [run.image.digest for run in plan.encoder_runs if run.layers == (0, 0)]
        if begun and begun[-1] == bytes([11]) * 16 and device.begun and device.begun[1] and not num_steps:
            num_steps = 1
            scheduler.finish("ended", FinishReason.ABORT)
    assert [digest[0] for digest in begun] in ([0, 10, 11, 1, 2], [0, 11, 10, 1, 2])
    assert {digest[0] for digest in device.runs} >= {0, 1, 2, 10, 12, 13, 14}
    assert num_steps
    scheduler.finish("decoding", FinishReason.ABORT)
    scheduler.check_integrity()


@pytest.mark.parametrize("costs", [(), ((4, 3), (24, 11))], ids=["embeddings", "tokens"])
def test_encoder_runs_share_a_step(costs: tuple[tuple[int, int], ...]) -> None:
    """A plan's encoder runs cost no more than a step has tokens; but it may always encode one image.

    Decoding rows are in each plan, so that they wait for no more than that.
    """
    sizes, options = SIZES | {"max_num_batched_tokens": 12}, {"num_encoder_rows": NUM_ROWS, "encoder_costs": costs}
    scheduler, device = Scheduler(ScheduleConfig(**sizes, **options)), Device()
    scheduler.add(decoding := request("decoding", [2], num_tokens=100))
    for number in range(3):
        scheduler.add(request(str(number), [1, image(number, 20), 1, image(10 + number, 3), 1, image(20 + number, 4)]))
    num_shared = 0
    while scheduler.num_waiting or scheduler.num_running > 1:
        plan = step(scheduler, device)
        assert decoding in plan.requests
        cost = sum(scheduler.encoder.cost(run.image) for run in plan.encoder_runs)
        assert cost <= 12 or len(plan.encoder_runs) == 1
        num_shared += len(plan.encoder_runs) > 1
    assert len(device.runs) == 9
    assert num_shared
    scheduler.finish("decoding", FinishReason.ABORT)


def test_whole_images_beyond_a_deadline_take_the_others_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image may exceed the tokens that deadlines leave to prompts; then no other prompt gets any in this step."""
    monkeypatch.setattr(Deadlines, "max_prefill_tokens", lambda *_: 6)
    scheduler, device = Scheduler(ScheduleConfig(**SIZES, num_encoder_rows=NUM_ROWS, sees_images=True)), Device()
    scheduler.add(request("image", [2, image(1, 20), 3]))
    step(scheduler, device)
    for number in range(2):
        scheduler.add(request(f"text {number}", [8]))
    assert step(scheduler, device).counts == [20]
    assert step(scheduler, device).counts == [3, 3]
    drain(scheduler, device)


def test_no_shard_waits_forever_for_a_step_that_others_fill() -> None:
    """Shards share the embeddings that a step encodes; each has requests all the time."""
    sizes = SIZES | {"max_num_batched_tokens": 48, "max_num_seqs": 8, "num_pages": 400}
    scheduler = Scheduler(ScheduleConfig(**sizes, num_encoder_rows=4 * NUM_ROWS, num_data_shards=2))
    device, num_added, added_at = Device(), 0, dict[str, int]()
    for number in range(40):
        while len(scheduler.running) + scheduler.num_waiting < 8:
            prompt: list[int | PreparedImage] = [image(num_added, 20 if num_added % 2 else 14), 1]
            scheduler.add(request(str(num_added), prompt, arrival=num_added))
            added_at[str(num_added)] = number
            num_added += 1
        plan = step(scheduler, device)
        for each in plan.requests:
            assert number - added_at[each.request_id] < 20
    assert all(shard.ledger.running for shard in scheduler.shards)


def test_images_that_never_fit_are_refused() -> None:
    with pytest.raises(RequestError, match="at most 64 tokens, the size of the encoder cache, got 65"):
        EncoderCache(NUM_ROWS).check_fits(request("0", [image(1, 65)]))
    with pytest.raises(RequestError, match="at most 36 tokens, got 40; raise max_num_batched_tokens"):
        EncoderCache(NUM_ROWS, 36).check_fits(request("0", [image(1, 40)]))


def test_events_name_the_images_in_blocks() -> None:
    """Each with the index of its first token minus that of the block, as vLLM's extra keys."""
    events = PageEvents(4)
    scheduler = Scheduler(ScheduleConfig(**SIZES, num_encoder_rows=NUM_ROWS), events=events)
    scheduler.add(request("0", [3, image(1, 6), image(2, 2), 6]))
    drain(scheduler, Device())
    stored = [event for event in events.take() if isinstance(event, BlocksStored)]
    one, two = bytes([1]) * 16, bytes([2]) * 16
    found = [each for event in stored for each in event.images]
    assert found == [[(one, 3)], [(one, -1)], [(one, -5), (two, 1)], []]
