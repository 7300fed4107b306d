"""Scanner that separates reasoning, answer and tool calls in a chat's text while the text comes.

One scanner serves all formats (`chat_formats.py`). It is a generator that waits wherever its text ends, so cuts of the
text make no difference. It holds back a possible delimiter, and a tool call up to its arguments. Arguments pass as they
come, except their last character, which waits until the call is complete: arguments that a limit or a stop string has
cut off are never valid JSON. Text that turns out not to be a call belongs to the answer. Only these are lost:
delimiters, the white space after them, members of a call's object besides name and arguments, and a call that a limit
or a stop string has cut off before its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.openai.chat_formats import CallSyntax, ChatFormat, Delimiters, MessageSyntax
from jaxserve.openai.json_scanner import MAX_HEAD_CHARS, CutError, JsonScanner, NotACallError, Steps
from jaxserve.openai.message_deltas import Content, MessageDelta, Reasoning, ToolArguments, ToolCall

_BRACE_OR_QUOTE = re.compile(r'[{"]')
_MIN_DELIMITER_CHARS = 4  # a cut-off delimiter is text if it is shorter


@dataclass
class _Call:
    """Tool call that is written as a JSON object, as far as it has been scanned.

    Attributes:
        name: name of the called function; empty until it has come.
        arguments: JSON text of the arguments if they came before the name; otherwise empty.
        is_bare: True if no delimiter is before the object, so that it may be any object.
        has_begun: True once the call's deltas have been emitted.
    """

    name: str = ""
    arguments: str = ""
    is_bare: bool = False
    has_begun: bool = False


class Scanner(JsonScanner):
    """Incremental parser of one generated message into reasoning, content and tool calls.

    Args:
        chat_format: the model's delimiters for reasoning and tool calls.
        call_id: function from a tool call's index to its id.
        in_reasoning: True if the prompt ends with the opening delimiter of reasoning.
        names: names of the functions that may be called; None if tool calls are not parsed, but remain text.
        hidden: delimiters that are special tokens, which users never see.
        is_forced: True if the whole text must be tool calls.

    Attributes:
        num_calls: number of tool calls that have begun.
        num_whole: number of tool calls that are complete.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        call_id: Callable[[int], str],
        *,
        in_reasoning: bool = False,
        names: frozenset[str] | None = None,
        hidden: frozenset[str] = frozenset(),
        is_forced: bool = False,
    ) -> None:
        self._format, self._call_id, self._names, self._is_forced = chat_format, call_id, names, is_forced
        self._hidden = Delimiters(tuple(sorted(hidden)))
        super().__init__()
        self._held = ""  # last character of the arguments of a call that is not complete yet
        self._has_lost = False  # True once a call was cut off before it began
        self._deltas: list[MessageDelta] = []
        self.num_calls = self.num_whole = 0
        self._call_delimiters: list[str] = []
        headed = chat_format.messages
        self._steps = self._delimited_text(in_reasoning) if headed is None else self._headed_messages(headed)

    @property
    def has_cut_call(self) -> bool:
        """True if a tool call, or only its delimiter, has begun and is not complete."""
        return self._has_lost or self.num_whole < self.num_calls

    def scan(self, text: str, *, is_end: bool, is_cut: bool = False) -> list[MessageDelta]:
        """Scan more text, and return the message deltas that are certain with it.

        Args:
            text: text after the earlier text.
            is_end: True if no text follows.
            is_cut: True if something other than the model has ended the text, such as a stop string.
        """
        if text or is_end:
            self._feed(text, is_end=is_end, is_cut=is_cut)
            next(self._steps, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    # formats with delimiters in the text

    def _delimited_text(self, in_reasoning: bool) -> Steps:
        """Scan a whole message with delimiters in its text, whose beginning may be reasoning."""
        reasoning, calls = self._format.reasoning, {} if self._names is None else _by_begin(self._format.calls)
        begins = [begin for begin in calls if begin]
        self._call_delimiters = begins
        text_delimiters = self._delimiters([*begins, *([reasoning.begin] if reasoning else [])])
        reasoning_delimiters = self._delimiters([reasoning.end] if reasoning else [])
        is_start = not in_reasoning
        while True:
            if in_reasoning and reasoning is not None:
                delimiter = yield from self._passage(reasoning_delimiters, Reasoning)
                in_reasoning = delimiter not in (reasoning.end, "")
            else:
                if is_start and "" in calls:
                    yield from self._run(calls[""])
                delimiter = yield from self._passage(text_delimiters, Content, keeps_space=is_start)
                if delimiter and delimiter in calls:
                    yield from self._run(calls[delimiter], delimiter)
                in_reasoning = reasoning is not None and delimiter == reasoning.begin
            is_start = False
            if not delimiter:
                return

    def _delimiters(self, texts: list[str]) -> Delimiters:
        """Return the delimiters `texts` and all hidden ones."""
        return Delimiters(tuple(sorted({*texts, *self._hidden.texts})))

    def _passage(
        self, delimiters: Delimiters, kind: type[Content] | type[Reasoning], *, keeps_space: bool = False
    ) -> Steps:
        """Emit the text up to the next of some delimiters, and return that delimiter; empty at the end of the text.

        Args:
            delimiters: delimiters that end the passage; they are taken, but not emitted.
            kind: type of the emitted deltas.
            keeps_space: False to leave out white space at the start; True to leave it out only if nothing but a
                delimiter follows.
        """
        space = yield from self._space()
        if not keeps_space:
            space = ""
        while True:
            found = delimiters.pattern.search(self._text, self._position)
            begun = None if found or self._is_end else delimiters.partial_suffix.search(self._text, self._position)
            if self._is_cut and not found:
                self._drop_delimiter(delimiters)
            stop = (found or begun).start() if found or begun else len(self._text)  # type: ignore[union-attr]
            if stop > self._position:
                self._emit(kind(space + self._text[self._position : stop]))
                space = ""
            self._position = found.end() if found else stop
            if found:
                return found.group()
            if self._is_end:
                self._emit(kind(space))
                return ""
            yield

    def _drop_delimiter(self, delimiters: Delimiters) -> None:
        """Remove a delimiter that is cut off at the end of the text."""
        found = delimiters.partial_suffix.search(self._text, self._position)
        if found is not None and len(found.group()) >= _MIN_DELIMITER_CHARS:
            self._text = self._text[: found.start()]
            self._has_lost |= any(delimiter.startswith(found.group()) for delimiter in self._call_delimiters)

    # calls

    def _run(self, syntaxes: list[CallSyntax], delimiter: str = "") -> Steps:
        """Scan a run of tool calls in the first syntax whose opening follows; text that is no call becomes content.

        Args:
            syntaxes: syntaxes that begin with the same delimiter.
            delimiter: delimiter that has been taken.
        """
        self._raw = delimiter
        try:
            yield from self._space()
            for syntax in syntaxes:
                if (yield from self._literal(syntax.opening)):
                    yield from self._calls(syntax)
                    return
        except NotACallError as error:
            is_lost = self._is_cut and isinstance(error, CutError) and (delimiter or self.num_calls or self._is_forced)
            if is_lost:
                self._has_lost = True
                self._position = len(self._text)
            else:
                if self._held:  # the arguments are complete, only what comes after them is not
                    self._end_call()
                self._emit(Content(self._hidden.pattern.sub("", self._raw)))
        finally:
            self._raw = ""

    def _calls(self, syntax: CallSyntax) -> Steps:
        """Scan adjacent tool calls up to the end of their run, after its opening."""
        is_first = True
        while True:
            if syntax.call_begin and not (yield from self._literal(syntax.call_begin)):
                if is_first:
                    raise self._missing(syntax.call_begin)
                self._has_lost |= self._take_begun(syntax.call_begin)
                break
            yield from self._call(syntax)
            for delimiter in syntax.call_end:
                yield from self._space()
                yield from self._end_delimiter(delimiter)
            self._raw, is_first = "", False
            yield from self._space()
            if syntax.separator:
                if not (yield from self._literal(syntax.separator)):
                    break
                yield from self._space()
                if not syntax.opening and (yield from self._peek()) == "":
                    break
            elif not syntax.call_begin:
                break
        yield from self._end_delimiter(syntax.end)
        self._raw = ""

    def _call(self, syntax: CallSyntax) -> Steps:
        """Scan one tool call without the delimiters around it: a head and arguments, or a JSON object."""
        if syntax.head is not None:
            name = yield from self._head(syntax)
            yield from self._arguments(name)
        else:
            call = _Call(is_bare=not syntax.begin)
            yield from self._members(call)
            if not call.has_begun:
                if not call.name or (call.is_bare and not call.arguments):
                    raise NotACallError
                self._begin_call(call.name, call.arguments or "{}")
        self._end_call()

    def _members(self, call: _Call) -> Steps:
        """Scan a JSON object with keys in any order, and fill in `call` with its name and arguments."""
        if not (yield from self._literal("{")):
            raise self._missing("{")
        while True:
            yield from self._space()
            if (yield from self._literal("}")):
                return
            yield from self._member(call)
            yield from self._space()
            if not (yield from self._literal(",")):
                if not (yield from self._literal("}")) and (self._is_cut or not call.has_begun):
                    raise self._missing("}")
                return

    def _member(self, call: _Call) -> Steps:
        """Scan one key and its value in the JSON object of a call, and fill in `call`."""
        key = yield from self._string()
        yield from self._space()
        if not (yield from self._literal(":")):
            raise self._missing(":")
        yield from self._space()
        first = yield from self._peek()
        if not call.name and (key == "name" or (key == "function" and first == '"')):
            call.name = yield from self._string()
            if not call.name or (call.is_bare and self._names is not None and call.name not in self._names):
                raise NotACallError
        elif not call.name and key == "function" and first == "{":  # OpenAI's form
            yield from self._members(call)
        elif key in ("arguments", "parameters") and not call.arguments and not call.has_begun:
            if call.is_bare and first not in ("{", '"', "n"):
                raise self._missing("{")
            if not call.name:
                call.arguments = yield from self._value()
            else:
                yield from self._arguments(call.name)
                call.has_begun = True
        else:
            yield from self._value()

    def _arguments(self, name: str) -> Steps:
        """Begin a call to the function `name`, and scan its arguments; emit them as they come if they have brackets."""
        if (yield from self._peek()) in ("{", "["):
            self._begin_call(name)
            yield from self._nested(self._emit_arguments)
        else:
            self._begin_call(name, (yield from self._value()))

    def _begin_call(self, name: str, arguments: str = "") -> None:
        """Emit the beginning of a call, and its arguments except the last character if they are already known."""
        self._raw = ""
        self._emit(ToolCall(self.num_calls, self._call_id(self.num_calls), name))
        self.num_calls += 1
        self._emit_arguments(arguments[:-1], arguments[-1:])

    def _emit_arguments(self, text: str, held: str = "") -> None:
        """Emit more text of the current call's arguments, and hold back the character `held` until `_end_call`."""
        self._held = held
        self._emit(ToolArguments(self.num_calls - 1, text))

    def _end_call(self) -> None:
        """Emit the last character of the current call's arguments: the call is complete."""
        self._emit_arguments(self._held)
        self.num_whole += 1

    def _head(self, syntax: CallSyntax) -> Steps:
        """Take the text before a call's arguments, which `syntax.head` describes, and return the function's name."""
        while True:
            end = self._position + MAX_HEAD_CHARS
            found = _BRACE_OR_QUOTE.search(self._text, self._position, end)
            if found or self._is_end or len(self._text) >= end:
                break
            yield
        head = self._text[self._position : found.start() if found else end]
        named = (syntax.head.fullmatch(head) if found and syntax.head else None) or syntax.head_before_null.match(head)
        if named is None:
            raise CutError if not found and self._is_end and len(head) < MAX_HEAD_CHARS else NotACallError
        self._take(named.end())
        return named["name"]

    def _emit(self, delta: MessageDelta) -> None:
        """Add a delta to the next result of `scan`, joined with the last one if both have the same type."""
        if not isinstance(delta, ToolCall):
            if not delta.text:
                return
            last = self._deltas[-1] if self._deltas else None
            if type(last) is type(delta) and not isinstance(last, ToolCall):
                delta, _ = delta._replace(text=last.text + delta.text), self._deltas.pop()
        self._deltas.append(delta)

    # formats of messages with headers

    def _headed_messages(self, syntax: MessageSyntax) -> Steps:
        """Scan a whole reply of several messages with headers."""
        body_delimiters = self._delimiters(list(syntax.ends))
        is_start = True
        while True:
            self._raw = ""
            space = yield from self._space()
            for start in syntax.starts:
                if (yield from self._literal(start)):
                    delimiter = yield from self._headed_message(syntax, body_delimiters)
                    break
            else:
                self._emit(Content(space if is_start else ""))
                delimiter = yield from self._passage(body_delimiters, Content)
            is_start = False
            if not delimiter:
                return
            if delimiter in syntax.starts:  # the next header begins with it
                self._position -= len(delimiter)

    def _headed_message(self, syntax: MessageSyntax, body_delimiters: Delimiters) -> Steps:
        """Scan a message whose header has begun, and return the delimiter after it; empty at the end of the text."""
        while (stop := self._text.find(syntax.head_end, self._position, self._position + MAX_HEAD_CHARS)) < 0:
            if len(self._text) - self._position >= MAX_HEAD_CHARS:  # no header
                self._emit(Content(self._hidden.pattern.sub("", self._raw)))
                return (yield from self._passage(body_delimiters, Content))
            if self._is_end:
                head = self._raw + self._text[self._position :]
                self._has_lost |= self._is_cut and syntax.recipient(head).startswith(syntax.functions)
                self._position = len(self._text)
                return ""
            yield
        self._take(stop + len(syntax.head_end) - self._position)
        head, self._raw = self._raw, ""
        recipient = syntax.recipient(head)
        if recipient.startswith(syntax.functions) and self._names is not None:
            yield from self._space()
            if not (yield from self._headed_call(recipient.removeprefix(syntax.functions))):
                return ""
        is_reasoning = syntax.channel(head) in syntax.reasoning_channels or (
            recipient and not recipient.startswith(syntax.functions)
        )
        return (yield from self._passage(body_delimiters, Reasoning if is_reasoning else Content))

    def _headed_call(self, name: str) -> Steps:
        """Scan a message body as the arguments of a call to the function `name`; without arguments it remains content.

        Return False if the text is cut off inside the arguments, so that nothing follows.
        """
        try:
            if (yield from self._peek()) in ("{", '"'):
                yield from self._arguments(name)
                self._end_call()
            elif (yield from self._literal("null")):
                self._begin_call(name, "{}")
                self._end_call()
            elif self._is_cut:
                raise self._missing("null")
        except NotACallError as error:
            if self._is_cut and isinstance(error, CutError):
                self._has_lost = True
                return False
            if self.num_calls == self.num_whole:
                self._emit(Content(self._raw))
        self._raw = ""
        return True


def _by_begin(syntaxes: tuple[CallSyntax, ...]) -> dict[str, list[CallSyntax]]:
    """Group syntaxes by their first delimiter; those without further opening come last in each group."""
    found: dict[str, list[CallSyntax]] = {}
    for syntax in sorted(syntaxes, key=lambda each: not each.opening):
        found.setdefault(syntax.begin, []).append(syntax)
    return found
