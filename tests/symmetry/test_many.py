"""Several networks in common coordinates."""

from itertools import pairwise

import pytest
import torch

from isthmus.errors import MethodError, SymmetryError
from isthmus.symmetry.many import match_many
from isthmus.symmetry.matching import match_weights
from tests.symmetry.networks import decoder, distance, drawn, mlp, run_mlp, seeded

NETWORKS = {"mlp": mlp(6, 16, 16, 4), "decoder": decoder("orthogonal", layers=1)}
networks = pytest.mark.parametrize(("spec", "shapes"), NETWORKS.values(), ids=NETWORKS)


def family(spec, shapes, count, spread=0.3, seed=0):
    """One network, noise for each copy, and a random element on each."""
    generator = seeded(seed)
    center = drawn(shapes, generator)
    models = []
    for _ in range(count):
        noise = drawn(shapes, generator)
        near = {name: x + spread * noise[name] for name, x in center.items()}
        models.append(spec.act(spec.random(generator), near))
    return models


def average(spec, models, elements, weights):
    moved = [spec.act(g, model) for g, model in zip(elements, models, strict=True)]
    return {
        name: sum(w * model[name] for w, model in zip(weights, moved, strict=True))
        for name in models[0]
    }


@networks
def test_identical_networks_modulo_the_group_are_at_distance_0(spec, shapes):
    models = family(spec, shapes, 4, spread=0)
    found = match_many(spec, models)
    assert found.converged
    assert found.distances.max() < 1e-6
    assert match_weights(spec, models[0], found.mean).distance < 1e-6


@networks
def test_the_mean_is_the_average_of_the_aligned_networks(spec, shapes):
    models = family(spec, shapes, 3)
    weights = [0.5, 0.3, 0.2]
    found = match_many(spec, models, weights=weights)
    assert found.converged
    assert distance(found.mean, average(spec, models, found.elements, weights)) < 1e-6
    assert all(y <= x + 1e-12 for x, y in pairwise(found.functional))


@networks
def test_no_random_alignment_is_nearer(spec, shapes):
    models = family(spec, shapes, 3)
    found = match_many(spec, models)
    generator = seeded(5)
    nearest = found.functional[-1]
    worse = match_many(spec, [spec.act(spec.random(generator), model) for model in models])
    assert worse.functional[-1] == pytest.approx(nearest, rel=1e-5)


@networks
def test_cycles_close(spec, shapes):
    models = family(spec, shapes, 3)
    g = match_many(spec, models).elements
    around = spec.identity()
    for i in range(3):
        step = spec.compose(spec.inverse(g[(i + 1) % 3]), g[i])
        around = spec.compose(step, around)
    assert distance(models[0], spec.act(around, models[0])) < 1e-9


@networks
@pytest.mark.parametrize("count", [2, 4])
def test_the_order_of_the_networks_does_not_matter(spec, shapes, count):
    models = family(spec, shapes, count)
    weights = [0.1, 0.2, 0.3, 0.4][:count]
    order = [3, 1, 0, 2] if count == 4 else [1, 0]
    one = match_many(spec, models, weights=weights)
    other = match_many(spec, [models[i] for i in order], weights=[weights[i] for i in order])
    assert other.functional[-1] == pytest.approx(one.functional[-1], rel=1e-5)
    torch.testing.assert_close(other.distances, one.distances[order], rtol=1e-4, atol=1e-5)
    same = match_weights(spec, one.mean, other.mean, balanced=False)
    assert same.distance < 1e-4


def test_weights_pull_the_mean():
    spec, shapes = NETWORKS["mlp"]
    models = family(spec, shapes, 3)
    alone = match_many(spec, models, weights=[0, 1, 0])
    assert alone.distances[1] < 1e-9
    heavy = match_many(spec, models, weights=[8, 1, 1])
    assert heavy.distances[0] < heavy.distances[1:].min()


def test_functions_of_the_aligned_networks_stay_and_whole_numbers_too():
    spec, shapes = NETWORKS["mlp"]
    models = family(spec, shapes, 3)
    found = match_many(spec, models)
    x = torch.randn(9, 6, generator=seeded(1), dtype=torch.float64)
    for g, model in zip(found.elements, models, strict=True):
        torch.testing.assert_close(run_mlp(spec.act(g, model), x), run_mlp(model, x))


def test_float32_comes_back_in_float32():
    spec, shapes = NETWORKS["mlp"]
    models = [{name: x.float() for name, x in model.items()} for model in family(spec, shapes, 2)]
    assert {x.dtype for x in match_many(spec, models).mean.values()} == {torch.float32}


def test_bad_input():
    spec, shapes = NETWORKS["mlp"]
    models = family(spec, shapes, 2)
    with pytest.raises(SymmetryError, match="no networks"):
        match_many(spec, [])
    with pytest.raises(MethodError, match="weights of shape"):
        match_many(spec, models, weights=[1.0])
    wide = drawn({**shapes, "0.bias": (17,)}, seeded(0))
    with pytest.raises(SymmetryError, match=r"'0.bias' has the shape"):
        match_many(spec, [*models, wide])
