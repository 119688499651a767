"""What a merged network measures of itself at the end of a merge."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import yaml
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import isthmus
from isthmus.engine import finishing
from isthmus.engine.verify import verify
from isthmus.errors import CalibrationError, IsthmusError, PathError, PlanError, RecipeError

from .models import contents

SIDE, COUNT = 16, 24


def saved(model: transformers.PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    processor = transformers.ViTImageProcessor(
        size={"height": SIDE, "width": SIDE}, image_mean=[0.5] * 3, image_std=[0.3] * 3
    )
    processor.save_pretrained(folder)
    return folder


def resnet(seed: int) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    config = transformers.ResNetConfig(
        embedding_size=6, hidden_sizes=[6, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return transformers.ResNetForImageClassification(config)


def vit(seed: int) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    config = transformers.ViTConfig(
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=SIDE,
        patch_size=8,
        num_labels=3,
        initializer_range=0.4,
    )
    return transformers.ViTForImageClassification(config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("finish")
    for seed, name in enumerate("abc"):
        saved(resnet(seed), root / f"resnet-{name}")
        saved(vit(seed), root / f"vit-{name}")
    pictures = np.random.default_rng(0).integers(0, 256, (COUNT, SIDE, SIDE, 3), dtype=np.uint8)
    (root / "pictures").mkdir()
    for number, picture in enumerate(pictures):
        Image.fromarray(picture).save(root / "pictures" / f"{number:02}.png")
    return root


def recipe(folder: Path, kind: str, finish: dict[str, object] | None, **more: object) -> dict:
    models = [{"model": str(folder / f"{kind}-{name}")} for name in "ab"]
    content = {"merge_method": "linear", "models": models, "parameters": {"weight": 1}, **more}
    data = {"data": str(folder / "pictures")}
    return content if finish is None else {**content, "finish": {**data, **finish}}


def loaded(path: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForImageClassification.from_pretrained(path)


def pixels(folder: Path) -> torch.Tensor:
    processor = transformers.ViTImageProcessor.from_pretrained(folder / "vit-a")
    images = [Image.open(path) for path in sorted((folder / "pictures").glob("*.png"))]
    return processor(images, return_tensors="pt")["pixel_values"]


def heard(model: nn.Module, layer: str, inputs: torch.Tensor) -> torch.Tensor:
    """What a layer answers, of shape [rows, channels], float64."""
    found: list[torch.Tensor] = []
    hook = model.get_submodule(layer).register_forward_hook(lambda _m, _x, y: found.append(y))
    with torch.no_grad():
        model(pixel_values=inputs)
    hook.remove()
    return found[0].double().flatten(0, -2)


def test_statistics_are_those_that_torch_measures(folder: Path, tmp_path: Path) -> None:
    isthmus.merge(recipe(folder, "resnet", {"step": "reset"}), tmp_path / "out")
    isthmus.merge(recipe(folder, "resnet", None), tmp_path / "plain")
    reference = loaded(tmp_path / "plain")
    for module in reference.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None
    reference.train()
    with torch.no_grad():
        reference(pixel_values=pixels(folder))
    found, expected = load_file(tmp_path / "out" / "model.safetensors"), reference.state_dict()
    changed = 0
    for name, value in load_file(tmp_path / "plain" / "model.safetensors").items():
        if "running" in name:
            changed += 1
            assert not torch.allclose(found[name], value, rtol=1e-2, atol=1e-3)
            # The order of the pictures is another; in one batch that changes the last digits only.
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(found[name], value)
    assert changed


def test_the_note_says_what_was_done_and_the_result_is_whole(folder: Path, tmp_path: Path) -> None:
    outcome = isthmus.merge(recipe(folder, "resnet", {}), tmp_path / "out")
    assert any(
        "finished by reset" in note and f"on {COUNT} examples" in note for note in outcome.notes
    )
    assert verify(tmp_path / "out").problems == ()


@pytest.mark.parametrize("weights", [(1, 1), (3, 1)])
def test_repaired_activations_lie_between_those_of_the_models(
    weights: tuple[int, int], folder: Path, tmp_path: Path
) -> None:
    models = [
        {"model": str(folder / f"vit-{name}"), "parameters": {"weight": weight}}
        for name, weight in zip("ab", weights, strict=True)
    ]
    given = recipe(folder, "vit", {"step": "repair"}, models=models)
    isthmus.merge(given, tmp_path / "out")
    isthmus.merge({**given, "finish": None}, tmp_path / "plain")
    share = weights[1] / sum(weights)
    inputs, layer = pixels(folder), "vit.layers.1.mlp.fc2"
    a, b, plain, out = (
        heard(loaded(place), layer, inputs)
        for place in (folder / "vit-a", folder / "vit-b", tmp_path / "plain", tmp_path / "out")
    )
    for figure in (torch.mean, lambda x, dim: torch.std(x, dim, unbiased=False)):
        goal = (1 - share) * figure(a, dim=0) + share * figure(b, dim=0)
        torch.testing.assert_close(figure(out, dim=0), goal, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(figure(plain, dim=0), goal, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("kind", "step"), [("resnet", "reset"), ("vit", "repair")])
def test_a_merge_that_dies_while_it_finishes_ends_in_the_same_bytes(
    kind: str, step: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = recipe(folder, kind, {"step": step}, name="finished")
    isthmus.merge(given, tmp_path / "whole")
    write = finishing._written

    def dies(changed, *more):
        some = dict(list(changed.items())[:3])
        list(write(some, *more))
        raise KeyboardInterrupt

    monkeypatch.setattr(finishing, "_written", dies)
    with pytest.raises(KeyboardInterrupt):
        isthmus.merge(given, tmp_path / "out")
    monkeypatch.undo()
    isthmus.merge(given, tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_workers_change_nothing(folder: Path, tmp_path: Path) -> None:
    given = recipe(folder, "vit", {"step": "repair"}, name="finished")
    for workers in (1, 4):
        isthmus.merge(given, tmp_path / str(workers), workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "4")


def test_other_data_is_another_merge(folder: Path, tmp_path: Path) -> None:
    given = recipe(folder, "resnet", {}, name="finished")
    isthmus.merge(given, tmp_path / "out")
    other = recipe(folder, "resnet", {"examples": 12}, name="finished")
    with pytest.raises(IsthmusError, match="of another recipe"):
        isthmus.merge(other, tmp_path / "out", resume=True)


def test_aligned_models_are_repaired_by_the_aligned_ones(folder: Path, tmp_path: Path) -> None:
    """Hidden units of b in another order change nothing, once b is aligned."""
    shutil.copytree(folder / "vit-a", tmp_path / "b")
    model = vit(0)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for layer in model.vit.layers:
            layer.mlp.fc1.weight.copy_(layer.mlp.fc1.weight[order])
            layer.mlp.fc1.bias.copy_(layer.mlp.fc1.bias[order])
            layer.mlp.fc2.weight.copy_(layer.mlp.fc2.weight[:, order])
    model.save_pretrained(tmp_path / "b")
    models = [{"model": str(folder / "vit-a")}, {"model": str(tmp_path / "b")}]
    given = recipe(folder, "vit", {"step": "repair"}, models=models, align="weights")
    isthmus.merge(given, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in load_file(folder / "vit-a" / "model.safetensors").items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "finish", "more", "words"),
    [
        ("vit", {"step": "reset"}, {}, "measures BatchNorm's running statistics, and .* has none"),
        ("vit", {"step": "repair"}, {"parameters": {"weight": [1, 2]}}, "is no mean of two"),
        ("vit", {"step": "repair"}, {"parameters": {"weight": 1, "normalize": False}}, "no mean"),
    ],
)
def test_refused_before_anything_is_written(kind, finish, more, words, folder, tmp_path) -> None:
    with pytest.raises(PlanError, match=words):
        isthmus.merge(recipe(folder, kind, finish, **more), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_three_models_and_negative_weights_are_no_mean_of_two(folder: Path, tmp_path: Path) -> None:
    three = [{"model": str(folder / f"vit-{name}")} for name in "abc"]
    signs = [
        {"model": str(folder / f"vit-{name}"), "parameters": {"weight": weight}}
        for name, weight in (("a", 2), ("b", -1))
    ]
    for models in (three, signs):
        with pytest.raises(PlanError, match="is no mean of two"):
            isthmus.merge(
                recipe(folder, "vit", {"step": "repair"}, models=models), tmp_path / "out"
            )


def test_missing_data(folder: Path, tmp_path: Path) -> None:
    given = recipe(folder, "resnet", {"data": str(folder / "nothing")})
    with pytest.raises(CalibrationError, match="nothing"):
        isthmus.merge(given, tmp_path / "out")


def test_weights_that_are_not_finite(folder: Path, tmp_path: Path) -> None:
    model = resnet(1)
    with torch.no_grad():
        model.resnet.embedder.embedder.convolution.weight.fill_(3e38)
    saved(model, tmp_path / "b")
    models = [{"model": str(folder / "resnet-a")}, {"model": str(tmp_path / "b")}]
    with pytest.raises(PathError, match="not finite"):
        isthmus.merge(recipe(folder, "resnet", {}, models=models), tmp_path / "out")


@pytest.mark.parametrize(
    ("finish", "words"),
    [
        ("reset", "finish must be a mapping"),
        ({"step": "reset"}, "finish must be a mapping with a step and data"),
        ({"step": "rest", "data": "x"}, "step"),
        ({"data": "x", "example": 3}, "example"),
        ({"data": "x", "examples": 1}, "examples"),
    ],
)
def test_what_the_recipe_may_say(finish: object, words: str, folder: Path) -> None:
    content = {**recipe(folder, "resnet", None), "finish": finish}
    with pytest.raises(RecipeError, match=words):
        isthmus.load_recipe(yaml.safe_dump(content))
