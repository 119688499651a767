from __future__ import annotations

import copy

import pytest
import torch

from isthmus.lab.encoders import Encoder, fine_tune
from isthmus.lab.heads import Head, fit_head
from isthmus.lab.settings import FineTuning
from isthmus.lab.text import Part

TEXTS = (
    "a splendid film",
    "dull",
    "what a joy from the first scene to the very last one",
    "two hours that I shall never get back",
    "warm and funny",
    "awful",
)
LABELS = (1, 0, 1, 0, 1, 0)


@pytest.fixture
def base(small_encoder):
    return Encoder.load(small_encoder)


def trained(base, seed=0):
    encoder = Encoder(copy.deepcopy(base.model), base.tokenizer)
    head = fit_head(base.features(TEXTS, 16), LABELS, 1.0)
    tuning = FineTuning(epochs=2, batch_size=2, learning_rate=1e-3, seed=seed)
    fine_tune(encoder, head, Part(TEXTS, LABELS), 16, tuning)
    return encoder


def test_features_are_unit_vectors_in_the_order_of_the_texts(base):
    together = base.features(TEXTS, 16, batch_size=4)
    assert together.shape == (6, 32)
    torch.testing.assert_close(together.norm(dim=1), torch.ones(6))
    alone = torch.cat([base.features([text], 16) for text in TEXTS])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)  # padding does not count


def test_two_equal_runs_write_the_same_bytes(base, tmp_path):
    for name in ("one", "two"):
        trained(base).save(tmp_path / name)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_the_seed_changes_the_run(base):
    first, other = trained(base, 0).model.state_dict(), trained(base, 1).model.state_dict()
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_training_moves_the_layers_and_neither_tables_nor_pooler(base):
    before, after = base.model.state_dict(), trained(base).model.state_dict()
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(name.startswith("encoder.layer.") for name in moved)


def test_training_lowers_the_loss(base):
    head = fit_head(base.features(TEXTS, 16), LABELS, 1.0)
    labels = torch.tensor(LABELS)

    def loss(encoder):
        return torch.nn.functional.cross_entropy(head.logits(encoder.features(TEXTS, 16)), labels)

    assert loss(trained(base)) < loss(base)


@pytest.mark.parametrize("classes", [2, 3])
def test_a_head_agrees_with_scikit_learn(classes):
    from sklearn.linear_model import LogisticRegression

    features = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    labels = tuple((features[:, 0] > 0).int().add((features[:, 1] > 1).int()).tolist())
    labels = tuple(min(label, classes - 1) for label in labels)
    head = fit_head(features, labels, 2.0)
    reference = LogisticRegression(C=2.0, max_iter=2000).fit(features.numpy(), labels)
    probabilities = head.logits(features).softmax(dim=1)
    expected = torch.from_numpy(reference.predict_proba(features.numpy()))
    torch.testing.assert_close(probabilities, expected.float(), atol=1e-5, rtol=0)


def test_a_head_is_an_affine_map():
    head = Head(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([0.5, 0.0]))
    assert head.logits(torch.tensor([[3.0, 4.0]])).tolist() == [[3.5, 8.0]]
