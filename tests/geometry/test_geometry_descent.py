"""The pieces of the descent: a gradient against differences, a quasi-Newton step on a quadratic."""

from __future__ import annotations

import pytest
import torch

from isthmus.geometry.aligned_sum import FINEST, AlignedSum, Move
from isthmus.geometry.fixed_rank import FixedRank, Polar
from isthmus.geometry.frechet import huber, median, squared
from isthmus.geometry.lbfgs import Memory

RANK, ROWS, COUNT = 3, 9, 4


def move(generator, size):
    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a, gauges = normal(2, RANK, RANK), normal(COUNT, RANK, RANK)
    core = normal(RANK, RANK)
    parts = a - a.mT, normal(2, ROWS - RANK, RANK), core + core.mT, gauges - gauges.mT
    return Move(*(size * part for part in parts))


@pytest.fixture
def total(generator):
    points = FixedRank(ROWS, ROWS, RANK).random(generator, (COUNT,))
    weights = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    return lambda rho: AlignedSum(points, weights, rho)


def start(total):
    return total.at_point(Polar(*(part[0] for part in total.points)).turned(torch.eye(3).double()))


@pytest.mark.parametrize("rho", [squared, huber(1.0), median])
def test_gradient_against_differences(total, rho, generator):
    problem = total(rho)
    place = problem.moved(start(problem), move(generator, 0.1), FINEST)
    assert place.found
    for _ in range(3):
        direction = move(generator, 1.0)

        def value(t, direction=direction):
            step = Move(*(t * part for part in direction))
            return problem.moved(place, step, FINEST).value

        near, far = value(1e-3) - value(-1e-3), value(2e-3) - value(-2e-3)
        slope = float(place.gradient.flat() @ direction.flat())
        assert (8 * near - far) / 12e-3 == pytest.approx(slope, abs=1e-6)


def test_a_common_gauge_changes_nothing(total, generator):
    """μ·O and all O_k·O: the sum is the same, and so is the length of its gradient."""
    problem = total(squared)
    place = problem.moved(start(problem), move(generator, 0.1), FINEST)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64)).Q
    other = problem._at(
        torch.cat([place.frames[..., :3] @ turn, place.frames[..., 3:]], dim=-1),
        turn.mT @ place.root,
        place.turns @ turn,
        place.completions,
        FINEST,
    )
    assert other.value == pytest.approx(place.value, rel=1e-12)
    assert other.gradient_norm == pytest.approx(place.gradient_norm, rel=1e-10)


def test_frames_stay_orthogonal(total, generator):
    problem = total(squared)
    place = start(problem)
    for _ in range(20):
        place = problem.moved(place, move(generator, 0.05), 1e-4)
    eye = torch.eye(ROWS, dtype=torch.float64)
    torch.testing.assert_close(
        place.frames.mT @ place.frames, eye.expand(2, -1, -1), rtol=0, atol=1e-12
    )
    FixedRank(ROWS, ROWS, RANK).point(place.mean)


def test_moves_flatten_and_return(generator):
    one = move(generator, 1.0)
    for before, after in zip(one, Move.of(one.flat(), RANK, COUNT), strict=True):
        torch.testing.assert_close(after, before)


def test_bfgs_solves_a_quadratic_in_as_many_steps_as_it_has_dimensions(generator):
    noise = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    hessian = noise @ noise.mT + torch.eye(6, dtype=torch.float64)
    solution = torch.randn(6, generator=generator, dtype=torch.float64)
    memory, x = Memory(10), torch.zeros(6, dtype=torch.float64)
    for _ in range(6):
        gradient = hessian @ (x - solution)
        step = memory.direction(gradient, torch.clone)
        step = step * (-(gradient @ step) / (step @ hessian @ step))
        memory.learn(step, hessian @ step)
        x = x + step
    torch.testing.assert_close(x, solution, rtol=0, atol=1e-9)


def test_bfgs_does_not_learn_from_negative_curvature():
    memory = Memory(3)
    step = torch.tensor([1.0, 0.0], dtype=torch.float64)
    memory.learn(step, -step)
    assert not memory
    memory.learn(step, 2 * step)
    assert memory
    memory.forget()
    assert not memory
