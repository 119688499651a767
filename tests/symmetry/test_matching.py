"""Matching by weights: a transformed copy comes back, the objective never falls."""

from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch

from isthmus.errors import SymmetryError
from isthmus.symmetry.activation_matching import match_activations
from isthmus.symmetry.heads import Heads
from isthmus.symmetry.identity import Identity
from isthmus.symmetry.matching import match_weights
from isthmus.symmetry.matrix_groups import GeneralLinear
from isthmus.symmetry.monomial import Monomial
from isthmus.symmetry.moved import Moved
from isthmus.symmetry.spec import FREE, Segment, Spec, on
from tests.symmetry.networks import STREAMS, decoder, distance, drawn, mlp, run_mlp, seeded

COPIES = {
    "relu mlp": mlp(8, 20, 20, 20, 5),
    "tanh mlp": mlp(8, 20, 20, 5, factors="sign"),
    **{stream: decoder(stream) for stream in STREAMS},
    "four queries": decoder("signed", groups=1, queries=4),
    "one query": decoder("orthogonal", groups=4, queries=1),
}
copies = pytest.mark.parametrize(("spec", "shapes"), COPIES.values(), ids=COPIES)


@copies
@pytest.mark.parametrize("seed", range(3))
def test_a_transformed_copy_comes_back(spec, shapes, seed):
    generator = seeded(seed)
    a = drawn(shapes, generator)
    b = spec.act(spec.random(generator), a)
    found = match_weights(spec, a, b)
    assert found.before > 0.3
    assert found.distance < 1e-7
    assert found.converged
    back = spec.act(found.element, b)
    assert distance(a, back) == pytest.approx(found.distance, abs=1e-12)


@copies
def test_the_objective_never_falls_and_is_the_cosine(spec, shapes):
    generator = seeded(5)
    a, b = drawn(shapes, generator), drawn(shapes, generator)
    found = match_weights(spec, a, b, balanced=False)
    assert all(after >= before - 1e-12 for before, after in pairwise(found.history))
    moved = spec.act(found.element, b)
    inner = sum(float((a[name] * moved[name]).sum()) for name in a)
    sizes = [sum(float(x.square().sum()) for x in model.values()) ** 0.5 for model in (a, b)]
    assert found.history[-1] == pytest.approx(inner / (sizes[0] * sizes[1]), abs=1e-9)
    assert found.history[-1] > found.history[0] + 0.1
    assert found.sweeps == len(found.history) - 1


def test_the_function_stays_in_the_coordinates_of_the_first():
    spec, shapes = mlp(8, 20, 20, 5)
    generator = seeded(0)
    a, b = drawn(shapes, generator), drawn(shapes, generator)
    found = match_weights(spec, a, b)
    x = torch.randn(9, 8, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(run_mlp(spec.act(found.element, b), x), run_mlp(b, x))
    assert found.distance < found.before


@copies
def test_what_is_near_already_does_not_move_away(spec, shapes):
    generator = seeded(11)
    a, noise = drawn(shapes, generator), drawn(shapes, generator)
    for size in (0.0, 1e-3, 0.1):
        b = {name: a[name] + size * noise[name] for name in a}
        found = match_weights(spec, a, b)
        assert found.distance <= found.before
        assert distance(a, spec.act(found.element, b)) == pytest.approx(found.distance, abs=1e-12)


def test_a_second_match_from_the_result_finds_nothing_better():
    spec, shapes = decoder("signed")
    generator = seeded(1)
    a, b = drawn(shapes, generator), drawn(shapes, generator)
    first = match_weights(spec, a, b)
    second = match_weights(spec, a, b, start=first.element)
    assert second.history[0] == pytest.approx(first.history[-1], abs=1e-9)
    assert second.history[-1] == pytest.approx(first.history[-1], abs=1e-9)


def test_the_same_seed_gives_the_same_element_and_restarts_never_lose():
    spec, shapes = mlp(6, 16, 16, 16, 4)
    generator = seeded(2)
    a, b = drawn(shapes, generator), drawn(shapes, generator)
    one, same = (match_weights(spec, a, b, seed=3) for _ in range(2))
    assert all(torch.equal(one.element[h].order, same.element[h].order) for h in spec.axes)
    more = match_weights(spec, a, b, seed=3, restarts=5)
    assert more.history[-1] >= one.history[-1]


def test_only_the_named_axes_move():
    spec, shapes = mlp(6, 16, 16, 4)
    generator = seeded(3)
    a = drawn(shapes, generator)
    change = {**spec.identity(), "h1": spec.axes["h1"].random(generator)}
    b = spec.act(change, a)
    found = match_weights(spec, a, b, axes=["h1"])
    assert found.distance < 1e-9
    assert torch.equal(found.element["h0"].order, torch.arange(16))
    everywhere = spec.act(spec.random(generator), a)
    start = match_weights(spec, a, everywhere, axes=["h0"]).element
    both = match_weights(spec, a, everywhere, axes=["h1"], start=start)
    assert torch.equal(both.element["h0"].order, start["h0"].order)
    assert both.distance < found.before


class Counted(Mapping):
    """Tensors read when asked for, and how many are alive between two questions."""

    def __init__(self, tensors):
        self.tensors, self.read = tensors, 0

    def __getitem__(self, name):
        self.read += 1
        return self.tensors[name].clone()

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)


def test_lazy_mappings_of_few_digits():
    spec, shapes = decoder("permutation")
    generator = seeded(4)
    a = drawn(shapes, generator, torch.bfloat16)
    lazy = Counted(spec.act(spec.random(generator), a))
    found = match_weights(spec, Counted(a), lazy)
    assert lazy.read > len(shapes)
    assert found.distance < 0.01
    assert Moved(spec, found.element, lazy)["embed"].dtype == torch.bfloat16


def test_an_axis_on_both_dimensions_of_a_tensor():
    spec = Spec({"h": Monomial(8)}, {"w": (on("h"), on("h", "dual")), "in": (on("h"), FREE)})
    generator = seeded(6)
    a = drawn({"w": (8, 8), "in": (8, 2)}, generator)
    b = spec.act(spec.random(generator), a)
    assert match_weights(spec, a, b).distance < 1e-9
    other = drawn({"w": (8, 8), "in": (8, 2)}, generator)
    history = match_weights(spec, a, other).history
    assert all(y >= x for x, y in pairwise(history))


def test_fused_projections():
    """Queries, keys and values as parts of one dimension."""
    heads = Heads(2, 1, GeneralLinear(3), GeneralLinear(3))
    parts = tuple(
        Segment("heads", role, slice(first, first + 6))
        for role, first in (("query", 0), ("key", 6), ("value", 12))
    )
    spec = Spec({"heads": heads}, {"qkv": (FREE, parts), "o": (on("heads", "output"), FREE)})
    generator = seeded(7)
    a = drawn({"qkv": (9, 18), "o": (6, 9)}, generator)
    b = spec.act(spec.random(generator), a)
    assert match_weights(spec, a, b).distance < 1e-7


def test_other_widths_names_and_numbers_are_refused():
    spec, shapes = mlp(4, 6, 3)
    a = drawn(shapes, seeded(0))
    wide = drawn({**shapes, "0.weight": (7, 4)}, seeded(1))
    with pytest.raises(SymmetryError, match=r"'0.weight' has the shape \[6, 4\].*\[7, 4\]"):
        match_weights(spec, a, wide)
    with pytest.raises(SymmetryError, match=r"second network has no tensor '0.bias'"):
        match_weights(spec, a, {name: x for name, x in a.items() if name != "0.bias"})
    broken = {**a, "1.bias": a["1.bias"] * float("nan")}
    with pytest.raises(SymmetryError, match=r"'1.bias' of the second network holds NaN"):
        match_weights(spec, a, broken)
    with pytest.raises(SymmetryError, match="no axis 'h7'"):
        match_weights(spec, a, a, axes=["h7"])
    with pytest.raises(SymmetryError, match="has also 1 tensors, such as 'extra'"):
        match_weights(spec, {**a, "extra": a["1.bias"]}, a)


def test_nothing_to_match():
    spec = Spec({"h": Identity(3)}, {"w": (on("h"), FREE)})
    a = {"w": torch.zeros(3, 2)}
    found = match_weights(spec, a, a)
    assert found.distance == 0
    assert found.converged
    assert match_weights(Spec({}, {"w": (FREE, FREE)}), a, a).sweeps == 0


def test_activations_recover_permutations_and_rotations():
    spec, shapes = mlp(8, 20, 20, 5, factors="one")
    generator = seeded(8)
    a = drawn(shapes, generator)
    b = spec.act(spec.random(generator), a)
    x = torch.randn(200, 8, generator=generator, dtype=torch.float64)
    crosses = {}
    for i in range(2):
        hidden = [_hidden(model, x, i) for model in (a, b)]
        crosses[f"h{i}"] = hidden[0].T @ hidden[1]
    assert distance(a, spec.act(match_activations(spec, crosses), b)) < 1e-12


def test_activations_of_heads_come_by_role():
    heads = Heads(2, 2, GeneralLinear(3), GeneralLinear(3))
    spec = Spec({"heads": heads}, {"v": (on("heads", "value"), FREE)})
    generator = seeded(9)
    h = torch.randn(6, 50, generator=generator, dtype=torch.float64)
    g = heads.match({"value": torch.randn(6, 6, generator=generator, dtype=torch.float64)})
    moved = heads.act(g, h, "value")
    found = match_activations(spec, {"heads": {"value": h @ moved.T}})
    torch.testing.assert_close(heads.act(found["heads"], moved, "value"), h)
    with pytest.raises(SymmetryError, match="have the role 'vector'"):
        match_activations(spec, {"heads": h @ moved.T})


def test_balancing_around_a_match_by_activations():
    spec, shapes = mlp(8, 20, 5)
    generator = seeded(10)
    a = drawn(shapes, generator)
    change = spec.random(generator)
    b = spec.act(change, a)
    permutation = {"h0": spec.axes["h0"].inverse(change["h0"])._replace(factors=torch.ones(20))}
    found = match_weights(spec, a, b, start=permutation, sweeps=0)
    assert found.distance < 1e-7


def test_bad_crosses_are_refused():
    spec, _ = mlp(4, 6, 3)
    with pytest.raises(SymmetryError, match="axis 'h5', which has no group"):
        match_activations(spec, {"h5": torch.eye(6)})
    with pytest.raises(SymmetryError, match=r"shape \[5, 5\], not \[6, 6\]"):
        match_activations(spec, {"h0": torch.eye(5)})
    with pytest.raises(SymmetryError, match="NaN or infinite"):
        match_activations(spec, {"h0": torch.full((6, 6), float("nan"))})


def _hidden(model, x, layer):
    for i in range(layer + 1):
        x = (x @ model[f"{i}.weight"].T + model[f"{i}.bias"]).relu()
    return x
