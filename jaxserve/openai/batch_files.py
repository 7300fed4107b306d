"""Batch files: OpenAI's batch format, JSON lines in, JSON lines out, restartable at any moment.

Each input line is a request and each output line its record, in order of completion; a record's `id` contains
the line number. The output file is the only state (`batch_output.py`): however a run ends, the next one resumes it.

Restarts are reproducible: a request without a seed gets one from (run seed, line, prompt), so its samples equal an
uninterrupted run's. A record's `request_id` is a fingerprint for its input line and the run seed; an output file for
another input or seed is refused before it is modified.

Memory besides the requests in flight, for a million lines: 8 MB at start to compare fingerprints, then a bit per line
and about 80 MB for hashes of custom_ids, to find duplicates. Blank lines are skipped and have no record.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from jaxserve.api.config import EngineConfig
from jaxserve.api.outputs import RequestFailure, RequestOutput
from jaxserve.api.schema import one_of
from jaxserve.core.batch_engine import BatchEngine
from jaxserve.core.prompt import check_bound, check_len
from jaxserve.errors import PeerLostError, RequestError, brief
from jaxserve.openai.batch_lines import DUPLICATE, claim_id, derived_seed, parse_line
from jaxserve.openai.batch_output import (
    BatchOutput,
    DoneLines,
    fingerprint_of,
    make_record,
    numbered_lines,
)
from jaxserve.openai.batch_paths import check_output, open_input
from jaxserve.openai.batch_progress import BatchProgress
from jaxserve.openai.context import BodyContext, allow_any
from jaxserve.openai.errors import BadRequestError, Json, as_bad_request, error_body
from jaxserve.openai.fields import ANY, BodyField, BodyReader, each, needed
from jaxserve.openai.format import CHAT, COMPLETIONS, EMBEDDINGS, ParsedRequest
from jaxserve.openai.interfaces import INTERFACES, parse
from jaxserve.openai.replies import system_fingerprint

if TYPE_CHECKING:
    from jaxserve.offline.llm import LLM

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_LINE_FIELDS = {**each(ANY, "custom_id", "url", "body"), "method": needed(BodyField(one_of(("POST",), words='"POST"')))}


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """Numbers of records in a batch's output file, and of tokens in its last run.

    Attributes:
        num_records: records in the output file.
        num_errors: records of failed requests.
        num_resumed: records from earlier runs.
        prompt_tokens: prompt tokens in this run.
        completion_tokens: generated tokens in this run.
        elapsed_s: duration of this run in seconds.
    """

    num_records: int
    num_errors: int
    num_resumed: int
    prompt_tokens: int
    completion_tokens: int
    elapsed_s: float


@dataclass(slots=True)
class _Line:
    """Input line whose request is being served.

    Attributes:
        number: line number from 1.
        custom_id: the client's name for the request.
        fingerprint: hash of line and run seed.
        request: parsed request.
        outputs: finished outputs by prompt index.
        failed: True once the line has an error record.
    """

    number: int
    custom_id: str
    fingerprint: str
    request: ParsedRequest
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    failed: bool = False


@dataclass(slots=True)
class _LinePrompt:
    """Prompt number `index` of a line's request, waiting or in the engine."""

    line: _Line
    index: int


def run_batch(
    engine: "BatchEngine | LLM",
    in_path: str | Path,
    out_path: str | Path,
    *,
    seed: int | None = None,
    model_names: Sequence[str] = (),
    max_in_flight: int | None = None,
    urls: Sequence[str] = (COMPLETIONS, CHAT, EMBEDDINGS),
    on_record: Callable[[int, int], None] = lambda num_records, num_errors: None,
    context: BodyContext | None = None,
    adapt: Callable[[ParsedRequest], ParsedRequest] = lambda request: request,
    patience_s: float = 0.0,
    use_tqdm: bool = True,
) -> BatchSummary:
    """Serve every line of `in_path` that has no record in `out_path` yet.

    However it ends, the same call resumes from `out_path`, and no requests remain in the engine.

    Args:
        engine: an `LLM`, or a fleet of engines.
        in_path: a regular file with OpenAI batch requests to /v1/completions, /v1/chat/completions and /v1/embeddings.
        out_path: output file; created, or resumed if it exists.
        seed: seed for requests without one; None takes the engine's.
        model_names: accepted values for a request's `model`, the first being the default. If empty, any name is
            accepted for the loaded model, so that a file written for another service runs.
        max_in_flight: maximum number of sequences in the engine; None is three times `max_num_seqs` over all replicas,
            enough to keep them full while some requests wait for another's prefix. A request with more sequences runs
            when there are no others.
        urls: values that `url` may have in a line.
        on_record: function called after each record with the numbers of records and of errors.
        context: context for bodies, in place of `model_names` and the engine's.
        adapt: function from a line's request to the served one; a RequestError fails the line.
        patience_s: maximum time that a line waits for what the engine's other callers use, such as memory for images,
            while no line of the batch is in flight.
        use_tqdm: True to show progress on stderr: a bar on a terminal, elsewhere a line every 30 s.

    Raises:
        ConfigError: a file is not usable, or the output belongs to another input or is being written by another
            process.
    """
    engine = engine if isinstance(engine, BatchEngine) else engine.batch_engine()
    config: EngineConfig = engine.config
    key = _hash_key(config.seed if seed is None else seed)
    with _open_files(in_path, out_path, key) as (lines, out, done), contextlib.ExitStack() as stack:
        num_rows = engine.schedule.max_num_seqs * config.data_parallel_size
        run = _BatchRun(
            engine=engine,
            out=out,
            done=done,
            key=key,
            context=_context(engine, model_names) if context is None else replace(context, may_stream=False),
            fingerprint=system_fingerprint(config),
            window=3 * num_rows if max_in_flight is None else max_in_flight,
            urls=tuple(urls),
            on_record=on_record,
            adapt=adapt,
            patience_s=patience_s,
            progress=stack.enter_context(BatchProgress(done, is_wanted=use_tqdm)),
        )
        stack.callback(run.abort)
        return run.run(lines)


def find_finished(in_path: str | Path, out_path: str | Path, seed: int) -> BatchSummary | None:
    """Return a batch's summary if every line has a record; None if lines are left to serve.

    This needs no engine: a finished batch does not start one, and unusable files fail immediately.

    Raises:
        ConfigError: as `run_batch`.
    """
    open_input(Path(in_path)).close()
    check_output(Path(out_path), Path(in_path))
    if not Path(out_path).exists():  # not created here, since the engine may fail to start
        return None
    with _open_files(in_path, out_path, _hash_key(seed)) as (_, out, done):
        if done.num_records < done.num_lines:
            return None
        return BatchSummary(out.num_records, out.num_errors, done.num_records, 0, 0, 0.0)


def _context(engine: BatchEngine, model_names: Sequence[str]) -> BodyContext:
    """Return the context for reading bodies without a server; `model_names` as in `run_batch`."""
    tokenizer, config = engine.tokenizer, engine.config
    check = partial(check_bound, tokenizer=tokenizer, schedule=engine.schedule) if tokenizer is not None else allow_any
    return BodyContext(
        model_names[0] if model_names else config.model or config.model_path.name,
        tuple(model_names),
        tokenizer,
        engine.default_sampling_params,
        check_prompt=check,
        check_len=partial(check_len, schedule=engine.schedule),
        max_model_len=engine.schedule.max_model_len,
        adapters=getattr(engine, "adapters", ()),
        images=getattr(engine, "images", None),
    )


@contextlib.contextmanager
def _open_files(
    in_path: str | Path, out_path: str | Path, key: bytes
) -> Iterator[tuple[IO[bytes], BatchOutput, DoneLines]]:
    """Open and check a batch's files for the run seed in `key`; yield input, output and the lines with a record."""
    with open_input(Path(in_path)) as lines:
        check_output(Path(out_path), Path(in_path))
        with BatchOutput(Path(out_path)) as out:
            yield lines, out, out.resume(lines, key)


def _hash_key(seed: int) -> bytes:
    """Return a run's seed as the hash key for fingerprints and derived seeds."""
    return str(seed).encode()


@dataclass(slots=True)
class _BatchRun:
    """Run of a batch: it adds requests to the engine up to a maximum number of sequences, and writes their records.

    Attributes:
        engine: engine that serves the requests.
        out: output file.
        done: lines that had a record when the run began.
        key: hash key from the run seed.
        context, urls, on_record, adapt, patience_s: arguments of `run_batch`.
        fingerprint: name of the engine's configuration.
        window: maximum number of sequences in flight.
        progress: display of the progress.
        in_flight: prompts in the engine by request id.
        num_sequences: number of sequences in flight.
        prompt_tokens: prompt tokens so far.
        completion_tokens: generated tokens so far.
    """

    engine: BatchEngine
    out: BatchOutput
    done: DoneLines
    key: bytes
    context: BodyContext
    fingerprint: str
    window: int
    urls: tuple[str, ...]
    on_record: Callable[[int, int], None]
    adapt: Callable[[ParsedRequest], ParsedRequest]
    patience_s: float
    progress: BatchProgress
    in_flight: dict[str, _LinePrompt] = field(default_factory=dict)
    num_sequences: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def run(self, lines: IO[bytes]) -> BatchSummary:
        """Serve every input line that has no record yet, and return the numbers of this run."""
        start_s = time.monotonic()
        queue = self._prompts(lines)
        waiting = next(queue, None)
        while waiting or self.in_flight:
            while waiting and (not self.in_flight or self.num_sequences + waiting.line.request.params.n <= self.window):
                self._admit(waiting)
                waiting = next(queue, None)
            if self.in_flight:
                self._wait()
            rate = self.completion_tokens / (time.monotonic() - start_s + 1e-9)
            self.progress.note(f"{rate:.0f} tok/s, {self.out.num_errors} failed")
        return BatchSummary(
            num_records=self.out.num_records,
            num_errors=self.out.num_errors,
            num_resumed=self.done.num_records,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            elapsed_s=time.monotonic() - start_s,
        )

    def abort(self) -> None:
        """Abort all requests in flight."""
        for request_id in self.in_flight:
            self.engine.abort(request_id)
        self.in_flight.clear()

    def _prompts(self, lines: IO[bytes]) -> Iterator[_LinePrompt]:
        """Yield the prompts of all lines without a record, in input order; write error records for invalid lines."""
        seen: set[int] = set()
        for number, raw in numbered_lines(lines):
            custom_id: Any = None
            request: ParsedRequest | None = None
            try:
                content = parse_line(raw)
                custom_id = content.get("custom_id")
                claim_id(custom_id, seen)
                if number in self.done:
                    continue
            except Exception as error:  # any failure becomes the line's error record
                failure: Exception | None = error
            else:
                request, failure = self._attempt(partial(self._parse, content))
            if request is not None:
                line = _Line(number, custom_id, fingerprint_of(raw, self.key), request)
                yield from (_LinePrompt(line, index) for index in range(len(request.prompts)))
            elif failure is not None and number not in self.done:
                fingerprint, line_error = fingerprint_of(raw, self.key), _line_error(number, failure)
                is_duplicate = isinstance(line_error, BadRequestError) and line_error.code == DUPLICATE
                self._write_error(number, None if is_duplicate else custom_id, fingerprint, line_error)

    def _parse(self, content: Json) -> ParsedRequest:
        """Return the request to serve for a line's JSON object."""
        url = BodyReader().read(content, _LINE_FIELDS, "the line").get("url")
        if url not in self.urls:
            message = f"url must be {' or '.join(self.urls)}, got {brief(url)}"
            raise BadRequestError(message, "url", "invalid_url")
        return self.adapt(parse(url, content.get("body"), self.context))

    def _admit(self, prompt: _LinePrompt) -> None:
        """Add a prompt to the engine; if that fails, fail its line."""
        line, index = prompt.line, prompt.index
        if line.failed:
            return
        request_id, request, params = f"batch-{line.number}-{index}", line.request, line.request.params
        if params.seed is None:
            params = replace(params, seed=derived_seed(self.key, line.number, index))
        wanted = request.pooling or params
        own = {} if request.adapter is None else {"adapter": request.adapter}
        add = partial(self.engine.add_request, request_id, request.prompts[index], wanted)
        _, failure = self._attempt(partial(add, cache_salt=request.cache_salt, **own))
        if isinstance(failure, PeerLostError):  # the run ends, not only the line
            raise failure
        if failure is not None or line.failed:  # another prompt's error may have come meanwhile
            self.engine.abort(request_id)
            if failure is not None and not line.failed:
                self._fail(line, _line_error(line.number, failure))
            return
        self.in_flight[request_id] = prompt
        self.num_sequences += params.n

    def _attempt(self, work: Callable[[], _Result]) -> tuple[_Result | None, Exception | None]:
        """Return the result of `work`, or its error.

        It may wait until others have ended that use what `work` needs, such as memory. What ends the run meanwhile is
        raised: the line is not to blame.
        """
        until_s: float | None = None
        while True:
            try:
                return work(), None
            except RequestError as error:
                if as_bad_request(error).status_code != 503:
                    return None, error
                if self.in_flight:
                    until_s = None
                else:
                    until_s = time.monotonic() + self.patience_s if until_s is None else until_s
                    if time.monotonic() >= until_s:
                        return None, error
            except Exception as error:
                return None, error
            self._wait()

    def _wait(self) -> None:
        """Wait for ended requests, and finish or fail their lines; if none is in flight, wait briefly."""
        if self.in_flight and not self.engine.has_unfinished():
            raise RuntimeError(f"the engine lost the requests {sorted(self.in_flight)}")
        for output in self.engine.wait():
            prompt = self.in_flight.get(output.request_id)
            if prompt is None:  # its line has failed since
                continue
            if isinstance(output, RequestFailure):
                self._fail(prompt.line, output.error)
            else:
                self._finish(output)

    def _finish(self, output: RequestOutput) -> None:
        """Add an ended prompt's output to its line, and write the line's record after its last prompt."""
        prompt = self._forget(output.request_id)
        line = prompt.line
        self.prompt_tokens += len(output.prompt_token_ids)
        self.completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        if any(completion.finish_reason == "abort" for completion in output.outputs):
            self._fail(line, BadRequestError("the engine aborted the request", None, "aborted", 500))
            return
        line.outputs[prompt.index] = output
        if len(line.outputs) == len(line.request.prompts):
            try:
                body = self._response(line)
            except Exception as error:
                self._fail(line, _line_error(line.number, error))
            else:
                self._write(make_record(line.number, line.custom_id, line.fingerprint, 200, body, None))

    def _response(self, line: _Line) -> Json:
        """Return the whole reply to a line's request, all of whose prompts have ended."""
        outputs = [line.outputs[index] for index in range(len(line.outputs))]
        reply = INTERFACES[line.request.url].new_reply(
            line.request,
            {},
            self.engine.tokenizer,
            line.fingerprint,
            created_s=int(time.time()),
            fingerprint=self.fingerprint,
        )
        return reply.body(outputs)

    def _fail(self, line: _Line, error: RequestError) -> None:
        """Abort a line's prompts in the engine, and write its error record."""
        line.failed = True
        for request_id in [i for i, prompt in self.in_flight.items() if prompt.line is line]:
            self._forget(request_id)
            self.engine.abort(request_id)
        self._write_error(line.number, line.custom_id, line.fingerprint, error)

    def _forget(self, request_id: str) -> _LinePrompt:
        """Remove an ended prompt from those in flight, and return it."""
        prompt = self.in_flight.pop(request_id)
        self.num_sequences -= prompt.line.request.params.n
        return prompt

    def _write_error(self, number: int, custom_id: Any, fingerprint: str, error: RequestError) -> None:
        """Write the error record of line `number`; its `custom_id` may be invalid."""
        body = error_body(error)
        short = {"code": body["error"]["code"], "message": body["error"]["message"]}
        custom_id = custom_id if type(custom_id) in (str, int) else None  # invalid ids are in the message
        status_code = as_bad_request(error).status_code
        self.out.num_errors += 1
        self._write(make_record(number, custom_id, fingerprint, status_code, body, short))

    def _write(self, record: Json) -> None:
        """Append a record to the output, and report the progress."""
        self.out.append(record)
        self.progress.update()
        self.on_record(self.out.num_records, self.out.num_errors)


def _line_error(number: int, error: Exception) -> RequestError:
    """Return a RequestError for the record of line `number`; unexpected errors are logged with their traceback."""
    if isinstance(error, RequestError):
        return error
    logger.error("line %d of the batch failed unexpectedly", number, exc_info=error)
    return BadRequestError(f"the line could not be served: {error!r}", None, "internal_error", 500)
