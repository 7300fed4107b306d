"""Calls: requests in one offline call, from prompts to outputs, on the engine's threads."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from numbers import Integral
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from jaxserve.api.lora_request import LoRARequest
from jaxserve.errors import RequestError, brief

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
            RequestError: a prompt or its parameters cannot be served; no prompt is started.
        """
        groups = self.prepare(prompts, params, priorities, lora_requests, shares_last_page=shares_last_page)
        ended: SimpleQueue[RequestGroup] = SimpleQueue()
        try:
            self._threads.submit(groups, lambda group: ended.put(group) if group.output.finished else None)
            _wait(ended, len(groups), use_tqdm, "Generating" if self._engine.arch.pooler is None else "Pooling")
        finally:  # an interrupted call must not leave requests in the engine
            self.cancel(groups)
        return [group.output for group in groups]

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
        self._engine.host.check_serve()
        read = partial(self._engine.reader.read, shares_last_page=shares_last_page)
        groups = []
        columns = prompts, params, priorities or [0] * len(prompts), lora_requests or [None] * len(prompts)
        for index, (prompt, p, priority, adapter) in enumerate(zip(*columns, strict=True)):
            try:
                groups.append(read(str(next(self._ids)), prompt, p, priority=priority, lora_request=adapter))
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None
        return groups

    def cancel(self, groups: Sequence[RequestGroup]) -> None:
        """End requests that are still unfinished."""
        for group in groups:
            self._engine.frontend.cancel(group.request_id)


def progress_bar(use_tqdm: bool | ProgressBar, **options: Any) -> Any:
    """Return a progress bar with these tqdm options; see `LLM.generate`."""
    from tqdm import tqdm  # noqa: PLC0415 - few calls of a server or of `stream` need it

    new_bar = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)
    return new_bar(**options)


def _wait(ended: SimpleQueue[RequestGroup], count: int, use_tqdm: bool | ProgressBar, title: str) -> None:
    """Wait until `count` requests have been put in the queue, and show a progress bar; raise a request's error."""
    tokens_in = tokens_out = 0
    started = time.monotonic()
    with progress_bar(use_tqdm, total=count, desc=title, unit="req") as bar:
        seen: set[str] = set()
        while len(seen) < count:
            group = ended.get()
            if group.request_id in seen:  # an interrupt can lead to a second notification
                continue
            seen.add(group.request_id)
            group.check_served()
            tokens_in += len(group.output.prompt_token_ids)
            tokens_out += sum(len(o.token_ids) for o in group.output.outputs)
            seconds = time.monotonic() - started
            rates = f"in {tokens_in / seconds:.0f} tok/s, out {tokens_out / seconds:.0f} tok/s"
            bar.set_postfix_str(rates, refresh=False)
            bar.update()


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
