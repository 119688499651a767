"""Absorbed norms keep the function, and let the stream turn."""

from __future__ import annotations

import pytest
import torch

from isthmus.errors import SymmetryError
from isthmus.models.equivalence import check_action, check_equivalence, outputs_of, random_inputs
from isthmus.symmetry.matrix_groups import Orthogonal
from isthmus.symmetry.normal_forms import absorb_norms
from tests.symmetry.families import NETWORKS, built, described

EXACT = 1e-10
CAUSAL = [
    name
    for name, (kind, _, _) in NETWORKS.items()
    if kind in {"llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "phi", "gpt2", "gpt_neox"}
]


def untied(name, absorbed):
    """A network of the configuration that absorbing left."""
    config, auto = described(name)
    if absorbed.untied:
        config.tie_word_embeddings = False
    return auto.from_config(config).double().eval()


@pytest.mark.parametrize("name", [*CAUSAL, "vit"])
def test_the_function_stays_and_the_stream_turns(name):
    network, said, parameters = built(name)
    absorbed = absorb_norms(said, parameters)
    inputs = random_inputs(said)
    again = untied(name, absorbed)
    wanted = outputs_of(network, parameters, inputs, torch.float64)
    found = outputs_of(again, absorbed.parameters, inputs, torch.float64)
    for one, other in zip(wanted, found, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=EXACT * float(one.abs().max()))
    spec = absorbed.architecture.spec
    assert isinstance(spec.axes["residual"], Orthogonal)
    element = spec.random(torch.Generator().manual_seed(1))
    check_action(again, spec, element, absorbed.parameters, inputs, tolerance=EXACT)


def test_a_tied_head_is_untied_and_said_to_be():
    _, said, parameters = built("gpt2")
    absorbed = absorb_norms(said, parameters)
    assert absorbed.untied == ("lm_head.weight",)
    assert absorbed.config["tie_word_embeddings"] is False
    embedding = absorbed.parameters["transformer.wte.weight"]
    assert torch.equal(embedding, parameters["transformer.wte.weight"])
    assert not torch.equal(absorbed.parameters["lm_head.weight"], embedding)


def test_a_tied_head_behind_gains_of_one_stays_tied():
    _, said, parameters = built("gpt2")
    parameters["transformer.ln_f.weight"] = torch.ones_like(parameters["transformer.ln_f.weight"])
    absorbed = absorb_norms(said, parameters)
    assert absorbed.untied == ()
    assert "lm_head.weight" not in absorbed.parameters


def test_absorbing_twice_is_absorbing_once():
    _, said, parameters = built("phi")
    once = absorb_norms(said, parameters)
    twice = absorb_norms(once.config, once.parameters)
    assert all(torch.equal(twice.parameters[name], x) for name, x in once.parameters.items())


def test_dtypes_stay():
    _, said, parameters = built("llama")
    half = {name: x.bfloat16() for name, x in parameters.items()}
    assert {x.dtype for x in absorb_norms(said, half).parameters.values()} == {torch.bfloat16}


def test_parameters_are_not_changed():
    network, said, parameters = built("gpt_neox")
    before = {name: x.clone() for name, x in parameters.items()}
    absorb_norms(said, parameters)
    assert all(torch.equal(parameters[name], x) for name, x in before.items())
    check_equivalence(network, before, parameters, random_inputs(said), tolerance=EXACT)


@pytest.mark.parametrize("name", ["bert", "gemma2"])
def test_norms_behind_blocks_are_refused(name):
    _, said, parameters = built(name)
    with pytest.raises(SymmetryError, match=r"cannot be absorbed.*\n.*permutations"):
        absorb_norms(said, parameters)


def test_a_gain_of_zero_with_an_offset():
    _, said, parameters = built("gpt2")
    parameters["transformer.ln_f.weight"][3] = 0
    with pytest.raises(SymmetryError, match=r"ln_f\.bias' adds to coordinate 3"):
        absorb_norms(said, parameters)
