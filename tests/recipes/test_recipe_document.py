"""YAML as people write it, and YAML that is meant to hurt."""

import time

import pytest

from isthmus.errors import RecipeError
from isthmus.recipes.document import MAX_DEPTH, MAX_REPEATS, parse_document, plain_document, show


def refused(text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        parse_document(text, "merge.yaml")
    return str(caught.value)


def test_values_have_yaml_types_and_lines():
    document = parse_document(
        "a: 1\nb:\n  - x: true\n    y: ~\n  - 0.5\n  - 1e-3\nc: 2024-05-01\n", "merge.yaml"
    )
    assert document.data == {
        "a": 1,
        "b": [{"x": True, "y": None}, 0.5, "1e-3"],
        "c": "2024-05-01",
    }
    assert document.lines == {
        ("a",): 1,
        ("b",): 2,
        ("b", 0): 3,
        ("b", 0, "x"): 3,
        ("b", 0, "y"): 4,
        ("b", 1): 5,
        ("b", 2): 6,
        ("c",): 7,
    }


@pytest.mark.parametrize("value", ["1", "[a]", "[{b: 1}, 2]"])
def test_merge_keys_take_mappings(value):
    message = refused(f"a: 1\nb:\n  <<: {value}\n")
    assert message == "merge.yaml:3: << takes a mapping or a list of mappings"


def test_a_missing_key_has_the_line_of_the_key_above_it():
    document = parse_document("a: 1\nb:\n  c: 2\n", "merge.yaml")
    assert document.line(("b", "missing", 0)) == 2
    assert document.line(("missing",)) is None


@pytest.mark.parametrize("newline", ["\r\n", "\n"])
def test_line_ends_of_windows_and_unix(newline):
    document = parse_document(newline.join(["a: 1", "", "# note", "b:", "  - 2", ""]), "f")
    assert document.data == {"a": 1, "b": [2]}
    assert document.lines["b", 0] == 5


def test_byte_order_mark_and_unicode():
    assert parse_document("\ufeffmodèle: 模型/🦙 # ß\n", "f").data == {"modèle": "模型/🦙"}


def test_anchors_aliases_and_merge_keys():
    document = parse_document(
        "common: &c {weight: 1, density: 0.5}\n"
        "one: *c\n"
        "two:\n  <<: *c\n  weight: 2\n"
        "three:\n  <<: [{weight: 3}, *c]\n",
        "f",
    )
    assert document.data["one"] == {"weight": 1, "density": 0.5}
    assert document.data["two"] == {"weight": 2, "density": 0.5}
    assert document.data["three"] == {"weight": 3, "density": 0.5}


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "---\n...\n"])
def test_empty(text):
    assert refused(text).startswith("merge.yaml: the recipe is empty")


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text\n", "3\n", "~\n"])
def test_top_is_no_mapping(text):
    assert refused("# first line\n" + text).startswith("merge.yaml:2: a recipe is a mapping")


def test_duplicate_key_names_both_lines():
    message = refused("a: 1\nb:\n  weight: 1\n  density: 1\n  weight: 2\n")
    assert message == "merge.yaml:5: 'weight' is given twice, first on line 3"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a:\n\tb: 1\n", 2),
        ("a:\n  - b: 1\n\t  c: 2\n", 3),
        ("a:\n  \tb: 1\n", 2),
        ("a:\tb\nc: 1", 1),
        ("a: 1\r\nb:\r\n\tc: 2\r\n", 3),
    ],
)
def test_tabs(text, line):
    assert refused(text) == f"merge.yaml:{line}: YAML forbids tabs; use spaces"


def test_tabs_in_text_are_fine():
    assert parse_document('a: "x\ty"\n', "f").data == {"a": "x\ty"}


def test_second_document():
    message = refused("name: one\n---\nname: two\n")
    assert message.startswith("merge.yaml:3: a second document starts here (---)")
    assert "not in this version yet" in message


@pytest.mark.parametrize("text", ["---\na: 1\n", "a: 1\n---\n", "%YAML 1.1\n---\na: 1\n...\n"])
def test_document_marks_around_one_document(text):
    assert parse_document(text, "f").data == {"a": 1}


@pytest.mark.parametrize("text", ["a: b: c\n", "a: [1, 2\n", "a: 'x\n", "a: *b\n", "a: @x\n"])
def test_not_yaml(text):
    message = refused("first: 1\n" + text)
    assert message.startswith(("merge.yaml:2: this is not YAML: ", "merge.yaml:3: this is not"))


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nb: !!python/object/apply:os.system [ls]\n",
        "a: 1\nb: !!python/name:os.system x\n",
        "a: 1\nb: !!python/object:os.x {c: 1}\n",
        "a: 1\nb: !secret x\n",
        "a: 1\nb: !!binary aGk=\n",
        "a: 1\nb: !!set {c}\n",
    ],
)
def test_tags(text):
    message = refused(text)
    assert message.startswith("merge.yaml:2: the tag !")
    assert "has no place in a recipe" in message


def test_tag_at_the_top():
    assert "has no place" in refused("!!python/object:os.x\na: 1\n")


@pytest.mark.parametrize("value", ["!!int x", "!!bool x", "!!float x", "9" * 5000])
def test_values_that_are_not_what_they_claim(value):
    assert refused(f"a: 1\nb: {value}\n").startswith("merge.yaml:2: this is no ")


@pytest.mark.parametrize("key", ["1", "true", "~", "0.5", "[a]", "{a: 1}"])
def test_keys_are_text(key):
    assert refused(f"a: 1\n? {key}\n: 2\n") == "merge.yaml:2: a key must be text; put it in quotes"


def test_control_characters_name_the_line():
    assert refused("a: 1\nb: \x07\n") == "merge.yaml:2: the character U+0007 may not stand in YAML"


def test_lone_surrogates():
    assert "half of a character" in refused('a: "\\ud800"\n')
    with pytest.raises(RecipeError, match="half of a character"):
        plain_document({"a": "\ud800"}, "f")


def test_billion_laughs():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 40)]
    started = time.perf_counter()
    assert f"aliases repeat more than {MAX_REPEATS}" in refused("\n".join(lines))
    assert time.perf_counter() - started < 3


def test_billion_laughs_by_merge_keys():
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 40)]
    assert f"aliases repeat more than {MAX_REPEATS}" in refused("\n".join(lines))


@pytest.mark.parametrize("text", ["a: &x [*x]\n", "a: &x {b: *x}\n", "a: &x {<<: *x}\n"])
def test_a_value_inside_itself(text):
    assert refused(text) == "merge.yaml:1: an alias refers to the value that holds it"


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 10_000])
def test_deep_nesting(depth):
    assert "nested too deeply" in refused("a: " + "[" * depth + "]" * depth)


def test_deep_nesting_by_aliases():
    lines = ["a0: &a0 [1]"] + [f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 2 * MAX_DEPTH)]
    assert "nested too deeply" in refused("\n".join(lines))


def test_many_values_without_aliases_are_fine():
    numbers = list(range(MAX_REPEATS + 1))
    assert parse_document(f"a: {numbers}\n", "f").data == {"a": numbers}


def test_python_data_inside_itself():
    data: dict[str, object] = {}
    data["a"] = [data]
    with pytest.raises(RecipeError, match="nested too deeply"):
        plain_document(data, "f")


def test_key_paths_as_people_write_them():
    assert show(("models", 0, "parameters", "weight", 2, "value")) == (
        "models[0].parameters.weight[2].value"
    )
