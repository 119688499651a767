"""The check that a function stays: what it lets pass, and what it refuses by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isthmus.errors import SymmetryError
from isthmus.models.equivalence import check_action, check_equivalence, random_inputs
from isthmus.symmetry.heads import Heads
from isthmus.symmetry.matrix_groups import GeneralLinear, Orthogonal
from isthmus.symmetry.monomial import Monomial
from isthmus.symmetry.spec import Spec, on
from tests.symmetry.families import architecture, built

ATTENTION, MLP = "layers.0.attention", "layers.0.mlp"


def with_group(spec, axis, group):
    return Spec({**spec.axes, axis: group}, spec.tensors)


def refused(name, axis, group):
    """Whether the check names the axis where that group is put on it."""
    network, said, parameters = built(name)
    spec = with_group(architecture(said, parameters).spec, axis, group)
    element = spec.random(torch.Generator().manual_seed(0))
    with pytest.raises(SymmetryError, match=rf"'{axis}'"):
        check_action(network, spec, element, parameters, random_inputs(said))


def test_a_generic_orthogonal_matrix_on_a_rope_head():
    # Two key-value groups of two query heads, 4 coordinates each.
    refused("llama", ATTENTION, Heads(2, 2, Orthogonal(4), GeneralLinear(4)))


def test_a_generic_orthogonal_matrix_where_keys_are_normed_with_gains():
    refused("qwen3", ATTENTION, Heads(2, 2, Orthogonal(6), GeneralLinear(6)))


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("llama", Orthogonal(16)),  # gains are not absorbed
        ("gpt2", Monomial(16, "sign")),  # LayerNorm subtracts a mean
        ("bert", Monomial(16, "sign")),
        ("llama", Monomial(16, "positive")),
    ],
)
def test_larger_groups_on_the_stream(name, group):
    if isinstance(group, Orthogonal):
        network, said, parameters = built(name)
        spec = architecture(said, parameters).spec
        kept = {
            key: tuple(
                () if any(part.role == "gain" for part in dimension) else dimension
                for dimension in dimensions
            )
            for key, dimensions in spec.tensors.items()
        }
        spec = Spec({**spec.axes, "residual": group}, kept)
        element = spec.random(torch.Generator().manual_seed(0))
        with pytest.raises(SymmetryError, match="'residual'"):
            check_action(network, spec, element, parameters, random_inputs(said))
        return
    refused(name, "residual", group)


def test_factors_around_a_gelu():
    refused("gpt2", MLP, Monomial(64, "positive"))


def test_a_wrong_entry_in_a_spec():
    network, said, parameters = built("llama")
    spec = architecture(said, parameters).spec
    name = next(key for key in spec.tensors if key.endswith("layers.1.mlp.down_proj.weight"))
    out, _ = spec.tensors[name]
    # The columns of another block's units.
    wrong = replace(spec, tensors={**spec.tensors, name: (out, on(MLP, "dual"))})
    element = wrong.random(torch.Generator().manual_seed(0))
    with pytest.raises(SymmetryError, match=r"'layers\.[01]\.mlp'"):
        check_action(network, wrong, element, parameters, random_inputs(said))


def test_equal_functions_and_unequal_ones():
    network, said, parameters = built("gpt2")
    inputs = random_inputs(said)
    assert check_equivalence(network, parameters, dict(parameters), inputs).error == 0
    other = {name: tensor + 0.01 for name, tensor in parameters.items()}
    with pytest.raises(SymmetryError, match="function changed"):
        check_equivalence(network, parameters, other, inputs)


def test_less_digits_are_judged_by_what_they_can_hold():
    network, said, parameters = built("gpt2")
    spec = architecture(said, parameters).spec
    element = spec.random(torch.Generator().manual_seed(0))
    single = {name: tensor.float() for name, tensor in parameters.items()}
    found = check_equivalence(network, single, spec.act(element, single), random_inputs(said))
    assert found.dtype is torch.float32
    assert 0 < found.error <= found.tolerance


def test_an_output_that_is_not_finite():
    network, said, parameters = built("gpt2")
    broken = {name: torch.full_like(tensor, torch.inf) for name, tensor in parameters.items()}
    with pytest.raises(SymmetryError, match="function changed"):
        check_equivalence(network, parameters, broken, random_inputs(said))


def test_names_that_are_missing_or_unknown():
    network, said, parameters = built("gpt2")
    inputs = random_inputs(said)
    lacking = {name: x for name, x in parameters.items() if not name.endswith("ln_f.weight")}
    with pytest.raises(SymmetryError, match=r"ln_f\.weight"):
        check_equivalence(network, lacking, lacking, inputs)
    more = {**parameters, "transformer.extra": torch.ones(1)}
    with pytest.raises(SymmetryError, match=r"transformer\.extra"):
        check_equivalence(network, more, more, inputs)


def test_a_configuration_without_inputs():
    with pytest.raises(SymmetryError, match=r"neither how many tokens"):
        random_inputs({"model_type": "mystery"})
