"""The experiments with paths, in small."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace

import pytest
import torch

from isthmus.errors import IsthmusError
from isthmus.lab.data.corpora import load_genre
from isthmus.lab.networks.mlps import mlp, mlp_spec
from isthmus.lab.networks.resnets import ResNet, resnet_spec
from isthmus.lab.networks.state import state
from isthmus.lab.paths import gpt2
from isthmus.lab.paths.gpt2 import (
    LanguageTraining,
    configuration,
    examples,
    network,
    optimizers,
    tokenizer,
)
from isthmus.lab.paths.mlps import Mlps, MlpSettings
from isthmus.lab.paths.results import Joined, PathResults
from isthmus.lab.paths.tables import grid_of
from isthmus.lab.paths.training import fit, kept, shuffled
from isthmus.symmetry.matching import match_weights

TINY = MlpSettings(
    widths=(12,), pairs=((0, 1),), epochs=3, points=5, learned=4, bend=20, many=3, test=1200
)
SMALL = LanguageTraining(
    width=16, layers=1, heads=2, vocabulary=300, context=8, batch=4, steps=3, warmup=1
)


@pytest.mark.parametrize("kind", ["batch", "layer"])
def test_residual_networks_compute_the_same_after_any_element(kind):
    torch.manual_seed(0)
    made = ResNet(4, 2, kind).double()
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            if tensor.is_floating_point():
                tensor.add_(0.3 * torch.rand_like(tensor))
            assert name in resnet_spec(made).tensors
    made.eval()
    spec = resnet_spec(made)
    spec.check({name: tuple(tensor.shape) for name, tensor in made.state_dict().items()})
    x = torch.randn(3, 1, 12, 12, dtype=torch.float64)
    with torch.no_grad():
        before = made(x)
        old = state(made)
        moved = spec.act(spec.random(torch.Generator().manual_seed(1)), old)
        made.load_state_dict(moved)
        assert torch.allclose(made(x), before, atol=1e-10)
    assert match_weights(spec, old, moved).distance < 1e-6


def test_mlps_compute_the_same_after_any_element():
    made = mlp(5, 7, 3, 4).double()
    spec = mlp_spec(7, 3)
    x = torch.randn(3, 5, dtype=torch.float64)
    with torch.no_grad():
        before = made(x)
        made.load_state_dict(spec.act(spec.random(torch.Generator().manual_seed(1)), state(made)))
        assert torch.allclose(made(x), before, atol=1e-10)


def test_a_pair_of_mlps_on_every_path(tmp_path):
    found = Mlps(TINY, tmp_path).pair(12, (0, 1))
    assert [(one.alignment, one.path) for one in found] == [
        *((name, "linear") for name in ("none", "weights", "activations", "learned")),
        ("none", "one bend"),
        ("weights", "one bend"),
    ]
    ends = {round(one.figures["train ends"], 6) for one in found}
    assert len(ends) == 1  # aligned networks compute the same
    by_name = {(one.alignment, one.path): one for one in found}
    straight, matched = by_name["none", "linear"], by_name["weights", "linear"]
    assert matched.figures["distance"] < straight.figures["distance"]
    assert by_name["learned", "linear"].figures["train middle"] <= (
        matched.figures["train middle"] + 1e-9
    )
    for one in found:
        losses = one.curves["train loss"]
        excess = [
            loss - ((1 - t) * losses[0] + t * losses[-1])
            for t, loss in zip(one.ts, losses, strict=True)
        ]
        assert one.figures["train barrier"] == pytest.approx(max(excess), abs=1e-12)


def test_several_mlps(tmp_path):
    found = Mlps(TINY, tmp_path).several(12)
    apart = {one.alignment: one.figures["rest"] for one in found}
    assert apart["weights, Fréchet mean"] <= apart["none"]
    assert apart["weights, to the first"] <= apart["none"]


def test_a_network_is_trained_once_and_other_settings_do_not_replace_it(tmp_path):
    made = []

    def train():
        made.append(1)
        return mlp(2, 3, 1, 2)

    first = kept(tmp_path / "net", {"a": 1}, train)
    kept(tmp_path / "net", {"a": 2}, train)
    again = kept(tmp_path / "net", {"a": 1}, train)
    assert len(made) == 2
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_training_that_diverges_says_so():
    data = (torch.randn(64, 3), torch.zeros(64, dtype=torch.int64))
    made = mlp(3, 4, 1, 2)
    sgd = torch.optim.SGD(made.parameters(), lr=1e30)
    with pytest.raises(IsthmusError, match=r"loss of Sequential is .*\n.*learning rate"):
        fit(
            made,
            shuffled(data, 8, 0),
            lambda module, batch: (module(batch[0]) ** 2).mean(),
            [sgd],
            10,
        )


def test_language_models_are_the_same_for_one_seed():
    rows = torch.randint(300, (40, 8), generator=torch.Generator().manual_seed(0))
    for name in ("adamw", "muon"):
        one, other, apart = (state(gpt2.trained(rows, SMALL, name, seed)) for seed in (0, 0, 1))
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert any(not torch.equal(one[key], apart[key]) for key in one)


def test_muon_takes_the_matrices_of_blocks_and_no_others():
    made = network(SMALL)
    adamw, muon = optimizers(made, SMALL, "muon")
    names = {id(parameter): name for name, parameter in made.named_parameters()}
    matrices = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert matrices == {
        name for name, p in made.named_parameters() if ".h." in name and p.ndim == 2
    }
    rest = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert rest | matrices == set(names.values())
    assert not rest & matrices
    (whole,) = optimizers(made, SMALL, "adamw")
    assert sum(len(group["params"]) for group in whole.param_groups) == len(names)


def test_tokens_come_back_as_text():
    text = "the kernel takes the lock, and the lock takes the kernel: " * 40
    made = tokenizer(text, 280)
    rows = examples(made, text, 8)
    assert rows.shape[1] == 8
    assert int(rows.max()) < 280
    assert text.startswith(made.decode(rows[:4].flatten().tolist()))


def test_the_configuration_is_that_of_the_network():
    assert (
        network(SMALL).config.to_dict().items()
        >= {
            key: value for key, value in configuration(SMALL).items() if key != "architectures"
        }.items()
    )
    assert "lm_head.weight" in dict(network(SMALL, tied=False).named_parameters())


def test_genres_without_data(tmp_path):
    with pytest.raises(IsthmusError, match="make data"):
        load_genre(tmp_path, "kernel", 10, 10)
    with pytest.raises(IsthmusError, match=r"no genre 'poems'.*\n.*kernel"):
        load_genre(tmp_path, "poems", 10, 10)


def test_a_genre_in_two_parts(tmp_path):
    folder = tmp_path / "corpora" / "linux-doc-6.1"
    folder.mkdir(parents=True)
    text = "".join(f"line {number:05d} of the documentation\n" for number in range(2000))
    with gzip.open(folder / "one.rst.gz", "wt") as file:
        file.write(text)
    small, large = (load_genre(tmp_path, "kernel", size, 4000) for size in (3000, 9000))
    assert small.held_out == large.held_out
    assert large.training.startswith(small.training)
    whole = [
        {
            line
            for line in part.splitlines()
            if re.fullmatch(r"line \d{5} of the documentation", line)
        }
        for part in (large.held_out, large.training)
    ]
    assert all(whole)
    assert not whole[0] & whole[1]
    with pytest.raises(IsthmusError, match="fewer characters"):
        load_genre(tmp_path, "kernel", 1_000_000, 10)


def test_tables_and_files(tmp_path):
    joined = tuple(
        Joined("width 3", "none", "linear", str(pair), {"train barrier": value})
        for pair, value in enumerate((1.0, 3.0))
    )
    results = PathResults("mlp", {"a": 1}, {"train barrier": "barrier"}, joined, (), {})
    assert grid_of(results).rows == (("width 3", "none", "linear", "2", "2.000 ±1.414"),)
    results.write(tmp_path / "results.json")
    read = json.loads((tmp_path / "results.json").read_text())
    assert read["lines"][0]["means"] == {"train barrier": 2.0}
    alone = replace(results, joined=joined[:1])
    assert grid_of(alone).rows[0][-1] == "1.000"
