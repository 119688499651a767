"""Calibration texts: every format gives the same, sampling depends on content alone, bad files say so."""

from __future__ import annotations

import csv
import json
import sys

import pytest

from isthmus.errors import CalibrationError
from isthmus.models.examples import example_text, read_examples, sample_examples

TEXTS = ["a narrow land", "zwei Länder, ein Weg", 'she said "no"', "日本"]
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


def write(folder, kind, texts=TEXTS, column="text"):
    path = folder / f"data.{kind}"
    rows = [{column: text, "label": 1} for text in texts]
    if kind == "txt":
        path.write_text("\n\n".join(texts), encoding="utf-8")
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [column, "label"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def refused(path, column=None):
    with pytest.raises(CalibrationError) as caught:
        list(read_examples(path, column))
    return str(caught.value)


@pytest.mark.parametrize("kind", ["txt", "json", "jsonl", "csv", "parquet"])
def test_every_format_gives_the_same_texts(tmp_path, kind):
    assert list(read_examples(write(tmp_path, kind))) == TEXTS


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv"])
def test_a_column_can_be_named(tmp_path, kind):
    path = write(tmp_path, kind, column="body")
    assert list(read_examples(path, "body")) == TEXTS
    message = refused(path)
    assert str(path) in message
    assert "'body', 'label'" in message
    assert "'title'" in refused(path, "title")


def test_a_folder_is_its_files_and_nothing_else(tmp_path):
    write(tmp_path, "csv", TEXTS[:1])
    write(tmp_path, "txt", TEXTS[1:])
    (tmp_path / "notes.md").write_text("not data")
    assert list(read_examples(tmp_path)) == TEXTS


def test_lines_break_at_newlines_only_and_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '"one\u2028line"\r\n'.encode())
    assert list(read_examples(path)) == ["one\u2028line"]


def test_empty_and_null_rows_are_left_out(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"text": None}, {"text": "  "}, {"text": "x"}, ""]))
    assert list(read_examples(path)) == ["x"]


def test_the_sample_depends_on_contents_and_seed_alone():
    texts = [f"text {number}" for number in range(50)]
    chosen = sample_examples(texts, 10, seed=3)
    assert sample_examples(iter(texts[::-1]), 10, seed=3) == chosen
    assert len(set(chosen)) == 10
    assert sample_examples(texts, 10, seed=4) != chosen
    assert sample_examples(texts, 5, seed=3) == chosen[:5]
    assert sorted(sample_examples(texts, 99, seed=3)) == sorted(texts)
    # Who is not chosen might as well be absent.
    assert sample_examples([t for t in texts if t in chosen], 10, seed=3) == chosen


class Tokenizer:
    chat_template = "there is one"

    def apply_chat_template(self, messages, tokenize):
        assert not tokenize
        return "|".join(f"{m['role']}:{m['content']}" for m in messages)


def test_conversations_go_through_the_chat_template(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"id": 1, "messages": CHAT}))
    (example,) = read_examples(path)
    assert example_text(example, Tokenizer()) == "user:hello|assistant:hi"
    assert example_text("plain", Tokenizer()) == "plain"


def test_conversations_without_a_template_are_refused():
    class Plain:
        chat_template = None

    with pytest.raises(CalibrationError, match="chat template"):
        example_text(CHAT, Plain())


def test_a_template_that_refuses():
    class Strict(Tokenizer):
        def apply_chat_template(self, messages, tokenize):  # noqa: ARG002
            raise ValueError("roles must alternate")

    with pytest.raises(CalibrationError, match="roles must alternate"):
        example_text(CHAT, Strict())


def test_what_is_missing(tmp_path):
    assert "there is no file" in refused(tmp_path / "none.txt")
    assert "holds no calibration files" in refused(tmp_path)


def test_an_unknown_ending(tmp_path):
    path = tmp_path / "data.xlsx"
    path.write_bytes(b"PK")
    assert ".jsonl" in refused(path)


@pytest.mark.parametrize("kind", ["txt", "json", "jsonl", "csv"])
def test_an_empty_file(tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    path.touch()
    assert f"{path} holds no examples" in refused(path)


@pytest.mark.parametrize("kind", ["txt", "json", "jsonl", "csv"])
def test_bytes_that_are_not_utf8(tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    path.write_bytes("text\nL\xe4nder\n".encode("latin1"))
    message = refused(path)
    if kind == "jsonl":  # the first line is refused before
        assert "not JSON" in message
    else:
        assert "0xe4" in message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '{"text": "x"}', "a JSON object, not a list"),
        ("a.json", "[1]", "item 1 is a JSON number"),
        ("a.json", "[", "is not JSON"),
        ("a.jsonl", '"x"\n{', "line 2 is not JSON"),
        ("a.jsonl", '{"text": 3}', "holds a number"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "neither a text nor a conversation"),
        ("a.csv", "text\na,b\n", "more cells"),
        ("a.csv", 'text\n"a"b\n', "is not CSV"),
        ("a.csv", "title\na\n", "it has 'title'"),
    ],
)
def test_malformed_files_name_the_place(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    shown = refused(path)
    assert message in shown
    assert str(path) in shown


def test_parquet_without_its_reader_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "data.parquet"
    path.touch()
    assert "isthmus[calibration]" in refused(path)


def test_damaged_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "data.parquet"
    path.write_bytes(b"not parquet")
    assert "no readable Parquet" in refused(path)
