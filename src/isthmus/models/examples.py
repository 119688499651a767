"""Calibration texts from files: JSON, JSON lines, CSV, Parquet, plain text, and folders of these."""

from __future__ import annotations

import csv
import hashlib
import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from isthmus.errors import CalibrationError

TEXT, CHAT = "text", "messages"
"""The columns that are taken when none is named, in this order."""

Message: TypeAlias = Mapping[str, Any]
Example: TypeAlias = str | Sequence[Message]
"""A text, or a conversation: messages with `role` and `content`."""

_Any = TypeVar("_Any")

_BATCH_ROWS = 1024
_MAX_CELL = 1 << 27


def read_examples(path: Path, column: str | None = None) -> Iterator[Example]:
    """The examples of a file or folder, one by one, in the order of the file.

    A `.txt` file has one example a line. A `.json` file is a list; its items, the lines of a `.jsonl`
    file and the rows of `.csv` and `.parquet` files are rows with columns, or in JSON also plain texts.
    Of a folder, the files with these endings are read in the order of their names. What is empty or
    null is left out.

    Args:
        path: A file or a folder.
        column: The column that holds texts or conversations; `text` if None, or else `messages`.

    Raises:
        CalibrationError: if nothing is there, a file is damaged or not in UTF-8, or the column is
            missing or holds something else.
    """
    empty = True
    for place, row in read_rows(path):
        example = example_of(row, column, place)
        if example:
            empty = False
            yield example
    if empty:
        raise CalibrationError(f"{path} holds no examples", "Give a file with at least one text.")


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file or folder as they are, each after its place, for errors; see `read_examples`.

    Raises:
        CalibrationError: if nothing is there, or a file is damaged or not in UTF-8.
    """
    for file in _files(path):
        for place, row in _READERS[file.suffix.lower()](file):
            yield f"{file}, {place}", row


def sample_examples(examples: Iterable[_Any], count: int, seed: int) -> list[_Any]:
    """Choose examples at random, without replacement.

    Each example draws its lot from the seed and its own content, so that the choice and its order do
    not depend on the order of the examples, nor on how they are spread over files.

    Args:
        examples: Read once; no more than `count` are held. Such as JSON can write.
        count: How many to choose; all of them where there are fewer.
        seed: Another seed, another choice.
    """

    def drawn(example: _Any) -> bytes:
        content = json.dumps(example, ensure_ascii=False, sort_keys=True)
        return lot(content.encode("utf-8", "surrogatepass"), seed)

    return heapq.nsmallest(count, examples, key=drawn)


def lot(content: bytes, seed: int) -> bytes:
    """What an example draws: the examples with the smallest lots are chosen."""
    return hashlib.sha256(f"{seed}:".encode() + content).digest()


def example_text(example: Example, tokenizer: Any) -> str:
    """The text that a model reads: a conversation goes through the tokenizer's chat template.

    Raises:
        CalibrationError: if the tokenizer has no chat template, or it refuses the conversation.
    """
    if isinstance(example, str):
        return example
    if getattr(tokenizer, "chat_template", None) is None:
        raise CalibrationError(
            "the examples are conversations, and the model's tokenizer has no chat template",
            "Name a column of plain texts, or add a chat_template to the tokenizer.",
        )
    try:
        return str(tokenizer.apply_chat_template(list(example), tokenize=False))
    except Exception as error:  # the template is a program of the model's author
        raise CalibrationError(
            f"the tokenizer's chat template refuses a conversation: {error}",
            "See that roles and their order are those that the model knows.",
        ) from error


def _files(path: Path) -> list[Path]:
    endings = ", ".join(_READERS)
    if path.is_dir():
        found = sorted(
            entry
            for entry in path.iterdir()
            if entry.suffix.lower() in _READERS and entry.is_file()
        )
        if not found:
            raise CalibrationError(
                f"{path} holds no calibration files", f"Files that are read end in {endings}."
            )
        return found
    if not path.is_file():
        raise CalibrationError(f"there is no file {path}", "Name an existing file or folder.")
    if path.suffix.lower() not in _READERS:
        raise CalibrationError(
            f"{path}: calibration texts are not read from {path.suffix or 'such'} files",
            f"Files that are read end in {endings}.",
        )
    return [path]


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines that hold something, with their numbers."""
    try:
        # Binary, as text files break lines at other characters too.
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield f"line {number}", text
    except UnicodeDecodeError as error:
        raise _undecodable(path, error) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    for place, line in _lines(path):
        yield place, _parsed(line, f"{path}, {place}")


def _json_list(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _undecodable(path, error) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    rows = _parsed(content, str(path)) if content.strip() else []
    if not isinstance(rows, list):
        raise CalibrationError(
            f"{path} holds a JSON {_kind(rows)}, not a list of examples",
            "Write [{...}, {...}], or one object a line in a .jsonl file.",
        )
    for number, row in enumerate(rows, start=1):
        yield f"item {number}", row


def _csv_rows(path: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(_MAX_CELL)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                if None in row:
                    raise CalibrationError(
                        f"{path}, line {reader.line_num}: more cells than the first line has columns",
                        "Put cells with commas in quotation marks, and the columns' names first.",
                    )
                yield f"line {reader.line_num}", row
    except UnicodeDecodeError as error:
        raise _undecodable(path, error) from error
    except csv.Error as error:
        raise CalibrationError(
            f"{path}, line {reader.line_num} is not CSV: {error}",
            "Separate cells by commas and put those with commas or quotes in quotation marks.",
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise CalibrationError(
            f"{path}: Parquet files are read by pyarrow, which is not installed",
            "pip install 'isthmus[calibration]', or write the texts as .jsonl.",
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise CalibrationError(f"{path} is no readable Parquet file: {error}") from error


_READERS = {
    ".jsonl": _json_lines,
    ".json": _json_list,
    ".csv": _csv_rows,
    ".txt": _lines,
    ".parquet": _parquet_rows,
}


def example_of(row: Any, column: str | None, place: str) -> Example | None:
    """What a row holds; None if that is empty.

    Args:
        row: A text, or a mapping of columns.
        column: The one to take; `text` if None, or else `messages`.
        place: Where the row is, for errors.

    Raises:
        CalibrationError: if the column is missing or holds something else.
    """
    if isinstance(row, str):
        return row.strip() and row
    if not isinstance(row, Mapping):
        raise CalibrationError(
            f"{place} is a JSON {_kind(row)}", "Each example is a text, or an object with columns."
        )
    name = column or next((name for name in (TEXT, CHAT) if name in row), None)
    if name is None or name not in row:
        raise CalibrationError(
            f"{place} has no column {name or TEXT!r}; it has {', '.join(map(repr, row)) or 'none'}",
            "Name the column of the texts: column: NAME in a recipe, --column for isthmus calibrate.",
        )
    value = row[name]
    if value is None:
        return None
    if isinstance(value, str):
        return value if value.strip() else None
    if isinstance(value, list) and all(
        isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in value
    ):
        return value
    raise CalibrationError(
        f"{place}: column {name!r} holds a {_kind(value)}, neither a text nor a conversation",
        "A conversation is a list of messages, each with role and content.",
    )


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CalibrationError(
            f"{place} is not JSON: {error}",
            "A .json file holds one list, a .jsonl file one value a line.",
        ) from error


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "truth value", type(None): "null"}
    return names.get(type(value), "number")


def _undecodable(path: Path, error: UnicodeDecodeError) -> CalibrationError:
    return CalibrationError(
        f"{path} is not UTF-8: byte {error.object[error.start]:#04x} cannot be decoded",
        "Convert it, for example with iconv -f latin1 -t utf-8.",
    )


def _unreadable(path: Path, error: OSError) -> CalibrationError:
    return CalibrationError(f"{path} cannot be read: {error.strerror}")
