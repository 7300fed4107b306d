"""Scanner of a chat's text: tells thoughts, answers and calls of tools apart while the text comes.

One scanner serves all formats (`chat_formats.py`). It is a generator that waits wherever its text ends, so that where
the text was cut makes no difference. It holds back what may begin a mark, and a call up to its arguments; those pass
as they come. What turns out not to be a call is text of the answer: nothing is lost but marks, the white space behind
them, and the parts of a call's object besides name and arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from jaxserve.openai.chat_formats import CallSyntax, ChatFormat, Marks, MessageSyntax
from jaxserve.openai.deltas import Content, Delta, Reasoning, ToolArguments, ToolCall

MAX_HEAD_CHARS = 512  # text between the marks of a call, or of a header

Steps = Generator[None, None, Any]
_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(r"[^\s,{}\[\]\"]+")
_DEPTH = {"{": 1, "[": 1, "}": -1, "]": -1}
_STRUCTURE = re.compile(r'["\\{}\[\]]')


class _NotACallError(Exception):
    """Sign that the text at hand is no call after all."""


@dataclass
class _Call:
    """Call that is an object of JSON, as far as it is known.

    Attributes:
        name: its function.
        arguments: its arguments, if they came before the name.
        has_begun: True once it has been emitted.
    """

    name: str = ""
    arguments: str = ""
    has_begun: bool = False


@dataclass
class _Nesting:
    """Brackets that are open in JSON.

    Attributes:
        depth: their number.
        in_string: True inside a string.
        is_through: True once the first one is closed.
    """

    depth: int = 0
    in_string: bool = False
    is_through: bool = False

    def read(self, text: str, position: int) -> int:
        """Read on, and return the position behind the last bracket, or up to which all is known."""
        while (found := _STRUCTURE.search(text, position)) is not None:
            sign, position = found.group(), found.end()
            if self.in_string:
                if sign == "\\":
                    if position == len(text):
                        return position - 1  # only the next character tells
                    position += 1
                elif sign == '"':
                    self.in_string = False
            elif sign == '"':
                self.in_string = True
            else:
                self.depth += _DEPTH.get(sign, 0)
                if self.depth == 0:
                    self.is_through = True
                    return position
        return len(text)


class Scanner:
    """Scanner of one message.

    Args:
        chat_format: format of the message.
        call_id: function from the number of a call to its id.
        in_thought: True if the prompt has ended with the mark of a thought.
        names: functions that may be called; None if nothing is taken for a call.
        hidden: marks that are special tokens, which users do not see wherever they are.

    Attributes:
        num_calls: calls so far.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        call_id: Callable[[int], str],
        *,
        in_thought: bool = False,
        names: frozenset[str] | None = None,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        self._format, self._call_id, self._names = chat_format, call_id, names
        self._hidden = Marks(tuple(sorted(hidden)))
        self._text, self._position, self._is_end = "", 0, False
        self._raw = ""  # text of a possible call
        self._deltas: list[Delta] = []
        self.num_calls = 0
        self._steps = self._scan_all(in_thought)
        next(self._steps)

    def scan(self, text: str, *, is_end: bool) -> list[Delta]:
        """Return the deltas that more text has brought.

        Args:
            text: the text.
            is_end: True if none follows.
        """
        if text or is_end:
            self._text, self._position = self._text[self._position :] + text, 0
            self._is_end = is_end
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
                if mark in calls:
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
        except _NotACallError:
            self._emit(Content(self._hidden.whole.sub("", self._raw)))
        finally:
            self._raw = ""

    def _calls(self, syntax: CallSyntax) -> Steps:
        is_first = True
        while True:
            if syntax.call_begin and not (yield from self._literal(syntax.call_begin)):
                if is_first:
                    raise _NotACallError
                break
            yield from self._call(syntax)
            for mark in syntax.call_end:
                yield from self._space()
                yield from self._literal(mark)
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
        yield from self._literal(syntax.end)
        self._raw = ""

    def _call(self, syntax: CallSyntax) -> Steps:
        if syntax.head is None:
            yield from self._object(is_bare=not syntax.begin)
            return
        head = yield from self._until_brace()
        found = syntax.head.fullmatch(head)
        if found is None:
            raise _NotACallError
        self._begin_call(found["name"])
        yield from self._nested(is_argument=True)

    def _object(self, *, is_bare: bool) -> Steps:
        """Take a call that is an object of JSON, with its keys in any order."""
        if not (yield from self._literal("{")):
            raise _NotACallError
        call = _Call()
        while True:
            yield from self._space()
            if (yield from self._literal("}")):
                break
            yield from self._member(call, is_bare=is_bare)
            yield from self._space()
            if not (yield from self._literal(",")):
                if not (yield from self._literal("}")) and not call.has_begun:
                    raise _NotACallError
                break
        if not call.has_begun:
            if not call.name or (is_bare and not call.arguments):
                raise _NotACallError
            self._begin_call(call.name)
            self._emit(ToolArguments(self.num_calls - 1, call.arguments or "{}"))

    def _member(self, call: _Call, *, is_bare: bool) -> Steps:
        """Take a key and its value in the object of a call."""
        key = yield from self._string()
        yield from self._space()
        if not (yield from self._literal(":")):
            raise _NotACallError
        yield from self._space()
        if key == "name" and not call.name:
            call.name = yield from self._string()
            if not call.name or (is_bare and self._names is not None and call.name not in self._names):
                raise _NotACallError
        elif key in ("arguments", "parameters") and not call.arguments and not call.has_begun:
            if (yield from self._peek()) != "{":
                raise _NotACallError
            if not call.name:
                call.arguments = yield from self._nested()
            else:
                self._begin_call(call.name)
                call.has_begun = True
                yield from self._nested(is_argument=True)
        else:
            yield from self._value()

    def _begin_call(self, name: str) -> None:
        self._raw = ""
        self._emit(ToolCall(self.num_calls, self._call_id(self.num_calls), name))
        self.num_calls += 1

    def _nested(self, *, is_argument: bool = False) -> Steps:
        """Take an object or a list, up to its last bracket, and return it; arguments are emitted instead."""
        nesting, pieces = _Nesting(), []
        while True:
            start = self._position
            stop = nesting.read(self._text, start)
            if self._is_end and not nesting.is_through:
                stop = len(self._text)
            if is_argument:
                self._position = stop
                self._emit(ToolArguments(self.num_calls - 1, self._text[start:stop]))
            else:
                pieces.append(self._take(stop - start))
            if nesting.is_through:
                return "".join(pieces)
            if self._is_end:
                raise _NotACallError
            yield

    # parts of JSON and of the text

    def _value(self) -> Steps:
        character = yield from self._peek()
        if character == '"':
            yield from self._string()
        elif character in ("{", "["):
            yield from self._nested()
        else:
            yield from self._matched(_SCALAR)

    def _string(self) -> Steps:
        """Take a string of JSON, and return what it says."""
        if (yield from self._peek()) != '"':
            raise _NotACallError
        while (found := _STRING.match(self._text, self._position)) is None:
            if self._is_end or len(self._text) - self._position > MAX_HEAD_CHARS:
                raise _NotACallError
            yield
        if len(found.group()) > MAX_HEAD_CHARS:
            raise _NotACallError
        try:
            return json.loads(self._take(len(found.group())), strict=False)
        except ValueError:
            raise _NotACallError from None

    def _until_brace(self) -> Steps:
        """Take the text before the next brace, and return it."""
        while (stop := self._text.find("{", self._position, self._position + MAX_HEAD_CHARS)) < 0:
            if self._is_end or len(self._text) - self._position >= MAX_HEAD_CHARS:
                raise _NotACallError
            yield
        return self._take(stop - self._position)

    def _space(self) -> Steps:
        return (yield from self._matched(_SPACE))

    def _matched(self, pattern: re.Pattern[str]) -> Steps:
        """Take characters as long as they match, and return them."""
        pieces = []
        while True:
            found = pattern.match(self._text, self._position)
            if found is not None:
                pieces.append(self._take(len(found.group())))
            if self._position < len(self._text) or self._is_end:
                return "".join(pieces)
            yield

    def _peek(self) -> Steps:
        """Return the next character; none at the end."""
        while self._position == len(self._text) and not self._is_end:
            yield
        return self._text[self._position : self._position + 1]

    def _literal(self, wanted: str) -> Steps:
        """Take a text if it is the next, and return whether it is."""
        while True:
            rest = self._text[self._position : self._position + len(wanted)]
            if rest == wanted:
                self._take(len(wanted))
                return True
            if self._is_end or not wanted.startswith(rest):
                return False
            yield

    def _take(self, num_chars: int) -> str:
        text = self._text[self._position : self._position + num_chars]
        self._position += num_chars
        self._raw += text
        return text

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
                self._position = len(self._text)
                return ""
            yield
        self._take(stop + len(syntax.head_end) - self._position)
        head, self._raw = self._raw, ""
        recipient = syntax.recipient(head)
        if recipient.startswith(syntax.functions) and self._names is not None:
            yield from self._space()
            if (yield from self._peek()) == "{":
                self._begin_call(recipient.removeprefix(syntax.functions))
                try:
                    yield from self._nested(is_argument=True)
                except _NotACallError:
                    return ""
                self._raw = ""
        is_thought = syntax.channel(head) in syntax.thoughts or (
            recipient and not recipient.startswith(syntax.functions)
        )
        return (yield from self._passage(body_marks, Reasoning if is_thought else Content))


def _by_begin(syntaxes: tuple[CallSyntax, ...]) -> dict[str, list[CallSyntax]]:
    found: dict[str, list[CallSyntax]] = {}
    for syntax in sorted(syntaxes, key=lambda each: not each.opening):  # syntaxes without one come last
        found.setdefault(syntax.begin, []).append(syntax)
    return found
