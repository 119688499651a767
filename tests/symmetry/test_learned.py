"""Matching through the loss on the path."""

import pytest
import torch

from isthmus.errors import SymmetryError
from isthmus.symmetry.learned import match_learned, sinkhorn
from isthmus.symmetry.matching import match_weights
from tests.symmetry.networks import decoder, distance, drawn, mlp, run_mlp, seeded

ESTIMATORS = ["straight-through", "sinkhorn"]
estimators = pytest.mark.parametrize("estimator", ESTIMATORS)


def two_trained(width=24, seeds=(0, 1)):
    """Two networks fitted to one function from different starts, and their loss."""
    spec, shapes = mlp(6, width, width, 3)
    x = torch.randn(256, 6, generator=seeded(7))
    y = (x[:, :3] * x[:, 3:]).tanh()

    def loss(parameters, step=0):
        del step
        return (run_mlp(parameters, x) - y).square().mean()

    found = []
    for seed in seeds:
        model = {n: p.requires_grad_() for n, p in drawn(shapes, seeded(seed), torch.float).items()}
        optimizer = torch.optim.Adam(model.values(), lr=0.01)
        for _ in range(300):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
        found.append({name: p.detach() for name, p in model.items()})
    return spec, *found, loss


@pytest.fixture(scope="module")
def pair():
    return two_trained()


def middle(spec, a, b, element):
    moved = spec.act(element, b)
    return {name: (a[name] + moved[name]) / 2 for name in a}


@pytest.mark.parametrize(("estimator", "at_most"), [("straight-through", 0.97), ("sinkhorn", 0.7)])
def test_the_loss_between_falls_below_that_of_a_match_by_weights(pair, estimator, at_most):
    spec, a, b, loss = pair
    start = match_weights(spec, a, b).element
    found = match_learned(spec, a, b, loss, start=start, steps=200, estimator=estimator)
    before, after = (float(loss(middle(spec, a, b, g))) for g in (start, found.element))
    assert found.losses[0] == pytest.approx(before, rel=1e-4)
    assert found.losses[found.step] == pytest.approx(after, rel=1e-4)
    assert after < at_most * before
    x = torch.randn(30, 6, generator=seeded(1))
    torch.testing.assert_close(
        run_mlp(spec.act(found.element, b), x), run_mlp(b, x), rtol=1e-3, atol=1e-3
    )


@estimators
def test_it_is_never_worse_than_the_start_on_what_it_evaluates(pair, estimator):
    spec, a, b, loss = pair
    held = torch.randn(100, 6, generator=seeded(8))

    def evaluate(parameters):
        return float(run_mlp(parameters, held).square().mean())

    found = match_learned(
        spec, a, b, loss, steps=20, every=5, estimator=estimator, evaluate=evaluate
    )
    assert sorted(found.losses) == [0, 5, 10, 15, 20]
    assert found.losses[found.step] == min(found.losses.values())
    assert evaluate(middle(spec, a, b, found.element)) == pytest.approx(
        min(found.losses.values()), rel=1e-4
    )


def test_no_steps_return_the_start(pair):
    spec, a, b, loss = pair
    start = match_weights(spec, a, b)
    found = match_learned(spec, a, b, loss, start=start.element, steps=0)
    assert found.step == 0
    assert found.distance == pytest.approx(start.distance, abs=1e-6)
    assert found.before == start.before


@estimators
def test_the_same_seed_gives_the_same_element(pair, estimator):
    spec, a, b, loss = pair
    one, two = (
        match_learned(spec, a, b, loss, steps=10, estimator=estimator, seed=4) for _ in range(2)
    )
    assert one.losses == two.losses


def test_gradients_reach_heads_scales_and_rotations():
    """A loss that is the distance itself: the copy comes nearer, on every kind of axis."""
    spec, shapes = decoder("orthogonal")
    generator = seeded(3)
    a = drawn(shapes, generator)
    change = {axis: g.match(_noise(g, generator, 0.3)) for axis, g in spec.axes.items()}
    b = spec.act(change, a)

    def loss(parameters, step):
        del step
        return sum((parameters[name] - a[name]).square().sum() for name in a)

    found = match_learned(spec, a, b, loss, steps=60, every=10)
    assert distance(a, spec.act(found.element, b)) < 0.7 * found.before


def _noise(group, generator, size):
    return {
        role: torch.eye(group.size(role), dtype=torch.float64)
        + size * torch.randn(*[group.size(role)] * 2, generator=generator, dtype=torch.float64)
        for role in group.roles
    }


def test_sinkhorn_is_doubly_stochastic_and_keeps_gradients():
    logits = 3 * torch.randn(7, 7, generator=seeded(0), dtype=torch.float64)
    soft = sinkhorn(logits.requires_grad_(), sweeps=500)
    torch.testing.assert_close(soft.sum(0), torch.ones(7, dtype=torch.float64))
    torch.testing.assert_close(soft.sum(1), torch.ones(7, dtype=torch.float64), rtol=0, atol=1e-6)
    weights = torch.randn(7, 7, generator=seeded(1), dtype=torch.float64)
    (soft * weights).sum().backward()
    # Adding a constant to a row changes nothing, so gradients sum to 0 along it.
    assert logits.grad.abs().max() > 1e-3
    assert logits.grad.sum(1).abs().max() < 1e-6


def test_bad_input(pair):
    spec, a, b, loss = pair
    with pytest.raises(SymmetryError, match="no estimator 'softmax'"):
        match_learned(spec, a, b, loss, estimator="softmax")
    with pytest.raises(SymmetryError, match="is nan at the start"):
        match_learned(spec, a, b, lambda parameters, step: loss(parameters, step) * float("nan"))
