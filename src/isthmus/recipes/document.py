"""YAML text as plain data that remembers on which line each key was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from os import PathLike, fspath
from typing import Any, TypeAlias, cast

import yaml
from yaml.constructor import SafeConstructor
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from isthmus.errors import RecipeError

KeyPath: TypeAlias = tuple[str | int, ...]
"""Where a value is: ("models", 0, "parameters", "weight")."""

MAX_REPEATS = 10_000
"""How many nodes aliases may repeat; nested aliases grow exponentially."""

MAX_DEPTH = 100
"""How many lists and mappings may lie inside each other; a recipe needs about six."""

MAX_BITS = 10_000
"""The longest whole number; Python turns none of more than 4300 digits into text."""

BROKEN = "this text holds half of a character (a lone surrogate)"

_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class Document:
    """One YAML mapping.

    Attributes:
        name: The file as the user wrote it, or "recipe"; errors start with it.
        data: Dicts with string keys, lists, strings, numbers, booleans and None.
        lines: Line numbers, counted from 1, by key path. Empty for data that never was text.
    """

    name: str
    data: dict[str, Any]
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def line(self, path: KeyPath) -> int | None:
        """The line of that key, or of the nearest key above it that has one."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None


def parse_document(
    text: str, name: str, *, what: str = "a recipe", such_as: str = "merge_method: linear"
) -> Document:
    """Read YAML text.

    Args:
        text: The text of a file.
        name: What errors call it.
        what: What the file should hold.
        such_as: A line of it.

    Raises:
        RecipeError: if the text is not one YAML mapping of plain data; names the line.
    """
    roots = _compose(text, name)
    if not roots:
        raise RecipeError(f"{name}: the recipe is empty", "It needs merge_method and models.")
    if len(roots) > 1:
        raise RecipeError(
            f"{name}:{_line(roots[1])}: a second document starts here (---), "
            "and chains of merges are not in this version yet",
            "Write each merge to a file of its own, and give the output folder of one as a model "
            "of the next.",
        )
    if not isinstance(roots[0], MappingNode):
        raise RecipeError(
            f"{name}:{_line(roots[0])}: {what} is a mapping, lines such as `{such_as}`"
        )
    builder = _Builder(name)
    return Document(name, builder.mapping(roots[0], ()), builder.lines)


def plain_document(data: Mapping[Any, Any], name: str) -> Document:
    """Data made in Python, as if it had been read from YAML.

    Raises:
        RecipeError: if it holds something that no YAML file would.
    """
    return Document(name, {key: _plain(value, (key,), name) for key, value in _items(data, name)})


def show(path: KeyPath) -> str:
    """A key path as people write it: models[0].parameters.weight."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".")


def _compose(text: str, name: str) -> list[Node]:
    """The root nodes of the documents that are not empty."""
    roots: list[Node] = []
    try:
        loader = yaml.SafeLoader(text)
        while loader.check_node():
            root = loader.get_node()
            # An empty document, after a last --- for instance, is a scalar of no characters.
            if root is not None and root.start_mark.index < root.end_mark.index:
                roots.append(root)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(
            f"{name}:{line}: the character U+{ord(text[error.position]):04X} may not stand in YAML"
        ) from error
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, name) from error
    except RecursionError as error:
        raise RecipeError(f"{name}: the YAML is nested too deeply for a recipe") from error
    return roots


def _syntax_error(error: yaml.MarkedYAMLError, text: str, name: str) -> RecipeError:
    mark = error.problem_mark or error.context_mark
    where = f"{name}:{mark.line + 1}" if mark else name
    line = text[text.rfind("\n", 0, mark.index) + 1 :] if mark else ""
    indentation = line[: len(line) - len(line.lstrip(" \t"))]
    if "\t" in indentation or "'\\t'" in str(error.problem):
        return RecipeError(f"{where}: YAML forbids tabs; use spaces")
    details = ", ".join(part for part in (error.context, error.problem) if part)
    return RecipeError(f"{where}: this is not YAML: {details}")


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


class _Builder:
    """Turns a graph of nodes into plain data and notes the lines."""

    def __init__(self, name: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._name = name
        self._scalars = SafeConstructor()
        self._seen: set[int] = set()
        self._open: set[int] = set()
        self._repeats = 0

    def mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        self._check_tag(node, "map")
        self._enter(node)
        data: dict[str, Any] = {}
        for key, (key_node, value_node) in self._pairs(node).items():
            self.lines[(*path, key)] = _line(key_node)
            data[key] = self._value(value_node, (*path, key))
        self._open.discard(id(node))
        return data

    def _value(self, node: Node, path: KeyPath) -> Any:
        if isinstance(node, MappingNode):
            return self.mapping(node, path)
        if isinstance(node, SequenceNode):
            self._check_tag(node, "seq")
            self._enter(node)
            items = []
            for index, item in enumerate(node.value):
                self.lines[(*path, index)] = _line(item)
                items.append(self._value(item, (*path, index)))
            self._open.discard(id(node))
            return items
        self._enter(node)
        self._open.discard(id(node))
        return self._scalar(cast("ScalarNode", node))

    def _enter(self, node: Node) -> None:
        """Count what aliases repeat, and refuse a node inside itself."""
        if id(node) in self._open:
            raise self._error(node, "an alias refers to the value that holds it")
        if id(node) in self._seen:
            self._repeats += 1
            if self._repeats > MAX_REPEATS:
                raise self._error(node, f"aliases repeat more than {MAX_REPEATS} values")
        if len(self._open) > MAX_DEPTH:
            raise self._error(node, "this is nested too deeply for a recipe")
        self._seen.add(id(node))
        self._open.add(id(node))

    def _pairs(self, node: MappingNode) -> dict[str, tuple[Node, Node]]:
        """Key and value nodes by key; what `<<` brings in yields to what is written out."""
        own: dict[str, tuple[Node, Node]] = {}
        merged: dict[str, tuple[Node, Node]] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                for key, pair in self._merged(value_node).items():
                    merged.setdefault(key, pair)
                continue
            if key_node.tag not in (_TAG + "str", _TAG + "value"):
                raise self._error(key_node, "a key must be text; put it in quotes")
            key = self._text(key_node)
            if key in own:
                raise self._error(
                    key_node, f"{key!r} is given twice, first on line {_line(own[key][0])}"
                )
            own[key] = (key_node, value_node)
        return merged | own

    def _merged(self, node: Node) -> dict[str, tuple[Node, Node]]:
        sources = node.value if isinstance(node, SequenceNode) else [node]
        pairs: dict[str, tuple[Node, Node]] = {}
        self._enter(node)
        for source in sources:
            if not isinstance(source, MappingNode):
                raise self._error(node, "<< takes a mapping or a list of mappings")
            if source is not node:
                self._enter(source)
            pairs = self._pairs(source) | pairs
            self._open.discard(id(source))
        self._open.discard(id(node))
        return pairs

    def _scalar(self, node: ScalarNode) -> Any:
        kind = node.tag.removeprefix(_TAG)
        try:
            if kind == "null":
                return None
            if kind == "bool":
                return self._scalars.construct_yaml_bool(node)
            if kind == "int":
                number = self._scalars.construct_yaml_int(node)
                if number.bit_length() <= MAX_BITS:
                    return number
                raise self._error(node, "this whole number is too long for a recipe")
            if kind == "float":
                return self._scalars.construct_yaml_float(node)
        except (ValueError, KeyError, OverflowError) as error:
            raise self._error(node, f"this is no {kind}") from error
        # A date is most often a revision; nothing in a recipe is a point in time.
        self._check_tag(node, "str", "timestamp", "value")
        return self._text(node)

    def _text(self, node: ScalarNode) -> str:
        text = str(node.value)
        if _is_broken(text):
            raise self._error(node, BROKEN)
        return text

    def _check_tag(self, node: Node, *kinds: str) -> None:
        if node.tag not in [_TAG + kind for kind in kinds]:
            tag = node.tag.replace(_TAG, "!!")
            raise self._error(node, f"the tag {tag} has no place in a recipe; remove it")

    def _error(self, node: Node, problem: str) -> RecipeError:
        return RecipeError(f"{self._name}:{_line(node)}: {problem}")


def _is_broken(text: str) -> bool:
    """Whether the text has no encoding, so that no file could hold it."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _items(data: Mapping[Any, Any], name: str) -> list[tuple[str, Any]]:
    for key in data:
        if not isinstance(key, str) or _is_broken(key):
            raise RecipeError(f"{name}: a key must be text, not {key!r}")
    return list(data.items())


def _plain(value: Any, path: KeyPath, name: str) -> Any:
    if len(path) > MAX_DEPTH:
        raise RecipeError(f"{name}: the recipe is nested too deeply")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if _is_broken(value):
            raise RecipeError(f"{name}: {BROKEN} ({show(path)})")
        # Of a member of an enumeration, str() would be the member's name.
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {key: _plain(item, (*path, key), name) for key, item in _items(value, name)}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [_plain(item, (*path, index), name) for index, item in enumerate(value)]
    if isinstance(value, Integral):
        if int(value).bit_length() > MAX_BITS:
            raise RecipeError(f"{name}: this whole number is too long ({show(path)})")
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, PathLike):
        return str(fspath(value))
    raise RecipeError(
        f"{name}: a recipe cannot hold a {type(value).__name__} ({show(path)})",
        "Use text, numbers, true or false, lists and mappings.",
    )
