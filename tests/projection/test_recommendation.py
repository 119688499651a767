"""Recommendations on layers whose right answer is known by construction."""

from __future__ import annotations

import pytest
import torch

from isthmus.errors import MethodError
from isthmus.projection.diagnosis import diagnose_layer
from isthmus.projection.recommendation import ALIKE, percent, recommend
from isthmus.projection.statistics import InputMoments

M, N, COUNT = 6, 8, 400


def normal(*shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def diagnosed(tau, inputs):
    moments = []
    for x in inputs:
        moments.append(InputMoments.empty(x.shape[1]))
        moments[-1].add(x)
    return diagnose_layer(tau, moments, seeds=range(len(tau)))


def advice(tau, inputs, **others):
    return recommend({"layer.weight": diagnosed(tau, inputs), **others})


def text(found):
    return "\n".join(found.sentences)


def apart(count=COUNT):
    """Inputs of two tasks in subspaces that are orthogonal, neither along the axes."""
    turn = torch.linalg.qr(normal(N, N, seed=7)).Q
    inputs = [normal(count, N, seed=k) for k in (1, 2)]
    inputs[0][:, N // 2 :] = 0
    inputs[1][:, : N // 2] = 0
    return [x @ turn for x in inputs]


def test_identical_experts_need_no_projection():
    tau = normal(1, M, N).expand(3, M, N)
    found = advice(tau, [normal(COUNT, N, seed=k) for k in range(3)])
    assert found.chosen.name == "soup"
    assert found.chosen.recipe["merge_method"] == "linear"
    assert "Take soup: it leaves 0 % of the base's error" in text(found)
    assert "Spare yourself the calibrated merge." in text(found)
    assert not found.hurting


def test_orthogonal_inputs_are_captured_whole():
    found = advice(normal(2, M, N), apart())
    assert found.chosen.name == "optimal"
    assert found.chosen.recipe == {
        "merge_method": "projection",
        "parameters": {"basis": "optimal"},
    }
    assert found.chosen.left == pytest.approx(0, abs=1e-10)
    assert "Take projection with basis: optimal. It leaves 0 %" in text(found)
    assert "contradict" not in text(found)


def test_orthogonal_experts_add_up():
    inputs = apart()
    tau = normal(2, M, N)
    for k, x in enumerate(inputs):  # each expert changes only what its own inputs see
        tau[k] = tau[k] @ torch.linalg.pinv(x) @ x
    found = advice(tau, inputs)
    assert found.chosen.name == "task arithmetic"
    assert found.chosen.left == pytest.approx(0, abs=1e-10)


def test_opposite_experts_on_the_same_inputs_cannot_be_merged():
    tau, x = normal(1, M, N), normal(COUNT, N, seed=1)
    found = advice(torch.cat([tau, -tau]), [x, x])
    assert found.chosen is None
    assert "No merge is worth it" in text(found)
    assert "contradict each other" in text(found)
    assert found.total.projections["optimal"] == pytest.approx(found.total.initial)
    assert found.hurting == {"layer.weight": 1.0}


def test_conflicting_experts_on_the_same_inputs_keep_half():
    tau = normal(2, M, N)
    tau[1] -= tau[0] * (tau[0] * tau[1]).sum() / tau[0].square().sum()
    tau[1] *= tau[0].norm() / tau[1].norm()
    x = torch.linalg.qr(normal(COUNT, N, seed=1)).Q
    found = advice(tau, [x, x])
    # The best output is the mean of two that are orthogonal and equally long.
    assert found.total.projections["optimal"] == pytest.approx(found.total.initial / 2)
    assert found.chosen.name == "soup"
    assert found.chosen.left == pytest.approx(0.5)


def test_three_conflicting_experts_are_warned_of():
    x = torch.linalg.qr(normal(COUNT, N, seed=1)).Q
    tau = torch.linalg.qr(normal(M * N, 3)).Q.mT.reshape(3, M, N)
    found = advice(tau, [x, x, x])
    assert found.total.projections["optimal"] == pytest.approx(found.total.initial * 2 / 3)
    assert "even the best leave 66.7 %" in text(found)


def test_rows_that_belong_to_one_expert_ask_for_the_diagonal_basis():
    # Output i looks at input i alone, and each input is of one task.
    inputs = [normal(COUNT, N, seed=k) for k in (1, 2)]
    inputs[0][:, N // 2 :] = 0
    inputs[1][:, : N // 2] = 0
    found = advice(torch.diag_embed(normal(2, N)), inputs)
    assert found.chosen.name == "diagonal"
    assert found.chosen.left == pytest.approx(0, abs=1e-10)
    assert found.total.projections["scalar"] > ALIKE * found.total.initial


def test_too_few_inputs_for_the_best_weights():
    few = apart(count=3)  # three inputs of each task for eight unknowns of each output
    found = advice(normal(2, M, N), few)
    by_name = {choice.name: choice for choice in found.choices}
    assert by_name["optimal"].left == pytest.approx(0, abs=1e-10)
    assert by_name["optimal"].expected == float("inf")
    assert found.chosen is not by_name["optimal"]
    assert "only 0.8 inputs for each of its coefficients" in text(found)


def test_the_layers_that_hurt_are_named_and_add_up():
    inputs = [normal(COUNT, N, seed=k) for k in (1, 2)]
    layers = {
        "loud": diagnosed(10 * normal(2, M, N), inputs),
        "quiet": diagnosed(normal(2, M, N, seed=1), inputs),
    }
    found = recommend(layers)
    assert [*found.hurting] == ["loud", "quiet"]
    assert sum(found.hurting.values()) == pytest.approx(1)
    assert found.hurting["loud"] > 0.9
    assert "1 of 2 layers holds" in text(found)
    assert "loud (" in text(found)
    assert "quiet (" not in text(found)


def test_nothing_to_merge():
    found = advice(torch.zeros(2, M, N), [normal(COUNT, N, seed=k) for k in (1, 2)])
    assert found.chosen is None
    assert found.choices == ()
    assert "there is nothing to merge" in text(found)
    assert "Experts 1, 2 equal the base in all layers." in text(found)
    assert "nan" not in text(found)


def test_an_expert_that_equals_the_base_in_a_layer():
    tau = normal(2, M, N)
    inputs = [normal(COUNT, N, seed=k) for k in (1, 2)]
    half = torch.stack([tau[0], torch.zeros_like(tau[0])])
    found = advice(tau, inputs, other=diagnosed(half, inputs))
    assert "Expert 2 equals the base in other." in text(found)
    assert "Expert 1 equals" not in text(found)


def test_silent_inputs_and_open_coefficients_are_told():
    tau = normal(2, M, N)
    zero = torch.zeros(COUNT, N, dtype=torch.float64)
    found = advice(tau, [zero, normal(COUNT, N, seed=1)])
    assert "All inputs of expert 1 are zero in all layers" in text(found)
    same = advice(tau[:1].expand(2, M, N), [normal(COUNT, N, seed=1)] * 2)
    assert "does not determine all coefficients in all layers" in text(same)


def test_the_scale_of_task_arithmetic_is_in_its_recipe():
    x = torch.linalg.qr(normal(COUNT, N, seed=1)).Q
    tau = torch.linalg.qr(normal(M * N, 2)).Q.mT.reshape(2, M, N)
    found = advice(tau, [x, x])
    scaled = next(choice for choice in found.choices if choice.name.endswith("λ = 0.5"))
    assert scaled.recipe["parameters"]["lambda"] == 0.5
    assert scaled.left == pytest.approx(0.5)


def test_every_recipe_is_one_that_can_be_read():
    from isthmus.recipes import load_recipe

    found = advice(normal(2, M, N), [normal(COUNT, N, seed=k) for k in (1, 2)])
    models = {"base_model": "base", "models": [{"model": "a"}, {"model": "b"}]}
    for choice in found.choices:
        calibration = {"calibration": {"data": "texts.jsonl"}} if choice.calibrated else {}
        recipe = load_recipe({**models, **calibration, **choice.recipe})
        assert recipe.method.name == choice.recipe["merge_method"]


def test_no_layers():
    with pytest.raises(MethodError, match="no layers"):
        recommend({})


def test_shares_are_short():
    assert [percent(share) for share in (0, 1e-12, 0.10149, 1)] == ["0 %", "0 %", "10.1 %", "100 %"]
