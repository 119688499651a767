"""A network as a function of its tensors, beside Transformers' own losses and plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from isthmus.errors import PathError
from isthmus.models.functional import NetworkFunction
from isthmus.paths.bends import train_bends
from isthmus.paths.curvature import curvature
from isthmus.paths.curves import PolygonalChain
from isthmus.paths.path import Path, grid
from isthmus.paths.profile import profile

from .networks import build, padded, sequences


def tensors(network) -> dict[str, torch.Tensor]:
    """Tied tensors once."""
    return {name: p.detach().clone() for name, p in network.named_parameters()}


def mlp(seed=0, *, norm=False):
    torch.manual_seed(seed)
    middle = [nn.BatchNorm1d(7)] if norm else []
    return nn.Sequential(nn.Linear(5, 7), *middle, nn.ReLU(), nn.Dropout(0.5), nn.Linear(7, 3))


def data(count=20, seed=3):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, 5, generator=draw), torch.randint(3, (count,), generator=draw)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("ties", [False, True])
def test_causal_models_have_the_loss_of_transformers(name, ties):
    network = build(name, tie_word_embeddings=ties)
    function = NetworkFunction(network)
    assert function.next_token
    for row in [row for row in sequences() if len(row) > 1]:
        batch = {"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]}
        with torch.no_grad():
            theirs = network(**batch, labels=row[None])
            logits = function.outputs(tensors(network), batch)
        torch.testing.assert_close(logits, theirs.logits)
        ours = function.loss(tensors(network), batch)
        assert float(ours) == pytest.approx(float(theirs.loss), rel=1e-5)


@pytest.mark.parametrize("size", [1, 2, 6])
def test_the_loss_is_a_mean_over_tokens_without_padding(size):
    network = build("gpt2")
    function = NetworkFunction(network)
    total, right, count = 0.0, 0, 0
    for row in sequences():
        with torch.no_grad():
            logits = network(input_ids=row[None]).logits[0, :-1].double()
        total += float(cross_entropy(logits, row[1:], reduction="sum")) if len(row) > 1 else 0
        right += int((logits.argmax(-1) == row[1:]).sum())
        count += len(row) - 1
    found = function.evaluate(tensors(network), padded(sequences(), size))
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["accuracy"] == pytest.approx(right / count)


def test_padding_on_the_left_counts_as_little():
    function = NetworkFunction(build("gpt2"))
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    batch = {"input_ids": torch.tensor([[0, 0, 5, 6, 7]]), "attention_mask": mask}
    _, count = function.summed_loss(tensors(build("gpt2")), batch)
    assert count == 2


def test_labels_that_are_given_count_instead():
    network = build("gpt2")
    row = sequences()[1][None]
    labels = row.clone()
    labels[:, :4] = -100
    with torch.no_grad():
        theirs = float(network(input_ids=row, labels=labels).loss)
    batch = {"input_ids": row, "labels": labels}
    function = NetworkFunction(network)
    assert float(function.loss(tensors(network), batch)) == pytest.approx(theirs, rel=1e-5)
    assert function.summed_loss(tensors(network), batch)[1] == row.shape[1] - 4


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_classifiers_have_the_loss_of_transformers(name):
    network = build(name)
    if name == "bert":
        batch = padded(sequences(), 6)[0]
    else:
        batch = {"pixel_values": torch.rand(6, 1, 8, 8)}
    labels = torch.tensor([0, 1, 1, 0, 1, 0])
    with torch.no_grad():
        theirs = network(**batch, labels=labels)
    function = NetworkFunction(network)
    assert not function.next_token
    found = function.evaluate(tensors(network), [{**batch, "labels": labels}])
    assert found["loss"] == pytest.approx(float(theirs.loss), rel=1e-5)
    accuracy = float((theirs.logits.argmax(-1) == labels).float().mean())
    assert found["accuracy"] == pytest.approx(accuracy)


def test_masked_models_take_labels():
    network = build("bert_masked")
    batch = padded(sequences(), 6)[0]
    labels = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)
    with torch.no_grad():
        theirs = float(network(**batch, labels=labels).loss)
    function = NetworkFunction(network)
    found = function.loss(tensors(network), {**batch, "labels": labels})
    assert float(found) == pytest.approx(theirs, rel=1e-5)
    with pytest.raises(PathError, match="no labels"):
        function.loss(tensors(network), batch)


@pytest.mark.parametrize("sizes", [20, [1, 19], [7, 7, 6]])
def test_plain_modules_take_pairs_cut_anyhow(sizes):
    network = mlp()
    x, y = data()
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    with torch.no_grad():
        logits = network.eval()(x)
    found = NetworkFunction(network).evaluate(tensors(network), batches)
    assert found["loss"] == pytest.approx(float(cross_entropy(logits, y)), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((logits.argmax(1) == y).double().mean()))


def test_numbers_are_regressed_and_images_classified_by_pixel():
    network = nn.Conv2d(2, 3, 1)
    x = torch.rand(4, 2, 5, 5)
    with torch.no_grad():
        outputs = network(x)
    function, given = NetworkFunction(network), tensors(network)
    classes = torch.randint(3, (4, 5, 5))
    found = function.evaluate(given, [(x, classes)])
    assert found["loss"] == pytest.approx(float(cross_entropy(outputs, classes)), rel=1e-5)
    goal = torch.rand_like(outputs)
    found = function.evaluate(given, [(x[:1], goal[:1]), (x[1:], goal[1:])])
    assert found == {"loss": pytest.approx(float(nn.functional.mse_loss(outputs, goal)), rel=1e-5)}


def test_the_loss_is_that_of_the_tensors_given_and_differentiable():
    network, other = mlp(0).double(), mlp(1).double()
    x, y = data()
    function = NetworkFunction(network)
    leaves = {name: p.requires_grad_() for name, p in tensors(other).items()}
    loss = function.loss(leaves, (x.double(), y))
    own = cross_entropy(other.eval()(x.double()), y)
    assert float(loss) == pytest.approx(float(own), rel=1e-12)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    theirs = torch.autograd.grad(own, list(other.parameters()))
    for one, another in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(one, another)


def test_the_module_is_left_as_it_was():
    network = mlp(norm=True).train()
    network[0].eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    given = {name: value.clone() for name, value in mlp(1, norm=True).state_dict().items()}
    kept = {name: value.clone() for name, value in given.items()}
    NetworkFunction(network).loss(given, data(), batch_statistics=True)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert all(torch.equal(kept[name], value) for name, value in given.items())
    assert [each.training for each in network] == [False, True, True, True, True]


def test_batch_statistics_are_those_of_training_without_its_dropout():
    network = mlp(norm=True)
    x, _ = data()
    given = dict(network.state_dict())
    function = NetworkFunction(network)
    network.eval()
    network[1].train()
    with torch.no_grad():
        theirs = network(x)
        ours = function.outputs(given, data(), batch_statistics=True)
        running = function.outputs(given, data())
    torch.testing.assert_close(ours, theirs)
    assert not torch.allclose(ours, running)


def test_the_module_may_have_no_numbers():
    network = build("gpt2")
    batch = padded(sequences())[0]
    expected = NetworkFunction(network).loss(tensors(network), batch)
    empty = build("gpt2", seed=1)
    for module in empty.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.to("meta"))
    empty.tie_weights()
    assert torch.equal(NetworkFunction(empty).loss(tensors(network), batch), expected)


def test_a_path_of_language_models_from_end_to_end():
    a, b = build("gpt2", 0), build("gpt2", 1)
    function = NetworkFunction(a)
    batches = padded(sequences(), 3)
    path = Path.straight(PolygonalChain(), tensors(a), tensors(b))
    before = profile(path, lambda point: function.evaluate(point, batches), grid(5))
    trained = train_bends(
        path,
        lambda point, step: function.loss(point, batches[step % 2]),
        optimizer=lambda leaves: torch.optim.Adam(leaves, lr=0.02),
        steps=40,
        generator=torch.Generator().manual_seed(0),
    )
    after = profile(trained.path, lambda point: function.evaluate(point, batches), grid(5))
    for end in (0, -1):
        assert after.values["loss"][end] == before.values["loss"][end]
    assert after.values["loss"][2] < before.values["loss"][2] - 0.3


def test_the_curvature_of_a_language_model_is_that_of_its_mean_loss():
    network = build("gpt2", n_layer=1).double()
    function = NetworkFunction(network)
    given = tensors(network)
    bias = "transformer.h.0.mlp.c_fc.bias"
    batches = padded(sequences())

    def loss(b):
        point = given | {bias: b}
        sums = [function.summed_loss(point, batch) for batch in batches]
        return sum(one for one, _ in sums) / sum(count for _, count in sums)

    exact = torch.autograd.functional.hessian(loss, given[bias])
    found = curvature(
        function.summed_loss,
        given,
        batches,
        names=[bias],
        generator=torch.Generator().manual_seed(0),
    )
    assert found.top == pytest.approx(float(torch.linalg.eigvalsh(exact)[-1]), rel=1e-3)


def test_gaps_are_not_filled_from_the_module():
    network = mlp(norm=True)
    for missing in ("0.bias", "1.running_var"):
        given = dict(network.state_dict())
        del given[missing]
        with pytest.raises(PathError, match=f"needs a tensor '{missing}'"):
            NetworkFunction(network).outputs(given, data())


def test_other_tensors_are_refused():
    network = mlp()
    with pytest.raises(PathError, match=r"no tensor '9\.weight'"):
        NetworkFunction(network).outputs(
            {**network.state_dict(), "9.weight": torch.ones(1)}, data()
        )


def test_tied_tensors_stand_once():
    network = build("gpt2")
    both = {name: value.clone() for name, value in network.state_dict().items()}
    batch = padded(sequences())[0]
    with pytest.raises(PathError, match=r"'transformer.wte.weight' and 'lm_head.weight' are one"):
        NetworkFunction(network).outputs(both, batch)
    both["lm_head.weight"] = both["transformer.wte.weight"]
    one = NetworkFunction(network).outputs(both, batch)
    del both["transformer.wte.weight"]
    assert torch.equal(NetworkFunction(network).outputs(both, batch), one)


def test_bad_batches_are_refused():
    network = mlp()
    function, given = NetworkFunction(network), tensors(mlp())
    x, y = data()
    with pytest.raises(PathError, match="no data"):
        function.evaluate(given, [])
    with pytest.raises(PathError, match="no data"):
        function.evaluate(given, [(x, torch.full_like(y, -100))])
    with pytest.raises(PathError, match="Nothing in the batch has a label"):
        function.loss(given, (x, torch.full_like(y, -100)))
    with pytest.raises(PathError, match="not a Tensor"):
        function.loss(given, x)
    with pytest.raises(PathError, match=r"\[19\] do not fit outputs of shape \[20, 3\]"):
        function.loss(given, (x, y[:19]))
    with pytest.raises(PathError, match=r"\[20\] do not fit"):
        function.loss(given, (x, y.double()))
    with pytest.raises(PathError, match="labels from 0 to 3, where the network has 3 classes"):
        function.loss(given, (x, torch.arange(20) % 4))
    causal = build("gpt2")
    with pytest.raises(PathError, match="next token is not known"):
        NetworkFunction(causal).loss(tensors(causal), {"inputs_embeds": torch.rand(1, 3, 16)})


def test_a_network_without_a_head_is_refused():
    bert = build("bert").bert
    with pytest.raises(PathError, match="without logits"):
        NetworkFunction(bert).outputs(tensors(bert), padded(sequences())[0])
