"""Training of bends: closed forms, the bytes of a training that goes on, refusals."""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch

from isthmus.errors import PathError
from isthmus.paths.bends import train_bends
from isthmus.paths.curves import Bezier, Linear, PolygonalChain
from isthmus.paths.path import Path, grid
from isthmus.paths.profile import profile

from .points import flat, model

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01),
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def noisy(point, step):
    noise = torch.randn(16, generator=seeded(step), dtype=torch.float64)
    x = torch.cat([point["w"].flatten(), point["b"]])
    return ((x - noise).square() * x.cos().exp()).mean()


def start(curve=None, dtype=torch.float64) -> Path:
    return Path.straight(curve or PolygonalChain(2), model(0, dtype), model(1, dtype))


def ring(x):
    """A valley around the circle of radius 1, with a hill of height 1 in its middle."""
    return (x.square().sum() - 1).square()


def test_a_bend_goes_around_the_hill():
    a, b = {"x": torch.tensor([-1.0, 0.0])}, {"x": torch.tensor([1.0, 0.0])}

    def evaluate(point):
        return {"loss": float(ring(point["x"]))}

    start = Path(PolygonalChain(), (a, {"x": torch.tensor([0.0, 0.1])}, b))
    assert profile(start, evaluate, grid(25)).barrier().value > 0.9
    trained = train_bends(
        start,
        lambda point, _: ring(point["x"]),
        optimizer=partial(torch.optim.Adam, lr=0.05),
        steps=300,
        generator=seeded(),
        schedule=lambda step: 1 - step / 300,
    )
    # E ring over the two pieces has its least at a bend (0, y); found here on a grid of y.
    ys = torch.linspace(0, 2, 2001, dtype=torch.float64)
    t = torch.linspace(0, 1, 1001, dtype=torch.float64)[:, None]
    expected = ((((1 - t) ** 2 + (t * ys) ** 2) - 1) ** 2).mean(0)
    best = float(ys[expected.argmin()])
    bend = trained.path.bends[0]["x"]
    assert float(bend[0]) == pytest.approx(0, abs=0.15)
    assert float(bend[1]) == pytest.approx(best, abs=0.15)
    assert profile(trained.path, evaluate, grid(25)).barrier().value < 0.5
    assert len(trained.losses) == 300
    assert torch.equal(trained.path.at(0)["x"], a["x"])
    assert torch.equal(trained.path.at(1)["x"], b["x"])
    assert not bend.requires_grad


@pytest.mark.parametrize("curve", [PolygonalChain(2), Bezier(2)], ids=repr)
def test_one_step_of_sgd_is_a_finite_difference(curve):
    path = start(curve)
    trained = train_bends(
        path,
        noisy,
        optimizer=partial(torch.optim.SGD, lr=1.0),
        steps=1,
        generator=seeded(5),
    )
    t = float(torch.rand((), generator=seeded(5), dtype=torch.float64))
    for which in (1, 2):
        moved = flat(trained.path.points[which]) - flat(path.points[which])
        for place in (0, 7):
            sides = []
            for sign in (1, -1):
                bend = {name: path.points[which][name].clone() for name in path.points[0]}
                bend["w"].view(-1)[place] += sign * 1e-5
                points = [bend if k == which else point for k, point in enumerate(path.points)]
                sides.append(float(noisy(Path(curve, points).at(t), 0)))
            slope = (sides[0] - sides[1]) / 2e-5
            assert float(moved[place]) == pytest.approx(-slope, abs=1e-8)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("schedule", [None, lambda step: 1 - step / 40])
def test_a_training_that_goes_on_gives_the_same_bytes(optimizer, dtype, schedule):
    train = partial(train_bends, start(dtype=dtype), noisy, optimizer=optimizer, schedule=schedule)
    whole = train(steps=30, generator=seeded(3))
    files = []

    def keep(state):
        files.append(io.BytesIO())
        torch.save(state, files[-1])

    train(steps=17, generator=seeded(3), keep=keep, keep_every=5)
    assert len(files) == 4
    for file in files:
        file.seek(0)
        state = torch.load(file, weights_only=True)
        rest = train(steps=30, generator=seeded(99), state=state)
        assert rest.losses == whole.losses
        for one, other in zip(rest.path.bends, whole.path.bends, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
        assert torch.equal(rest.state["generator"], whole.state["generator"])


def test_the_same_seed_gives_the_same_bytes_and_another_does_not():
    train = partial(train_bends, start(), noisy, optimizer=OPTIMIZERS["adamw"], steps=5)
    one, same, other = (train(generator=seeded(seed)).losses for seed in (0, 0, 1))
    assert one == same
    assert one != other


def test_states_that_are_kept_stay_as_they_were():
    train = partial(train_bends, start(), noisy, optimizer=OPTIMIZERS["adamw"], steps=12)
    kept = []
    whole = train(generator=seeded(), keep=kept.append, keep_every=4)
    assert [state["step"] for state in kept] == [4, 8, 12]
    for state in kept:
        assert train(generator=seeded(), state=state).losses == whole.losses


def test_bends_away_from_t_have_the_gradient_zero():
    # Otherwise their momentum and decay would stand still, and depend on which pieces were drawn.
    state = run(optimizer=OPTIMIZERS["adamw"], steps=4).state["optimizer"]["state"]
    assert {int(each["step"]) for each in state.values()} == {4}
    assert len(state) == 4


def test_every_t_is_drawn_evenly():
    seen = []
    train_bends(
        start(),
        noisy,
        optimizer=OPTIMIZERS["sgd"],
        steps=400,
        generator=seeded(),
        report=seen.append,
    )
    assert [step.number for step in seen] == list(range(400))
    counts = torch.histc(torch.tensor([step.t for step in seen]), 4, 0, 1)
    assert float(counts.min()) > 70
    assert float(counts.max()) < 130


def test_only_what_is_named_is_trained():
    path = start(PolygonalChain())
    trained = train_bends(
        path, noisy, optimizer=OPTIMIZERS["adamw"], steps=3, generator=seeded(), trained=["w"]
    ).path.bends[0]
    assert torch.equal(trained["b"], path.bends[0]["b"])
    assert not torch.equal(trained["w"], path.bends[0]["w"])
    assert int(trained["steps"]) == 0


def test_the_path_given_is_left_alone():
    path = start()
    before = [point["w"].clone() for point in path.points]
    train_bends(path, noisy, optimizer=OPTIMIZERS["sgd"], steps=3, generator=seeded())
    assert all(torch.equal(point["w"], old) for point, old in zip(path.points, before, strict=True))


def run(path=None, loss=noisy, **given):
    settings = {"optimizer": OPTIMIZERS["sgd"], "steps": 3, "generator": seeded()} | given
    return train_bends(path or start(), loss, **settings)


def test_a_loss_that_is_not_finite_is_refused_with_t_and_step():
    def loss(point, step):
        return noisy(point, step) * (torch.inf if step == 2 else 1)

    with pytest.raises(PathError, match=r"The loss is inf at step 2, t = 0\.\d{4}"):
        run(loss=loss)


def test_refusals():
    with pytest.raises(PathError, match=r"Linear\(\) has no bends"):
        run(Path(Linear(), (model(0), model(1))))
    with pytest.raises(PathError, match="0 steps"):
        run(steps=0)
    with pytest.raises(PathError, match="does not depend on the bends"):
        run(loss=lambda point, step: noisy(point, step).detach())
    with pytest.raises(PathError, match="no tensor 'v' to train"):
        run(trained=["v"])
    with pytest.raises(PathError, match="nothing to train"):
        run(trained=["steps"])


def test_a_state_of_another_path_is_refused():
    state = run().state
    with pytest.raises(PathError, match="other bends"):
        run(start(PolygonalChain(1)), state=state)
    with pytest.raises(PathError, match="other bends"):
        run(state=state, trained=["w"])
    state["bends"][0]["w"] = torch.ones(2, 2)
    with pytest.raises(PathError, match="'w' has the shape"):
        run(state=state)
