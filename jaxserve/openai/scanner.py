"""Scanner of a chat's text: tells thoughts, answers and calls of tools apart while the text comes.

One scanner serves all formats (`chat_formats.py`). It is a generator that waits wherever its text ends, so that where
the text was cut makes no difference. It holds back what may begin a mark, and a call up to its arguments; those pass
as they come, but for their last character, which waits until the call is complete: arguments of a call that a limit or
a stop string has cut off are never valid JSON. What turns out not to be a call is text of the answer: nothing is lost
but marks, the white space after them, the parts of a call's object besides name and arguments, and, if a limit or a
stop string has ended the text, a call that was cut off before its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.openai.chat_formats import CallSyntax, ChatFormat, Marks, MessageSyntax
from jaxserve.openai.deltas import Content, Delta, Reasoning, ToolArguments, ToolCall
from jaxserve.openai.json_scanner import MAX_HEAD_CHARS, CutError, JsonScanner, NotACallError, Steps

_BRACE_OR_QUOTE = re.compile(r'[{"]')
_MIN_MARK_CHARS = 4  # of a mark that was cut off, from which on it is not text


@dataclass
class _Call:
    """Call that is an object of JSON, as far as it is known.

    Attributes:
        name: its function.
        arguments: its arguments, if they came before the name.
        is_bare: True if no mark is before it, so that it may be any object.
        has_begun: True once it has been emitted.
    """

    name: str = ""
    arguments: str = ""
    is_bare: bool = False
    has_begun: bool = False


class Scanner(JsonScanner):
    """Scanner of one message.

    Args:
        chat_format: format of the message.
        call_id: function from the number of a call to its id.
        in_thought: True if the prompt has ended with the mark of a thought.
        names: functions that may be called; None if nothing is taken for a call.
        hidden: marks that are special tokens, which users do not see wherever they are.
        is_forced: True if the text must be calls.

    Attributes:
        num_calls: calls that have begun.
        num_whole: calls that are complete.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        call_id: Callable[[int], str],
        *,
        in_thought: bool = False,
        names: frozenset[str] | None = None,
        hidden: frozenset[str] = frozenset(),
        is_forced: bool = False,
    ) -> None:
        self._format, self._call_id, self._names, self._is_forced = chat_format, call_id, names, is_forced
        self._hidden = Marks(tuple(sorted(hidden)))
        super().__init__()
        self._held = ""  # last character of the arguments of a call that is not complete yet
        self._has_lost = False  # True once a call was cut off before it began
        self._deltas: list[Delta] = []
        self.num_calls = self.num_whole = 0
        self._call_marks: list[str] = []
        self._steps = self._scan_all(in_thought)
        next(self._steps)

    @property
    def has_cut_call(self) -> bool:
        """True if a call has begun, or its mark has, and is not complete."""
        return self._has_lost or self.num_whole < self.num_calls

    def scan(self, text: str, *, is_end: bool, is_cut: bool = False) -> list[Delta]:
        """Return the deltas that more text has brought.

        Args:
            text: the text.
            is_end: True if none follows.
            is_cut: True if something other than the model has ended it, such as a stop string.
        """
        if text or is_end:
            self._feed(text, is_end=is_end, is_cut=is_cut)
            next(self._steps, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _scan_all(self, in_thought: bool) -> Steps:
        yield
        if self._format.messages is not None:
            yield from self._headed_messages(self._format.messages)
        else:
            yield from self._marked_text(in_thought)

    # formats with marks in the text

    def _marked_text(self, in_thought: bool) -> Steps:
        thought, calls = self._format.thought, {} if self._names is None else _by_begin(self._format.calls)
        begins = [begin for begin in calls if begin]
        self._call_marks = begins
        text_marks = self._marks([*begins, *([thought.begin] if thought else [])])
        thought_marks = self._marks([thought.end] if thought else [])
        is_start = not in_thought
        while True:
            if in_thought and thought is not None:
                mark = yield from self._passage(thought_marks, Reasoning)
                in_thought = mark not in (thought.end, "")
            else:
                if is_start and "" in calls:
                    yield from self._run(calls[""])
                mark = yield from self._passage(text_marks, Content, keeps_space=is_start)
                if mark and mark in calls:
                    yield from self._run(calls[mark], mark)
                in_thought = thought is not None and mark == thought.begin
            is_start = False
            if not mark:
                return

    def _marks(self, texts: list[str]) -> Marks:
        return Marks(tuple(sorted({*texts, *self._hidden.texts})))

    def _passage(self, marks: Marks, kind: type[Content] | type[Reasoning], *, keeps_space: bool = False) -> Steps:
        """Emit text up to a mark, which is returned; empty at the end of all.

        White space at the start is left out, and where it is kept, only if a mark follows.
        """
        space = yield from self._space()
        if not keeps_space:
            space = ""
        while True:
            found = marks.whole.search(self._text, self._position)
            begun = None if found or self._is_end else marks.begun.search(self._text, self._position)
            if self._is_cut and not found:
                self._drop_mark(marks)
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

    def _drop_mark(self, marks: Marks) -> None:
        """Leave out a mark that is cut off at the end of the text."""
        found = marks.begun.search(self._text, self._position)
        if found is not None and len(found.group()) >= _MIN_MARK_CHARS:
            self._text = self._text[: found.start()]
            self._has_lost |= any(mark.startswith(found.group()) for mark in self._call_marks)

    # calls

    def _run(self, syntaxes: list[CallSyntax], mark: str = "") -> Steps:
        """Take a run of calls, whose mark has been taken; what is none becomes text."""
        self._raw = mark
        try:
            yield from self._space()
            for syntax in syntaxes:
                if (yield from self._literal(syntax.opening)):
                    yield from self._calls(syntax)
                    return
        except NotACallError as error:
            is_lost = self._is_cut and isinstance(error, CutError) and (mark or self.num_calls or self._is_forced)
            if is_lost:
                self._has_lost = True
                self._position = len(self._text)
            else:
                if self._held:  # the arguments are complete, only what comes after them is not
                    self._end_call()
                self._emit(Content(self._hidden.whole.sub("", self._raw)))
        finally:
            self._raw = ""

    def _calls(self, syntax: CallSyntax) -> Steps:
        is_first = True
        while True:
            if syntax.call_begin and not (yield from self._literal(syntax.call_begin)):
                if is_first:
                    raise self._missing(syntax.call_begin)
                self._has_lost |= self._take_begun(syntax.call_begin)
                break
            yield from self._call(syntax)
            for mark in syntax.call_end:
                yield from self._space()
                yield from self._end_mark(mark)
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
        yield from self._end_mark(syntax.end)
        self._raw = ""

    def _call(self, syntax: CallSyntax) -> Steps:
        if syntax.head is None:
            yield from self._object(is_bare=not syntax.begin)
        else:
            name = yield from self._head(syntax)
            yield from self._arguments(name)
            self._end_call()

    def _object(self, *, is_bare: bool) -> Steps:
        """Take a call that is an object of JSON, with its keys in any order."""
        call = _Call(is_bare=is_bare)
        yield from self._members(call)
        if not call.has_begun:
            if not call.name or (is_bare and not call.arguments):
                raise NotACallError
            self._begin_call(call.name, call.arguments or "{}")
        self._end_call()

    def _members(self, call: _Call) -> Steps:
        """Take an object that says what is called, with its brackets."""
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
        """Take a key and its value in the object of a call."""
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
        elif not call.name and key == "function" and first == "{":  # as in OpenAI's interface
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
        """Take the arguments of a call, and emit them as they come if they are JSON; the call begins with them."""
        if (yield from self._peek()) in ("{", "["):
            self._begin_call(name)
            yield from self._nested(self._emit_arguments)
        else:
            self._begin_call(name, (yield from self._value()))

    def _begin_call(self, name: str, arguments: str = "") -> None:
        """Emit the beginning of a call, and its arguments if they are known."""
        self._raw = ""
        self._emit(ToolCall(self.num_calls, self._call_id(self.num_calls), name))
        self.num_calls += 1
        self._emit_arguments(arguments[:-1], arguments[-1:])

    def _emit_arguments(self, text: str, held: str = "") -> None:
        self._held = held
        self._emit(ToolArguments(self.num_calls - 1, text))

    def _end_call(self) -> None:
        self._emit_arguments(self._held)
        self.num_whole += 1

    def _head(self, syntax: CallSyntax) -> Steps:
        """Take the text before the arguments of a call, and return the name in it."""
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

    def _emit(self, delta: Delta) -> None:
        if not isinstance(delta, ToolCall):
            if not delta.text:
                return
            last = self._deltas[-1] if self._deltas else None
            if type(last) is type(delta) and not isinstance(last, ToolCall):
                delta, _ = delta._replace(text=last.text + delta.text), self._deltas.pop()
        self._deltas.append(delta)

    # formats of messages with headers

    def _headed_messages(self, syntax: MessageSyntax) -> Steps:
        body_marks = self._marks(list(syntax.ends))
        is_start = True
        while True:
            self._raw = ""
            space = yield from self._space()
            has_head = False
            for start in syntax.starts:
                if (yield from self._literal(start)):
                    has_head = True
                    break
            if not has_head:
                self._emit(Content(space if is_start else ""))
                mark = yield from self._passage(body_marks, Content)
            else:
                mark = yield from self._headed_message(syntax, body_marks)
            is_start = False
            if not mark:
                return
            if mark in syntax.starts:  # the next header begins with it
                self._position -= len(mark)

    def _headed_message(self, syntax: MessageSyntax, body_marks: Marks) -> Steps:
        """Take a message whose header has begun; returns the mark behind it."""
        while (stop := self._text.find(syntax.head_end, self._position, self._position + MAX_HEAD_CHARS)) < 0:
            if self._is_end or len(self._text) - self._position >= MAX_HEAD_CHARS:
                if len(self._text) - self._position >= MAX_HEAD_CHARS:  # no header
                    self._emit(Content(self._hidden.whole.sub("", self._raw)))
                    return (yield from self._passage(body_marks, Content))
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
        is_thought = syntax.channel(head) in syntax.thoughts or (
            recipient and not recipient.startswith(syntax.functions)
        )
        return (yield from self._passage(body_marks, Reasoning if is_thought else Content))

    def _headed_call(self, name: str) -> Steps:
        """Take the arguments in the body of a message; returns whether there is more of the text."""
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
    found: dict[str, list[CallSyntax]] = {}
    for syntax in sorted(syntaxes, key=lambda each: not each.opening):  # syntaxes without one come last
        found.setdefault(syntax.begin, []).append(syntax)
    return found
