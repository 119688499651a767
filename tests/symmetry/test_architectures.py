"""f(x; gθ) = f(x; θ) for random g, on networks of all families."""

from __future__ import annotations

import pytest
import torch

from isthmus.models.equivalence import check_action, random_inputs
from isthmus.symmetry.architectures import FAMILIES
from tests.symmetry.families import NETWORKS, architecture, built

EXACT = 1e-10


def _random(spec, seed=0):
    return spec.random(torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NETWORKS)
def test_random_elements_keep_the_function(name):
    network, said, parameters = built(name)
    spec = architecture(said, parameters).spec
    inputs = random_inputs(said)
    element = _random(spec)
    assert "residual" in element
    together = check_action(network, spec, element, parameters, inputs, tolerance=EXACT)
    assert together.passed
    moved = spec.act(element, parameters)
    assert any(not torch.equal(moved[key], parameters[key]) for key in parameters)
    for axis, part in element.items():
        alone = spec.act({axis: part}, parameters)
        assert any(not torch.equal(alone[key], parameters[key]) for key in parameters), axis
        check_action(network, spec, {axis: part}, parameters, inputs, tolerance=EXACT)


def test_every_family_has_a_network():
    assert {kind for kind, _, _ in NETWORKS.values()} == FAMILIES.keys() - {"xlm-roberta"}
