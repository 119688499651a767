"""Models aligned by what they compute on examples."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

import isthmus
from isthmus.checkpoints import open_checkpoint
from isthmus.engine.verify import verify
from isthmus.errors import OutputError, RecipeError, SymmetryError
from isthmus.models.checkpoint_tensors import symmetries
from isthmus.paths.distance import relative_distance

from ..cli.test_connect import WORDS, add_tokenizer
from .test_align import apart, model, tensors, transformed


def shuffled(source, folder):
    """A copy whose hidden units stand in another order, and that is the same otherwise."""
    with open_checkpoint(str(source)) as checkpoint:
        spec = symmetries(checkpoint, "auto").spec
    drawn = spec.random(torch.Generator().manual_seed(2))
    element = {axis: drawn[axis] for axis in spec.axes if "mlp" in axis}
    assert element
    shutil.copytree(source, folder)
    moved = {
        name: spec.act_on({**spec.identity(), **element}, name, x).contiguous()
        for name, x in tensors(source).items()
    }
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def models(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    add_tokenizer(model(folder / "a", request.param))
    transformed(folder / "a", folder / "b")
    shuffled(folder / "a", folder / "shuffled")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 40, (60, 24), generator=generator).tolist()
    lines = [json.dumps({"text": " ".join(WORDS[i] for i in row)}) for row in rows]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    return folder


def test_a_shuffled_copy_comes_back_by_its_activations(models, tmp_path):
    a, b = models / "a", models / "shuffled"
    outcome = isthmus.align(
        a, b, tmp_path / "out", by="activations", data=models / "texts.jsonl", examples=60
    )
    assert apart(tensors(a), tensors(b)) > 0.1
    assert apart(tensors(a), tensors(tmp_path / "out")) < 1e-4
    assert any("by activations: relative distance" in note for note in outcome.notes)
    assert verify(tmp_path / "out").problems == ()


def test_a_transformed_copy_comes_nearer_by_its_activations(models, tmp_path):
    """Not all the way: activations do not tell factors that are no rotations, as inside heads."""
    a, b = models / "a", models / "b"
    outcome = isthmus.align(
        a, b, tmp_path / "out", by="activations", data=models / "texts.jsonl", examples=60
    )
    before = relative_distance(tensors(a), tensors(b))
    assert relative_distance(tensors(a), tensors(tmp_path / "out")) < 0.5 * before
    assert any("its outputs differ by" in note for note in outcome.notes)


def test_a_copy_comes_nearer_by_its_loss(models, tmp_path):
    """From the match by weights the search goes on to wherever the loss half-way is lower."""
    a, b = models / "a", models / "b"
    isthmus.align(
        a, b, tmp_path / "out", by="learned", data=models / "texts.jsonl", examples=8, steps=2
    )
    before = relative_distance(tensors(a), tensors(b))
    assert relative_distance(tensors(a), tensors(tmp_path / "out")) < 0.1 * before


def test_in_a_recipe_with_data_beside_it_and_the_same_bytes_with_other_workers(models, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    (tmp_path / "texts.jsonl").write_bytes((models / "texts.jsonl").read_bytes())
    recipe.write_text(
        f"merge_method: linear\nmodels: [{{model: {models / 'a'}}}, {{model: {models / 'shuffled'}}}]\n"
        "parameters: {weight: 1.0}\nalign: {by: activations, data: texts.jsonl, examples: 60}\n"
    )
    outs = [tmp_path / "one", tmp_path / "four"]
    for out, workers in zip(outs, (1, 4), strict=True):
        isthmus.merge(recipe, out, workers=workers)
    assert apart(tensors(models / "a"), tensors(outs[0])) < 1e-3
    one, four = ((out / "model.safetensors").read_bytes() for out in outs)
    assert one == four


def test_other_data_is_another_merge(models, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_bytes((models / "texts.jsonl").read_bytes())
    recipe = {
        "merge_method": "passthrough",
        "models": [str(models / "b")],
        "align": {"to": str(models / "a"), "by": "activations", "data": str(texts)},
    }
    with isthmus.plan(recipe) as plan:
        before = plan.digest
    texts.write_text(texts.read_text() + '\n{"text": "w1 w2 w3"}')
    with isthmus.plan(recipe) as plan:
        assert plan.digest != before


def test_some_axes_alone(models, tmp_path):
    a, b = models / "a", models / "b"
    isthmus.align(a, b, tmp_path / "out", axes=["*mlp*"], residual="none")
    moved = {
        name
        for name, tensor in tensors(tmp_path / "out").items()
        if not torch.equal(tensor, tensors(b)[name])
    }
    assert moved
    assert all("mlp" in name for name in moved)


def test_an_axis_that_is_not_there(models, tmp_path):
    with pytest.raises(SymmetryError, match="has no axis 'mpl'") as caught:
        isthmus.align(models / "a", models / "b", tmp_path / "out", axes=["mpl"])
    assert "Its axes are: " in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"by": "activations"}, "data is missing"),
        ({"by": "weights", "data": "texts.jsonl"}, "by weights looks at no data"),
        ({"by": "activation"}, "by must be"),
        ({"by": "learned", "data": "x", "steps": 0}, "steps must be"),
        ({"axes": []}, "axes must be"),
    ],
)
def test_what_align_cannot_mean(given, said, models, tmp_path):
    recipe = {"merge_method": "passthrough", "models": [str(models / "b")], "align": given}
    with pytest.raises(RecipeError, match=said):
        isthmus.merge(recipe, tmp_path / "out")


def test_texts_that_are_not_there(models, tmp_path):
    with pytest.raises((RecipeError, OutputError, isthmus.errors.CalibrationError), match="none"):
        isthmus.align(
            models / "a", models / "b", tmp_path / "out", by="activations", data="none.jsonl"
        )
    assert not (tmp_path / "out").exists()
