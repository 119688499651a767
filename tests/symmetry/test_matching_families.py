"""A transformed copy comes back on networks of all known families."""

import pytest
import torch

from isthmus.symmetry.matching import match_weights
from tests.symmetry.families import NETWORKS, architecture, built
from tests.symmetry.networks import seeded


@pytest.mark.parametrize("name", NETWORKS)
def test_a_transformed_copy_comes_back(name):
    _, said, a = built(name)
    spec = architecture(said, a).spec
    b = spec.act(spec.random(seeded(1)), a)
    found = match_weights(spec, a, b)
    assert found.converged
    assert found.before > 0.1
    assert found.distance < 1e-6
    assert all(torch.isfinite(x).all() for x in spec.act(found.element, b).values())
