"""A device for the scheduler that knows from which tokens each entry of its pool was computed, and a loop over both."""

import dataclasses
import zlib
from typing import NamedTuple

import numpy as np

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.scheduling.executor_protocol import StepResult
from jaxserve.scheduling.kv_cache.groups import RELEASED
from jaxserve.scheduling.kv_cache.sparsity import Window
from jaxserve.scheduling.request import FinishReason, Request, RequestStatus
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_costs import Costs
from jaxserve.scheduling.step_plan import StepChoice, StepPlan, StepShape, cheapest

VOCAB_SIZE = 5
PARAMS = SamplingParams(max_tokens=None)
IGNORED = 10**6  # token that the device returns for rows that do not sample


def make_scheduler(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    page_size=4,
    num_pages=64,
    max_model_len=256,
    windows=(None,),
    num_spare_tokens=0,
    num_snapshots=None,
    eviction=None,
    tiers=(),
    max_loras=0,
    **policy_numbers,
):
    sizes = (max_num_seqs, max_num_batched_tokens, max_model_len, page_size, num_pages)
    groups = {"windows": windows, "num_snapshots": num_snapshots, "eviction": eviction}
    schedule = ScheduleConfig(*sizes, num_spare_drafts=num_spare_tokens, max_loras=max_loras, **groups)
    return Scheduler(schedule, dataclasses.replace(schedule.policy, **policy_numbers), tiers)


def make_request(request_id, prompt, max_tokens=4, *, min_tokens=0, **kwargs):
    prompt = list(prompt)
    params = PARAMS if not min_tokens else SamplingParams(max_tokens=None, min_tokens=min_tokens)
    return Request(request_id, prompt, params, seed=0, max_total_tokens=len(prompt) + max_tokens, **kwargs)


def counter_of(queue, request):
    """Service that the tenant of an unfinished request has got, all told."""
    tenant = queue._classes[request.priority].tenants[request.tenant]
    tenant.settle()
    return tenant.counter


def next_token(tokens):
    """The model: any deterministic function of all tokens before."""
    return zlib.crc32(repr(tokens).encode()) % VOCAB_SIZE


def generate_alone(request):
    """Output and reason of an undisturbed run."""
    tokens = list(request.prompt_token_ids)
    while True:
        tokens.append(next_token(tokens))
        num_output = len(tokens) - request.num_prompt_tokens
        if tokens[-1] in request.stop_ids and num_output > request.params.min_tokens:
            return tokens[request.num_prompt_tokens :], FinishReason.STOP
        if len(tokens) == request.max_total_tokens:
            return tokens[request.num_prompt_tokens :], FinishReason.LENGTH


class Row(NamedTuple):
    """A plan's columns, row by row."""

    request: Request
    slot: int
    start: int
    num_tokens: int
    max_new: int
    admitted: bool


def rows_of(plan):
    columns = zip(plan.requests, plan.slots, plan.starts, plan.counts, plan.max_new, strict=True)
    return [Row(request, *rest, request in plan.admitted) for request, *rest in columns]


class Device:
    """Runs plans in order. A pool entry holds what its content depends on: salt and tokens up to its position.

    As the compiled step, it knows by slot how long sequences are and which have stopped, and takes from a plan no more
    than that. A round with drafts computes up to `num_spare_tokens` more than it may accept: those of a tree.
    Pages of a slot are numbered from `first_page` of it on; copies have numbers of all pages.
    """

    def __init__(self, groups, num_spare_tokens=0, first_page=lambda slot: 0):
        self.groups = groups
        self.first_page = first_page
        self.num_spare_tokens = num_spare_tokens
        self.kv = {}
        self.states = {}  # slot, or minus an entry of a snapshot and one -> what the state depends on
        self.tables = {}  # slot -> salt and pages, as of its last row
        self.history = {}  # slot -> position -> token
        self.lengths = {}
        self.num_computed = 0  # tokens of sequences that had not ended
        self.stopped = set()

    def run(self, plan):
        """The sampled ids of each row."""
        self._compact(plan)
        self._copy(plan.copies)
        rows = rows_of(plan)
        for row in rows:
            if row.admitted:
                self.stopped.discard(row.slot)
                self.lengths[row.slot] = row.start
                self.history[row.slot] = dict(enumerate(row.request.tokens(0, row.request.num_known_tokens)))
            self.tables[row.slot] = row.request.salt, list(row.request.pages)
        sampled = [[] for _ in rows]
        if plan.num_drafts:
            for _ in range(plan.num_steps):
                for row, num_drafts, ids in zip(rows, plan.num_drafts, sampled, strict=True):
                    self._speculate(row, num_drafts, ids)
            return sampled
        for index in range(plan.num_steps):
            taking_part = [
                (row, ids)
                for row, ids in zip(rows, sampled, strict=True)
                if row.slot not in self.stopped and index < max(row.max_new, 1)
            ]
            now = [
                row._replace(start=self.lengths[row.slot], num_tokens=row.num_tokens if index == 0 else 1)
                for row, _ in taking_part
            ]
            self._advance_states(now, plan)
            for row, (planned, ids), token in zip(now, taking_part, self._run_step(now), strict=True):
                assert row.start <= planned.start + index, "the plan is an upper bound"
                self.lengths[row.slot] = row.start + row.num_tokens
                self.num_computed += row.num_tokens
                if row.max_new:
                    ids.append(token)
                    self._stop(row.request, row.slot, token)
        return sampled

    def _advance_states(self, rows, plan):
        """Each state goes on from its own or from a snapshot; the rows of a step may run in any order."""
        if self.groups.num_snapshots is None:
            assert not plan.restored
            assert not plan.snapshots
            return
        assert plan.num_steps == 1 or not (plan.restored or plan.snapshots)
        restored = {plan.slots[row]: -1 - entry for row, entry in plan.restored}
        kept = {plan.slots[row]: (num_tokens, -1 - entry) for row, num_tokens, entry in plan.snapshots}
        written = [entry for _, entry in kept.values()]
        assert len({*written, *restored.values()}) == len(written) + len(set(restored.values())), "read and written"
        for row in rows:
            tokens = self._sequence(row)
            source = self.states.get(restored.get(row.slot, row.slot))
            if row.start:
                assert source == (row.request.salt, tuple(tokens[: row.start])), f"{row.request.request_id}: {source}"
            self.states[row.slot] = row.request.salt, tuple(tokens)
            if row.slot in kept:
                num_tokens, entry = kept[row.slot]
                assert 0 < num_tokens <= row.num_tokens
                self.states[entry] = row.request.salt, tuple(tokens[: row.start + num_tokens])

    def _compact(self, plan):
        """Copy prompt tokens to pages after checking that all of the prompt is in the former ones."""
        sources = {source for source, _ in plan.copies}
        assert not any(sources & set(pages) for *_, pages in plan.compactions), "a page is overwritten before its copy"
        for slot, prompt, pages in plan.compactions:
            salt, former = self.tables[slot]
            for position, token in enumerate(prompt):
                column, offset = divmod(position, self.groups.page_size)
                content = 0, salt, tuple(prompt[: position + 1]), None
                assert self.kv[former[column], offset] == content, token
            for page in pages:
                self.kv |= {(page, offset): ("compacted", tuple(prompt)) for offset in range(self.groups.page_size)}

    def _copy(self, copies):
        """Copy pages, all of which are read before any is written."""
        offsets = range(self.groups.page_size)
        copied = {(to, i): self.kv[page, i] for page, to in copies for i in offsets if (page, i) in self.kv}
        self.kv.update(copied)

    def _speculate(self, planned, num_drafts, ids):
        """A round with drafts, of which some are accepted; the others leave their content behind."""
        num_drafts = max(min(num_drafts, planned.max_new - len(ids) - 1), 0)
        first = self.lengths[planned.slot]
        num_drafts = min(num_drafts, self.groups.row_end(first, planned.request.num_prompt_tokens) - first - 1)
        num_accepted = zlib.crc32(repr(self.history[planned.slot]).encode()) % (num_drafts + 1)
        for index in range(num_accepted + 1):
            if planned.slot in self.stopped or len(ids) >= planned.max_new:
                break
            row = planned._replace(start=self.lengths[planned.slot], num_tokens=1)
            assert row.start <= planned.start + len(ids), "the plan is an upper bound"
            [token] = self._run_step([row])
            self.lengths[row.slot] += 1
            ids.append(token)
            self._stop(row.request, row.slot, token)
            if index == 0:
                num_nodes = num_drafts + self.num_spare_tokens if num_drafts else 0
                end = min(row.request.max_total_tokens - 1, self.groups.row_end(first, row.request.num_prompt_tokens))
                for position in range(first + 1, min(first + 1 + num_nodes, end)):
                    for group in range(self.groups.size):
                        self.kv[self._entry(row, position, group)] = "drafted"

    def _stop(self, request, slot, token):
        num_tokens = self.lengths[slot] + 1
        may_stop = num_tokens - request.num_prompt_tokens > request.params.min_tokens
        if (token in request.stop_ids and may_stop) or num_tokens == request.max_total_tokens:
            self.stopped.add(slot)

    def _run_step(self, rows):
        sequences = [self._sequence(row) for row in rows]
        self._write(rows, sequences)  # all of them, before any row attends: the contract of the operation
        for row, tokens in zip(rows, sequences, strict=True):
            self._check_content(row, tokens)
        return [self._sample(row, tokens) for row, tokens in zip(rows, sequences, strict=True)]

    def _sequence(self, row):
        request, stop = row.request, row.start + row.num_tokens
        tokens = [self.history[row.slot][i] for i in range(stop)]
        num_known = min(stop, request.num_known_tokens)
        assert tokens[:num_known] == request.tokens(0, num_known), "the slot holds another request's tokens"
        assert row.num_tokens == 1 or num_known == stop, "only a single token may have an unknown id"
        return tokens

    def _write(self, rows, sequences):
        written = set()
        for row, tokens in zip(rows, sequences, strict=True):
            for position in range(row.start, row.start + row.num_tokens):
                for group in range(self.groups.size):
                    entry = self._entry(row, position, group)
                    assert entry not in written, f"{entry} is written twice in one step"
                    written.add(entry)
                    self.kv[entry] = self._content(row, tokens, group, position)

    def _content(self, row, tokens, group, position):
        """What keys and values depend on: with a budget, those of output tokens also on where the prompt ends."""
        num_prompt, sparsity = row.request.num_prompt_tokens, self.groups.sparsity
        if position < num_prompt <= row.start and sparsity is not None and sparsity.num_copied(num_prompt):
            return "compacted", tuple(tokens[:num_prompt])
        has_budget = self.groups.sparsity is not None and position >= num_prompt
        return group, row.request.salt, tuple(tokens[: position + 1]), num_prompt if has_budget else None

    def _check_content(self, row, tokens):
        """Every token sees all before it, in groups with a window those that it reaches, others within the budget."""
        num_prompt, sparsity, seen = row.request.num_prompt_tokens, self.groups.sparsity, range(len(tokens))
        retained = seen
        if sparsity is not None:
            assert len(tokens) <= self.groups.row_end(row.start, num_prompt), "a row's tokens see different pages"
            if row.start >= num_prompt:
                sinks, hidden = sparsity.num_sink_pages, sparsity.num_hidden(row.start, num_prompt)
                hidden = range(sinks * sparsity.page_size, (sinks + hidden) * sparsity.page_size)
                retained = [position for position in seen if position not in hidden]
                is_window = isinstance(sparsity, Window)
                counted = retained if is_window else [position for position in retained if position < num_prompt]
                assert len(counted) <= sparsity.budget
        for group, window in enumerate(self.groups.windows):
            for position in retained if window is None else seen[max(row.start - window + 1, 0) :]:
                content = self.kv.get(self._entry(row, position, group))
                expected = self._content(row, tokens, group, position)
                assert content == expected, f"{row.request.request_id} finds {content} at position {position}"

    def _sample(self, row, tokens):
        if not row.max_new:
            return IGNORED
        self.history[row.slot][len(tokens)] = token = next_token(tokens)
        return token

    def _entry(self, row, position, group):
        column, offset = divmod(position, self.groups.page_size)
        page = row.request.pages[column * self.groups.size + group]
        assert page != RELEASED
        return self.first_page(row.slot) + page, offset


class Loop:
    """Scheduler and device with `depth` plans in flight, as an engine drives them, of up to `max_steps` each.

    With drafts, slots have different numbers of them, `max_drafts` at most.
    """

    def __init__(self, scheduler, depth=0, max_steps=1, max_drafts=0, *, may_split=False, first_page=lambda slot: 0):
        self.scheduler, self.depth, self.max_steps = scheduler, depth, max_steps
        slots = range(scheduler.sizes.max_num_seqs)
        self.num_drafts = [(max_drafts + slot) % (max_drafts + 1) for slot in slots] if max_drafts else ()
        self.device = Device(
            scheduler.sizes.kv_groups, scheduler.sizes.num_spare_drafts if max_drafts else 0, first_page
        )
        self.may_split = may_split and max_steps == 1 and not max_drafts
        self.in_flight = []
        self.plans = []

    def schedule(self):
        plan = self.scheduler.schedule(StepChoice(self.max_steps, self.num_drafts, may_split=self.may_split))
        if plan is not None:
            self.in_flight.append((plan, self.device.run(plan)))
            self.plans.append(plan)
        assert plan or self.in_flight or not self.scheduler.has_unfinished(), "idle with runnable work"
        return plan

    def update(self):
        """Let the scheduler have the oldest tokens; returns how many each request got."""
        plan, sampled = self.in_flight.pop(0)
        ended = self.scheduler.update(plan, sampled)
        assert ended == [request for request in plan.requests if request in ended]
        assert all(request.status is RequestStatus.FINISHED for request in ended)
        return {request: len(token_ids) for request, token_ids in zip(plan.requests, sampled, strict=True) if token_ids}

    def step(self):
        plan = self.schedule()
        if self.in_flight and (plan is None or len(self.in_flight) > self.depth):
            self.update()
        self.scheduler.check_integrity()
        return plan

    def drain(self):
        while self.scheduler.has_unfinished() or self.in_flight:
            self.step()
        return self

    def add(self, *requests):
        for request in requests:
            self.scheduler.add(request)
        return self


class SeenTokens:
    """A constraint that allows all tokens, and knows how many it has seen."""

    def __init__(self) -> None:
        self.forced: list[int] = []
        self.error, self.has_ended, self.num_seen = "", False, 0
        self.words = np.full(1, -1, np.int32)

    def advance(self, output_token_ids):
        self.num_seen = len(output_token_ids)

    def again(self):
        return SeenTokens()


class SimulatedStep:
    """A step of a `Device`: it has run, or fails when it is read."""

    def __init__(self, plan: StepPlan, sampled: list[list[int]], launched_s: float, error: Exception | None) -> None:
        self.launched_s, self.num_compiles = launched_s, 0
        self.plan, self.is_sampled = plan, not plan.is_split
        self._sampled, self._error = sampled, error

    def is_ready(self) -> bool:
        return self.is_sampled

    def result(self) -> StepResult:
        assert self.is_sampled, "a split plan is sampled before it is read"
        if self._error is not None:
            raise self._error
        token_ids = np.zeros((len(self._sampled), max(1, *self.plan.max_new)), np.int32)
        for row, ids in zip(token_ids, self._sampled, strict=True):
            row[: len(ids)] = ids
        return StepResult(token_ids, np.array([len(ids) for ids in self._sampled], np.int32), self.launched_s)


class SimulatedExecutor:
    """An executor over a `Device`, whose clock counts steps. It fails where it is told to.

    Attributes:
        fails_at_launch: exception that the next launch raises, before it does anything.
        fails_on_device: exception that reading the next step raises; the state is lost with it.
    """

    costs = Costs(1, lambda num_tokens, num_live: num_tokens, lambda num_tokens, num_rows, num_scores: num_tokens)

    def __init__(self, schedule: ScheduleConfig, max_steps: int = 1) -> None:
        self.schedule, self._programs = schedule, schedule.shapes(max_steps)
        self.device = Device(schedule.kv_groups)
        self.fails_at_launch: Exception | None = None
        self.fails_on_device: Exception | None = None
        self._is_lost = False
        self._num_launches = 0
        self._last: SimulatedStep | None = None

    def fit(self, step: StepShape) -> StepShape | None:
        return cheapest(self._programs, step)

    def launch(self, plan: StepPlan, program: StepShape) -> SimulatedStep:
        if self.fails_at_launch is not None:
            error, self.fails_at_launch = self.fails_at_launch, None
            raise error
        self._num_launches += 1
        error, self.fails_on_device = self.fails_on_device, None
        self._is_lost |= error is not None
        if self._is_lost:  # steps behind a failed one fail with it
            sampled, error = [[0] * most for most in plan.max_new], error or RuntimeError("a step before has failed")
        else:
            sampled = self.device.run(plan)
        assert self._last is None or self._last.is_sampled or self.is_idle(self._last), "a launch ahead of a sampling"
        self._last = SimulatedStep(plan, sampled, float(self._num_launches), error)
        return self._last

    @staticmethod
    def is_idle(step: SimulatedStep) -> bool:
        """Return whether all requests of a step have ended."""
        return all(request.status is RequestStatus.FINISHED for request in step.plan.requests)

    def sample(self, step: SimulatedStep) -> int:
        assert not step.is_sampled, "a plan is sampled once"
        step.is_sampled = True
        for row in rows_of(step.plan):
            if row.request.status is not RequestStatus.FINISHED and row.request.constraint is not None:
                num_before = row.start + row.num_tokens - row.request.num_prompt_tokens
                assert row.request.constraint.num_seen == num_before, "its mask is that of another position"
        return 0

    def restore_state(self) -> bool:
        was_lost, self._is_lost = self._is_lost, False
        if was_lost:
            self.device = Device(self.schedule.kv_groups)
        return was_lost

    def close(self) -> None:
        """Nothing is held."""


def starts(plan):
    """Request id -> (start, num_tokens)."""
    return {row.request.request_id: (row.start, row.num_tokens) for row in rows_of(plan)}


def num_computed(plans):
    return sum(plan.num_tokens for plan in plans)
