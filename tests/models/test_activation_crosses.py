"""Crosses of activations: by their definition, and as what matching needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from isthmus.errors import SymmetryError
from isthmus.models.activation_crosses import activation_crosses
from isthmus.models.equivalence import random_inputs
from isthmus.symmetry.activation_matching import match_activations
from isthmus.symmetry.matching import match_weights
from isthmus.symmetry.monomial import Monomial
from isthmus.symmetry.spec import FREE, Site, Spec, on
from tests.symmetry.families import NETWORKS, architecture, built

UNITS = 12


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, UNITS), nn.ReLU(), nn.Linear(UNITS, 3))


def spec(*sites: Site) -> Spec:
    return Spec(
        {"hidden": Monomial(UNITS)},
        {
            "0.weight": (on("hidden"), FREE),
            "0.bias": (on("hidden"),),
            "2.weight": (FREE, on("hidden", "dual")),
            "2.bias": (FREE,),
        },
        {"hidden": sites},
    )


def batches(count: int = 3):
    generator = torch.Generator().manual_seed(1)
    labels = torch.zeros(20, dtype=torch.int64)
    return [(torch.randn(20, 5, generator=generator), labels) for _ in range(count)]


def hidden(network, data):
    with torch.no_grad():
        return network[:2](torch.cat([x for x, _ in data])).double().numpy()


@pytest.mark.parametrize("kind", ["covariance", "correlation"])
def test_as_numpy_has_it(network, kind):
    other = nn.Sequential(nn.Linear(5, UNITS), nn.ReLU(), nn.Linear(UNITS, 3))
    data = batches()
    found = activation_crosses(
        network, spec(Site("1")), network.state_dict(), other.state_dict(), data, kind=kind
    )["hidden"]["vector"]
    rows = np.concatenate([hidden(network, data), hidden(other, data)], axis=1)
    whole = np.cov(rows.T, ddof=0) * len(rows) if kind == "covariance" else np.corrcoef(rows.T)
    assert np.allclose(found.numpy(), whole[:UNITS, UNITS:], atol=1e-4)


@pytest.mark.parametrize("kind", ["covariance", "correlation"])
def test_a_permuted_copy_is_found(network, kind):
    symmetries = spec(Site("1"))
    a = network.state_dict()
    moved = symmetries.act(symmetries.random(torch.Generator().manual_seed(2)), a)
    crosses = activation_crosses(network, symmetries, a, moved, batches(), kind=kind)
    back = symmetries.act(match_activations(symmetries, crosses), moved)
    assert all(torch.equal(back[name], a[name]) for name in a)


def test_a_unit_that_never_changes(network):
    a = network.state_dict()
    a["0.weight"][4] = 0
    a["0.bias"][4] = -1
    found = activation_crosses(network, spec(Site("1")), a, a, batches(), kind="correlation")
    assert found["hidden"]["vector"].isfinite().all()
    assert not found["hidden"]["vector"][4].any()


def test_batches_make_no_difference(network):
    a, data = network.state_dict(), batches()
    joined = [(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))]
    apart, together = (
        activation_crosses(network, spec(Site("1")), a, a, each)["hidden"]["vector"]
        for each in (data, joined)
    )
    assert torch.allclose(apart, together, atol=1e-4)


def test_two_sites_add_up(network):
    a = network.state_dict()
    one, other, both = (
        activation_crosses(network, spec(*sites), a, a, batches())["hidden"]["vector"]
        for sites in ((Site("0"),), (Site("1"),), (Site("0"), Site("1")))
    )
    assert torch.allclose(one + other, both)


def test_no_site(network):
    with pytest.raises(SymmetryError, match="names no module"):
        activation_crosses(network, spec(), network.state_dict(), network.state_dict(), batches())


def test_an_unknown_module(network):
    a = network.state_dict()
    with pytest.raises(SymmetryError, match="'hidden' is to be seen at 'relu'"):
        activation_crosses(network, spec(Site("relu")), a, a, batches())


def test_no_data(network):
    a = network.state_dict()
    with pytest.raises(SymmetryError, match="no data"):
        activation_crosses(network, spec(Site("1")), a, a, [])


WITH_LOGITS = [name for name in NETWORKS if name not in ("bert_pretraining", "distilbert_answers")]


@pytest.mark.parametrize("name", WITH_LOGITS)
def test_the_sites_of_every_family_show_all_axes(name):
    """What activations leave open are scales and small turns inside heads."""
    torch.manual_seed(0)
    network, said, parameters = built(name)
    symmetries = architecture(said, parameters).spec
    assert symmetries.sites.keys() == symmetries.axes.keys()
    moved = symmetries.act(symmetries.random(torch.Generator().manual_seed(0)), parameters)
    inputs = random_inputs(said, batch=16)
    crosses = activation_crosses(network, symmetries, parameters, moved, [inputs])
    found = match_weights(
        symmetries, parameters, moved, start=match_activations(symmetries, crosses), sweeps=0
    )
    assert found.before > 1
    assert found.distance < 0.2
