"""The network's outputs as objective: against float64 least squares and differences of outputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isthmus.models.network_descent import descend
from isthmus.models.output_objective import OutputObjective, Task
from isthmus.models.parameter_groups import parameter_groups
from isthmus.projection.constraints import FREE, SIMPLEX, box

from .networks import build, images, padded, sequences


def affine(parameters, batch):
    return batch["x"] @ parameters["weight"].mT + parameters["bias"]


def random_parameters(generator, scale=1.0):
    return {
        "weight": scale * torch.randn(4, 3, generator=generator, dtype=torch.float64),
        "bias": scale * torch.randn(4, generator=generator, dtype=torch.float64),
    }


def linear_problem(experts=2, seed=0):
    """Experts of one affine layer, with their examples in batches of different sizes."""
    draw = torch.Generator().manual_seed(seed)
    base = random_parameters(draw)
    parts = [random_parameters(draw) for _ in range(experts)]
    tasks = []
    for k, part in enumerate(parts):
        batches = [
            {"x": torch.randn(size, 3, generator=draw, dtype=torch.float64)} for size in (5, 2 + k)
        ]
        tasks.append(Task(batches, [affine(part, batch) for batch in batches], 1 / (k + 1)))
    return base, parts, tasks


def least_squares(base, parts, groups, tasks):
    """The design matrix and the residuals of the base, row by row, in numpy."""
    rows, rights = [], []
    for task in tasks:
        for batch, target in zip(task.batches, task.targets, strict=True):
            x = batch["x"].numpy()
            columns = []
            for group in groups:
                for part in parts:
                    column = np.zeros((len(x), 4))
                    if "weight" in group:
                        column += x @ (part["weight"] - base["weight"]).numpy().T
                    if "bias" in group:
                        column += (part["bias"] - base["bias"]).numpy()
                    columns.append(column.ravel())
            rows.append(np.sqrt(task.weight) * np.stack(columns, 1))
            error = x @ base["weight"].numpy().T + base["bias"].numpy() - target.numpy()
            rights.append(np.sqrt(task.weight) * error.ravel())
    return np.concatenate(rows), np.concatenate(rights)


GROUPS = {"scalar": [("weight", "bias")], "two": [("weight",), ("bias",)]}


@pytest.mark.parametrize("start", [0.0, 0.7])
@pytest.mark.parametrize("name", GROUPS)
def test_one_sweep_solves_a_linear_network(name, start):
    base, parts, tasks = linear_problem()
    objective = OutputObjective(affine, base, parts, GROUPS[name], tasks)
    f, r = least_squares(base, parts, GROUPS[name], tasks)
    d, *_ = np.linalg.lstsq(f, -r, rcond=None)

    found = descend(objective, [torch.full((len(d),), start, dtype=torch.float64)], FREE, sweeps=1)

    np.testing.assert_allclose(found.coefficients.numpy(), d, rtol=1e-9)
    assert found.values[-1] == pytest.approx(np.square(f @ d + r).sum(), rel=1e-9)
    assert found.residual < 1e-9
    assert found.converged
    assert len(found.values) == 2


def test_the_ridge_is_a_share_of_the_mean_diagonal():
    base, parts, tasks = linear_problem()
    objective = OutputObjective(affine, base, parts, GROUPS["two"], tasks)
    f, r = least_squares(base, parts, GROUPS["two"], tasks)
    a = f.T @ f
    expected = np.linalg.solve(a + 0.1 * np.diag(a).mean() * np.eye(len(a)), -f.T @ r)
    found = descend(objective, [torch.zeros(4, dtype=torch.float64)], FREE, ridge=0.1, sweeps=1)
    np.testing.assert_allclose(found.coefficients.numpy(), expected, rtol=1e-9)
    assert found.residual < 1e-9


def test_the_quadratic_is_that_of_the_coefficients_themselves():
    base, parts, tasks = linear_problem(3)
    objective = OutputObjective(affine, base, parts, GROUPS["two"], tasks)
    f, r = least_squares(base, parts, GROUPS["two"], tasks)
    quadratic = objective.linearised(torch.linspace(-1, 2, 6, dtype=torch.float64))
    np.testing.assert_allclose(quadratic.matrix[0].numpy(), f.T @ f, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(quadratic.linear[0].numpy(), f.T @ r, rtol=1e-9, atol=1e-10)
    assert float(quadratic.constant) == pytest.approx(r @ r)


def network_problem(name, grouping="blocks", experts=2, size=0.05):
    """Experts of a tiny network in float64."""
    network = build(name).double()
    network.set_attn_implementation("eager")
    body = network.base_model

    def outputs(parameters, batch):
        states = torch.func.functional_call(body, dict(parameters), kwargs=dict(batch))[0]
        mask = batch.get("attention_mask")
        return states.flatten(0, 1) if mask is None else states[mask.bool()]

    draw = torch.Generator().manual_seed(3)
    base = {
        key: one.detach() for key, one in body.named_parameters() if not key.startswith("pooler")
    }
    parts = [
        {
            key: one + size * torch.randn(one.shape, generator=draw, dtype=torch.float64)
            for key, one in base.items()
        }
        for _ in range(experts)
    ]
    # The pooler runs, but nothing of it is seen.
    pooler = {key: one.detach() for key, one in body.named_parameters() if key not in base}
    tasks = []
    for k, part in enumerate(parts):
        if name == "vit":
            batches = [{"pixel_values": images(3).double()[k : k + 2]}]
        else:
            batches = padded(sequences(k, (5, 3 + k, 4)))
        targets = [outputs(pooler | part, batch).detach() for batch in batches]
        tasks.append(Task(batches, targets, 1 / (1 + k)))
    groups = parameter_groups(body, list(base), grouping)
    objective = OutputObjective(outputs, pooler | base, parts, list(groups.values()), tasks)

    def all_outputs(d):
        """Weighted errors on all examples, from parameters that are summed here."""
        merged = dict(pooler)
        for row, group in zip(d.view(len(groups), experts), groups.values(), strict=True):
            for key in group:
                merged[key] = base[key] + sum(
                    share * (part[key] - base[key]) for share, part in zip(row, parts, strict=True)
                )
        return torch.cat(
            [
                task.weight**0.5 * (outputs(merged, batch) - target).flatten()
                for task in tasks
                for batch, target in zip(task.batches, task.targets, strict=True)
            ]
        ).detach()

    return objective, all_outputs


@pytest.mark.parametrize(
    ("name", "h", "tolerance"),
    # Llama and ViT compute norms or attention in float32 whatever they are given.
    [("llama", 2e-3, 1e-3), ("gpt2", 1e-5, 1e-7), ("bert", 1e-5, 1e-7), ("vit", 2e-3, 1e-3)],
)
def test_derivatives_are_differences_of_outputs(name, h, tolerance):
    objective, outputs = network_problem(name)
    groups, experts = objective.shape
    assert groups == (5 if name != "bert" else 4)
    d = torch.linspace(0.1, 0.6, groups * experts, dtype=torch.float64)
    columns = [
        (outputs(d + h * unit) - outputs(d - h * unit)) / (2 * h)
        for unit in torch.eye(len(d), dtype=torch.float64)
    ]
    jacobian, errors = torch.stack(columns, 1), outputs(d)

    quadratic = objective.linearised(d)
    slope = (quadratic.product(d.unsqueeze(0)) + quadratic.linear)[0]

    scale = jacobian.norm() ** 2
    assert objective.value(d) == pytest.approx(float(errors.square().sum()))
    assert (quadratic.matrix[0] - jacobian.mT @ jacobian).norm() < tolerance * scale
    assert (slope - jacobian.mT @ errors).norm() < tolerance * slope.norm()
    assert (objective.gradient(d) - slope).norm() < tolerance * slope.norm()
    assert float(quadratic.values(d.unsqueeze(0))) == pytest.approx(objective.value(d))


@pytest.mark.parametrize("grouping", ["scalar", "modules"])
def test_a_lone_expert_comes_back_from_the_base(grouping):
    objective, _ = network_problem("bert", grouping, experts=1)
    zero = torch.zeros(objective.shape[0], dtype=torch.float64)
    found = descend(objective, [zero], FREE, sweeps=8)
    assert found.converged
    assert found.values[0] > 1
    assert found.values[-1] < 1e-6 * found.values[0]
    assert (found.coefficients - 1).abs().max() < 1e-2
    assert all(
        after < before for before, after in zip(found.values, found.values[1:], strict=False)
    )


def one_number(function):
    """A network of one parameter, 3 in the base and 2 in the expert, whose output shall vanish."""
    base, expert = ({"weight": torch.tensor([value], dtype=torch.float64)} for value in (3.0, 2.0))
    task = Task([{}], [torch.zeros(1, 1, dtype=torch.float64)], 1.0)

    def outputs(parameters, _batch):
        return function(parameters["weight"]).unsqueeze(0)

    return OutputObjective(outputs, base, [expert], [("weight",)], [task])


def test_too_long_a_step_is_halved():
    # Newton's method for atan: the whole step from 3 leads to -9.5, half of it to -3.2.
    found = descend(one_number(torch.atan), [torch.zeros(1, dtype=torch.float64)], FREE, sweeps=1)
    assert float(found.coefficients) == pytest.approx(0.25 * 10 * np.arctan(3))
    assert found.values == pytest.approx([np.arctan(x) ** 2 for x in (3, 3 - 2.5 * np.arctan(3))])
    assert not found.converged
    assert "not converged after 1 sweeps" in found.notes[0]


def test_the_sweeps_end_where_no_step_helps():
    def cliff(weight):
        return torch.where(weight < 3, 10 * torch.ones_like(weight), weight)

    found = descend(one_number(cliff), [torch.zeros(1, dtype=torch.float64)], FREE)
    assert found.coefficients.tolist() == [0]
    assert found.values == (9,)
    assert not found.converged
    assert "no step" in found.notes[0]


def test_the_best_start_is_taken():
    objective, _ = network_problem("bert", "scalar")
    starts = [torch.full((2,), share, dtype=torch.float64) for share in (-1.0, 0.4, 2.0)]
    found = descend(objective, starts, FREE, sweeps=1)
    assert found.values[0] == min(objective.value(start) for start in starts)


@pytest.mark.parametrize("constraint", [box(0.2, 0.4), SIMPLEX])
def test_constraints_hold(constraint):
    objective, _ = network_problem("bert", "scalar", experts=3)
    start = constraint.project(torch.zeros(1, 3, dtype=torch.float64))[0]
    found = descend(objective, [start], constraint, sweeps=15)
    assert constraint.contains(found.coefficients.unsqueeze(0))
    assert found.converged
    # No feasible neighbour is better.
    draw = torch.Generator().manual_seed(0)
    for _ in range(5):
        near = found.coefficients + 0.05 * torch.randn(3, generator=draw, dtype=torch.float64)
        value = objective.value(constraint.project(near.unsqueeze(0))[0])
        assert value >= found.values[-1] * (1 - 1e-6)


def test_base_and_experts_come_back_to_the_last_bit():
    base, parts, tasks = linear_problem()
    base = {key: value * 1e6 + np.pi for key, value in base.items()}
    objective = OutputObjective(affine, base, parts, GROUPS["two"], tasks)
    for d, expected in (([0, 0] * 2, base), ([1, 0] * 2, parts[0]), ([0, 1] * 2, parts[1])):
        merged = objective.parameters(torch.tensor(d, dtype=torch.float64))
        assert all(torch.equal(merged[key], expected[key]) for key in base)


def test_an_expert_that_is_the_base_moves_nothing():
    base, parts, tasks = linear_problem()
    objective = OutputObjective(affine, base, [parts[0], base], GROUPS["two"], tasks)
    assert objective.moving.tolist() == [True, False, True, False]
    found = descend(objective, [torch.zeros(4, dtype=torch.float64)], FREE, sweeps=1)
    assert found.coefficients[[1, 3]].tolist() == [0, 0]
    assert found.undetermined.tolist() == [False, True, False, True]


def test_every_product_is_counted():
    base, parts, tasks = linear_problem(3)
    objective = OutputObjective(affine, base, parts, GROUPS["two"], tasks)
    steps = []
    objective.linearised(torch.zeros(6, dtype=torch.float64), lambda: steps.append(1))
    assert len(steps) == 6 * 6
