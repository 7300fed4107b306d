"""Detection of a chat template's content format: does it read message contents as text or as lists of parts?

A template reads parts if its syntax tree loops over a message's content, selects or maps its elements, or reads their
fields.
Contents are followed through assignments, namespaces, loops over messages and macro parameters. Only macros have
scopes here: elsewhere a name has every kind that is ever assigned to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from enum import Enum
from typing import Any


class _Kind(Enum):
    """Relation of a template's value to the chat's messages: all messages, one message, or a message's content."""

    MESSAGES = "messages"
    MESSAGE = "message"
    CONTENT = "content"


# Filters that keep the elements of their argument.
_KEEPING = {"list", "reverse", "sort", "selectattr", "rejectattr", "select", "reject", "unique", "default", "d"}
_READING_PARTS = {"selectattr", "rejectattr", "map"}
_ONE_ELEMENT = {"first", "last", "random"}
_PART_FIELDS = {"type", "text", "get"}


def reads_parts(tree: Any) -> bool:
    """Return whether a parsed template reads message contents as lists of parts."""
    return any(_Walk(tree).reads())


def _all(node: Any, kinds: Any) -> Iterator[Any]:
    """Yield the nodes in a subtree that have one of some classes."""
    if isinstance(node, kinds):
        yield node
    yield from node.find_all(kinds)


class _Walk:
    """Analysis of a syntax tree: first the possible kinds for each name, then the expressions that read parts."""

    def __init__(self, tree: Any) -> None:
        import jinja2.nodes as nodes  # noqa: PLC0415, PLR0402 - only chats need it

        self._nodes, self._tree = nodes, tree
        self._names: defaultdict[str, set[_Kind]] = defaultdict(set, messages={_Kind.MESSAGES})
        macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        self._params: dict[str, dict[str, set[_Kind]]] = {
            name: {param.name: set() for param in macro.args} for name, macro in macros.items()
        }
        self._owner = {id(node): name for name, macro in macros.items() for node in macro.find_all(nodes.Node)}
        while self._spread():
            pass

    def reads(self) -> Iterator[bool]:
        """Yield, for each expression that may read parts, whether it does."""
        nodes = self._nodes
        for loop in self._tree.find_all(nodes.For):
            yield _Kind.CONTENT in self._kinds(loop.iter) and self._uses_parts(loop)
        for applied in self._tree.find_all(nodes.Filter):
            if applied.name in _READING_PARTS and applied.node is not None:
                yield _Kind.CONTENT in self._kinds(applied.node)
        for access in self._tree.find_all((nodes.Getattr, nodes.Getitem)):
            if self._key(access) in _PART_FIELDS and isinstance(access.node, nodes.Getitem | nodes.Filter):
                yield self._is_part(access.node)

    def _uses_parts(self, loop: Any) -> bool:
        """Return whether a loop treats its elements as parts; other loops see tool calls under another name."""
        nodes, target = self._nodes, loop.target
        if not isinstance(target, nodes.Name):
            return False
        uses = sum(name.name == target.name for child in loop.body for name in _all(child, nodes.Name))
        accesses = [each for child in loop.body for each in _all(child, (nodes.Getattr, nodes.Getitem))]
        keys = [self._key(each) for each in accesses if getattr(each.node, "name", None) == target.name]
        return uses > len(keys) or any(key in _PART_FIELDS for key in keys)

    def _is_part(self, node: Any) -> bool:
        """Return whether an item access or a filter yields one content part."""
        if isinstance(node, self._nodes.Filter):
            is_one = node.name in _ONE_ELEMENT and node.node is not None
        else:
            is_one = not isinstance(node.arg, self._nodes.Slice) and self._key(node) is None
        return is_one and _Kind.CONTENT in self._kinds(node.node)

    def _spread(self) -> bool:
        """Propagate kinds through assignments, loops and macro calls; return whether a name has gained one."""
        nodes, before = self._nodes, self._num_kinds()
        for assign in self._tree.find_all(nodes.Assign):
            if (name := self._name(assign.target)) is not None:
                self._known(assign, name).update(self._kinds(assign.node))
                for field in self._namespace_fields(assign.node):
                    self._known(assign, f"{name}.{field.key}").update(self._kinds(field.value))
        for loop in self._tree.find_all(nodes.For):
            if isinstance(loop.target, nodes.Name) and _Kind.MESSAGES in self._kinds(loop.iter):
                self._known(loop, loop.target.name).add(_Kind.MESSAGE)
        for call in self._tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in self._params:
                params = self._params[call.node.name]
                given = [*zip(params, call.args, strict=False), *((field.key, field.value) for field in call.kwargs)]
                for name, value in given:
                    if name in params:
                        params[name] |= self._kinds(value)
        return self._num_kinds() > before

    def _num_kinds(self) -> int:
        """Return the number of (name or macro parameter, kind) pairs that were found so far."""
        groups = [self._names, *self._params.values()]
        return sum(len(kinds) for group in groups for kinds in group.values())

    def _known(self, node: Any, name: str) -> set[_Kind]:
        """Return the set of kinds found so far for a name used in the tree's `node`; callers may extend it."""
        params = self._params.get(self._owner.get(id(node), ""), {})
        return params[name] if name in params else self._names[name]

    def _namespace_fields(self, node: Any) -> list[Any]:
        """Return the keyword arguments of a call to `namespace`; none for any other expression."""
        is_call = isinstance(node, self._nodes.Call) and isinstance(node.node, self._nodes.Name)
        return list(node.kwargs) if is_call and node.node.name == "namespace" else []

    def _name(self, target: Any) -> str | None:
        """Return the name, or "namespace.field", to which an assignment's target refers; None for other targets."""
        if isinstance(target, self._nodes.Name):
            return str(target.name)
        return f"{target.name}.{target.attr}" if isinstance(target, self._nodes.NSRef) else None

    def _key(self, access: Any) -> str | None:
        """Return the attribute or item name in the syntax node of an access; None if it is computed."""
        if isinstance(access, self._nodes.Getattr):
            return str(access.attr)
        arg = access.arg if isinstance(access, self._nodes.Getitem) else None
        return arg.value if isinstance(arg, self._nodes.Const) and isinstance(arg.value, str) else None

    def _kinds(self, node: Any) -> set[_Kind]:
        """Return the relations that an expression in a template may have to the chat's messages; often none."""
        nodes = self._nodes
        if isinstance(node, nodes.Name):
            return self._known(node, node.name)
        if isinstance(node, nodes.Getattr | nodes.Getitem):
            return self._access_kinds(node)
        if isinstance(node, nodes.Filter) and node.node is not None:
            kinds = self._kinds(node.node)
            if node.name in _ONE_ELEMENT:
                return {_Kind.MESSAGE} if _Kind.MESSAGES in kinds else set()
            return kinds if node.name in _KEEPING else set()
        if isinstance(node, nodes.CondExpr):
            return self._kinds(node.expr1) | (self._kinds(node.expr2) if node.expr2 is not None else set())
        if isinstance(node, nodes.Or | nodes.And):
            return self._kinds(node.left) | self._kinds(node.right)
        if isinstance(node, nodes.Add):  # message lists; a sum with a content is text
            return (self._kinds(node.left) | self._kinds(node.right)) & {_Kind.MESSAGES}
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get":
            is_content = bool(node.args) and getattr(node.args[0], "value", None) == "content"
            return {_Kind.CONTENT} if is_content and _Kind.MESSAGE in self._kinds(node.node.node) else set()
        return set()

    def _access_kinds(self, node: Any) -> set[_Kind]:
        """Return the relations that an attribute or item access may have to the chat's messages; often none."""
        base, key = self._kinds(node.node), self._key(node)
        if isinstance(node, self._nodes.Getitem) and isinstance(node.arg, self._nodes.Slice):
            return base
        if key is None:
            return {_Kind.MESSAGE} if _Kind.MESSAGES in base else set()
        if key == "content" and _Kind.MESSAGE in base:
            return {_Kind.CONTENT}
        return self._names[f"{node.node.name}.{key}"] if isinstance(node.node, self._nodes.Name) else set()
