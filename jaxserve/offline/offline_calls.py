"""Calls: requests in one offline call, from prompts to outputs, on the engine's threads."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from numbers import Integral
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from jaxserve.api.lora_request import LoRARequest
from jaxserve.errors import BusyError, RequestError, brief, error_at

if TYPE_CHECKING:
    from jaxserve.api.outputs import RequestOutput
    from jaxserve.api.pooling_params import PoolingParams
    from jaxserve.api.sampling_params import SamplingParams
    from jaxserve.assembly.engine import Engine
    from jaxserve.core.growing_outputs import RequestGroup
    from jaxserve.core.prompt import Prompt
    from jaxserve.core.threads import EngineThreads

ProgressBar = Callable[..., Any]  # tqdm, or a factory such as functools.partial(tqdm, leave=False)
Adapters = LoRARequest | Sequence[LoRARequest | None] | None  # one for all prompts, or one per prompt
P = TypeVar("P")


class Calls:
    """Blocking calls that serve lists of prompts.

    Args:
        engine: engine that reads the prompts.
        threads: threads that drive the engine.
    """

    def __init__(self, engine: Engine, threads: EngineThreads) -> None:
        self._engine, self._threads = engine, threads
        self._ids = itertools.count()

    def run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | PoolingParams],
        use_tqdm: bool | ProgressBar,
        priorities: Sequence[int] = (),
        lora_requests: Sequence[LoRARequest | None] = (),
        *,
        shares_last_page: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts and return their outputs in the same order.

        Args:
            prompts: prompts.
            params: parameters per prompt.
            use_tqdm: see `LLM.generate`.
            priorities: class per prompt; empty for 0.
            lora_requests: LoRA adapter per prompt; empty for the base model.
            shares_last_page: see `Request`.

        Raises:
            RequestError: a prompt or its parameters cannot be served; no prompt is started, unless their images are too
                many for host memory, so that some prompts must end before others are read.
        """
        read = self._reader(prompts, params, priorities, lora_requests, shares_last_page=shares_last_page)
        with _Running(self._engine, self._threads, len(prompts), use_tqdm) as running:
            outputs = [running.add(partial(read, index)) for index in range(len(prompts))]
            running.queue()
            running.finish()
        return outputs

    def prepare(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | PoolingParams],
        priorities: Sequence[int] = (),
        lora_requests: Sequence[LoRARequest | None] = (),
        *,
        shares_last_page: bool = False,
    ) -> list[RequestGroup]:
        """Read prompts, and return their requests without queueing them; see `run`.

        Raises:
            RequestError: a prompt or its parameters cannot be served; the message names it.
        """
        read = self._reader(prompts, params, priorities, lora_requests, shares_last_page=shares_last_page)
        return [read(index) for index in range(len(prompts))]

    def _reader(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | PoolingParams],
        priorities: Sequence[int],
        lora_requests: Sequence[LoRARequest | None],
        *,
        shares_last_page: bool,
    ) -> Callable[[int], RequestGroup]:
        """Return a function that reads the prompt at an index; see `prepare`."""
        self._engine.host.check_serve()
        columns = prompts, params, priorities or [0] * len(prompts), lora_requests or [None] * len(prompts)
        rows = list(zip(*columns, strict=True))

        def read(index: int) -> RequestGroup:
            prompt, p, priority, adapter = rows[index]
            options: dict[str, Any] = {"priority": priority, "lora_request": adapter}
            try:
                return self._engine.reader.read(
                    str(next(self._ids)), prompt, p, shares_last_page=shares_last_page, **options
                )
            except RequestError as error:
                raise error_at(f"prompt {index}" if len(rows) > 1 else "", error) from None

        return read

    def cancel(self, groups: Sequence[RequestGroup]) -> None:
        """End requests that are still unfinished."""
        for group in groups:
            self._engine.frontend.cancel(group.request_id)


def progress_bar(use_tqdm: bool | ProgressBar, **options: Any) -> Any:
    """Return a progress bar with these tqdm options; see `LLM.generate`."""
    from tqdm import tqdm  # noqa: PLC0415 - few calls of a server or of `stream` need it

    new_bar = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)
    return new_bar(**options)


class _Running:
    """A call's requests: queued together, or as soon as others have ended whose images take too much host memory.

    Args:
        engine: the engine.
        threads: threads that drive it.
        count: number of requests.
        use_tqdm: see `LLM.generate`.
    """

    def __init__(self, engine: Engine, threads: EngineThreads, count: int, use_tqdm: bool | ProgressBar) -> None:
        self._engine, self._threads = engine, threads
        self._count, self._use_tqdm = count, use_tqdm
        self._read: list[RequestGroup] = []  # not yet queued
        self._queued: dict[str, RequestGroup] = {}  # unfinished: others are dropped, as they have images
        self._ended: SimpleQueue[RequestGroup] = SimpleQueue()
        self._tokens_in = self._tokens_out = 0
        self._started_s = 0.0
        self._stack = ExitStack()

    def __enter__(self) -> _Running:
        return self

    def __exit__(self, *error: object) -> None:
        """Close the progress bar; end unfinished requests, which an interrupted call must not leave in the engine."""
        self._stack.close()
        for request_id in self._queued:
            self._engine.frontend.cancel(request_id)

    def add(self, read: Callable[[], RequestGroup]) -> RequestOutput:
        """Read a request, perhaps after earlier ones have ended, and return its output."""
        while True:
            try:
                group = read()
            except BusyError:
                if not (self._read or self._queued):
                    raise
                self.queue()
                self._wait()
            else:
                self._read.append(group)
                return group.output

    def finish(self) -> None:
        """Wait until all queued requests have ended; raise a request's error."""
        while self._queued:
            self._wait()

    def queue(self) -> None:
        """Queue the requests that were read since the last call."""
        groups, self._read = self._read, []
        self._queued |= {group.request_id: group for group in groups}
        self._threads.submit(groups, lambda group: self._ended.put(group) if group.output.finished else None)
        _ = self._bar

    def _wait(self) -> None:
        """Wait until a request has ended, and show it; raise its error."""
        group = self._ended.get()
        if self._queued.pop(group.request_id, None) is None:  # an interrupt can lead to a second notification
            return
        group.check_served()
        self._tokens_in += len(group.output.prompt_token_ids)
        self._tokens_out += sum(len(o.token_ids) for o in group.output.outputs)
        seconds = time.monotonic() - self._started_s
        rates = f"in {self._tokens_in / seconds:.0f} tok/s, out {self._tokens_out / seconds:.0f} tok/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update()

    @cached_property
    def _bar(self) -> Any:
        """Progress bar, from the first queued request on."""
        title = "Generating" if self._engine.arch.pooler is None else "Pooling"
        self._started_s = time.monotonic()
        return self._stack.enter_context(progress_bar(self._use_tqdm, total=self._count, desc=title, unit="req"))


def as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Return one prompt, or several in an ordered iterable, as a list of prompts; a list of ids is one prompt.

    Raises:
        RequestError: it is neither a prompt nor an ordered iterable, such as a generator or a table column.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    many = listed(prompts)
    if many is None:
        raise RequestError(
            "prompts must be text, token ids, a dict, or such prompts in order (a list, a generator, a column of a "
            f"table), got {brief(prompts)}"
        )
    return [many] if many and isinstance(many[0], Integral) else many


def listed(values: object) -> list[Any] | None:
    """Return the items in an ordered iterable as Python values; None for anything else.

    Columns of pandas, numpy, pyarrow, polars and datasets count, and so do generators; a table does not, because it
    iterates over column names.
    """
    if isinstance(values, list):
        return values
    if isinstance(values, str | bytes | bytearray | Mapping | Set) or hasattr(values, "columns"):
        return None
    for name in ("tolist", "to_pylist", "to_list"):
        if callable(method := getattr(values, name, None)):
            found = method()
            return found if isinstance(found, list) else None  # an array without dimensions is a number
    return list(values) if isinstance(values, Iterable) else None


def per_prompt(params: P | Iterable[P], kind: type[P], name: str, count: int) -> list[P]:
    """Return one parameter object per prompt; RequestError unless there is one for all or one for each."""
    if isinstance(params, kind):
        return [params] * count
    many = listed(params)
    if many is None or not all(isinstance(p, kind) for p in many):
        raise RequestError(f"{name} must be {kind.__name__}(...), or a list of them, got {brief(params)}")
    if len(many) != count:
        raise RequestError(f"{name} must be one for all or one per prompt, got {len(many)} for {count}")
    return list(many)


def lora_requests(adapters: Adapters, count: int) -> list[LoRARequest | None]:
    """Return one adapter per prompt, None for the base model; RequestError unless there is one for all or for each.

    An adapter for all is read again at most once.
    """
    if adapters is None or isinstance(adapters, LoRARequest):
        return [adapters, *[as_loaded(adapters)] * (count - 1)][:count]
    many = listed(adapters)
    if many is None or len(many) != count or not all(isinstance(each, LoRARequest | None) for each in many):
        raise RequestError(
            f"lora_request must be a LoRARequest or None for all prompts, or a list with one for each of {count}, got "
            f"{brief(adapters)}"
        )
    return many


def as_loaded(adapter: LoRARequest | None) -> LoRARequest | None:
    """Return an adapter for further requests, which need not read it again."""
    return adapter and replace(adapter, load_inplace=False)


def priorities(priority: int | Iterable[int] | None, count: int) -> list[int]:
    """Return one class per prompt; RequestError unless there is one for all or one for each."""
    if priority is None or (isinstance(priority, Integral) and not isinstance(priority, bool)):
        return [int(priority or 0)] * count
    many = listed(priority)
    if many is None or len(many) != count:
        raise RequestError(
            f"priority must be one integer for all prompts or a list with one for each of {count}, got "
            f"{brief(priority)}"
        )
    return many
