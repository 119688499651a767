"""Statistics of BatchNorm anew, and REPAIR: statistics against those that torch measures."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from isthmus.errors import PathError
from isthmus.models.batch_norm import has_batch_norm, repair, reset_statistics
from isthmus.models.functional import NetworkFunction
from isthmus.paths.curves import Linear
from isthmus.paths.path import Path


def with_norm(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 6),
        nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3),
    )  # fmt: skip
    return net.double()


def without(seed, bias=True):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=bias), nn.ReLU(), nn.Flatten(), nn.Linear(36, 12), nn.ReLU(),
        nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3),
    )  # fmt: skip
    return net.double()


def pictures(counts=(30,), seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts), 2, 5, 5, generator=draw, dtype=torch.float64)
    return [(part, torch.zeros(len(part), dtype=torch.int64)) for part in x.split(counts)]


def tensors(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def heard(net, parameters, names, batches):
    """Mean and standard deviation of outputs by layer, through hooks of the test's own."""
    seen = {name: [] for name in names}
    hooks = [
        net.get_submodule(name).register_forward_hook(
            lambda _m, _x, y, name=name: seen[name].append(y.movedim(1, -1).reshape(-1, y.shape[1]))
        )
        for name in names
    ]
    with torch.no_grad():
        for x, _ in batches:
            functional_call(net.eval(), dict(parameters), (x,))
    for hook in hooks:
        hook.remove()
    rows = {name: torch.cat(parts) for name, parts in seen.items()}
    return {name: (row.mean(0), row.std(0, correction=0)) for name, row in rows.items()}


def test_a_reset_on_one_batch_is_torchs():
    net = with_norm(0)
    batches = pictures()
    found = reset_statistics(net, tensors(net), batches)
    theirs = with_norm(0)
    for each in theirs.modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm):
            each.momentum = None
            each.reset_running_stats()
    theirs.train()(batches[0][0])
    for name, value in theirs.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("counts", [(30,), (10, 20), (1, 9, 20)])
def test_statistics_are_pooled_over_batches_of_any_size(counts):
    # Before the first norm nothing depends on the batch, so that cuts must not matter there.
    net = with_norm(0)
    # A batch of one has no variance behind the flattening; convolutions have.
    conv = net[:2]
    found = reset_statistics(conv, tensors(conv), pictures(counts))
    ((x, _),) = pictures()
    before = net[0](x).detach().movedim(1, -1).reshape(-1, 4)
    torch.testing.assert_close(found["1.running_mean"], before.mean(0))
    torch.testing.assert_close(found["1.running_var"], before.var(0))


def test_a_reset_changes_statistics_alone_and_not_its_arguments():
    net = with_norm(0)
    given, own = tensors(net), tensors(net)
    found = reset_statistics(net, given, pictures())
    changed = {name for name in found if not torch.equal(found[name], given[name])}
    assert changed == {f"{n}.{kind}" for n in (1, 5) for kind in ("running_mean", "running_var")}
    assert all(torch.equal(own[name], value) for name, value in given.items())
    assert all(torch.equal(own[name], value) for name, value in net.state_dict().items())


def test_a_wrong_scale_is_forgotten_by_a_reset():
    # Scaling a convolution before BatchNorm changes nothing once the statistics are its own.
    net = with_norm(0)
    batches = pictures()
    scaled = tensors(net)
    scaled["0.weight"], scaled["0.bias"] = 50 * scaled["0.weight"], 50 * scaled["0.bias"]
    function = NetworkFunction(net)
    outputs = [
        function.outputs(reset_statistics(net, point, batches), batches[0])
        for point in (tensors(net), scaled)
    ]
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("counts", [(30,), (4, 26)])
def test_repair_reaches_its_goal_in_every_channel(t, counts):
    net, other = without(0), without(1)
    a, b, batches = tensors(net), tensors(other), pictures(counts)
    mixed = Path(Linear(), (a, b)).at(t)
    found = repair(net, a, b, mixed, t, batches)
    names = ["0", "3", "5"]
    of_a, of_b, now = (heard(net, point, names, batches) for point in (a, b, found))
    for name in names:
        for which in (0, 1):
            goal = (1 - t) * of_a[name][which] + t * of_b[name][which]
            torch.testing.assert_close(now[name][which], goal)
    for name in ("7.weight", "7.bias"):
        assert torch.equal(found[name], mixed[name])


def test_variance_had_collapsed_before():
    # Otherwise the goal would be no news.
    net = without(0)
    a, b, batches = tensors(net), tensors(without(1)), pictures()
    mixed = Path(Linear(), (a, b)).at(0.5)
    before = heard(net, mixed, ["5"], batches)["5"][1].mean()
    after = heard(net, repair(net, a, b, mixed, 0.5, batches), ["5"], batches)["5"][1].mean()
    assert before < 0.7 * after


@pytest.mark.parametrize("t", [0, 1])
def test_repair_leaves_the_ends(t):
    net = without(0)
    ends = (tensors(net), tensors(without(1)))
    found = repair(net, *ends, ends[t], t, pictures())
    for name, value in ends[t].items():
        torch.testing.assert_close(found[name], value)


def test_repair_with_batch_norm_is_a_reset():
    net = with_norm(0)
    a, b = tensors(net), tensors(with_norm(1))
    mixed = Path(Linear(), (a, b)).at(0.5)
    found = repair(net, a, b, mixed, 0.5, pictures())
    reset = reset_statistics(net, mixed, pictures())
    assert all(torch.equal(found[name], reset[name]) for name in reset)


def test_dead_channels_are_not_blown_up():
    net = without(0)
    a, b = tensors(net), tensors(without(1))
    mixed = Path(Linear(), (a, b)).at(0.5)
    mixed["3.weight"][2] *= 1e-14
    mixed["3.bias"][2] = 3
    found = repair(net, a, b, mixed, 0.5, pictures())
    assert float(found["3.weight"][2].abs().max()) < 1e-10
    assert all(value.isfinite().all() for value in found.values())


def test_layers_may_be_chosen():
    net = without(0)
    a, b = tensors(net), tensors(without(1))
    mixed = Path(Linear(), (a, b)).at(0.5)
    found = repair(net, a, b, mixed, 0.5, pictures(), layers=["3"])
    changed = {name for name in found if not torch.equal(found[name], mixed[name])}
    assert changed == {"3.weight", "3.bias"}


def test_float32_stays():
    net = without(0).float()
    a, b = tensors(net), tensors(without(1).float())
    batches = [(x.float(), y) for x, y in pictures()]
    found = repair(net, a, b, Path(Linear(), (a, b)).at(0.5), 0.5, batches)
    assert {value.dtype for value in found.values()} == {torch.float32}


def test_refusals_of_a_reset():
    plain, net = without(0), with_norm(0)
    assert has_batch_norm(net)
    assert not has_batch_norm(plain)
    with pytest.raises(PathError, match="has no BatchNorm"):
        reset_statistics(plain, tensors(plain), pictures())
    with pytest.raises(PathError, match="Nothing passed through '1'"):
        reset_statistics(net, tensors(net), [])
    with pytest.raises(PathError, match="cannot normalise by batch 2"):
        reset_statistics(net, tensors(net), pictures((3, 1)))
    broken = tensors(net)
    broken["0.bias"][0] = torch.inf
    with pytest.raises(PathError, match="through '1' is not finite"):
        reset_statistics(net, broken, pictures())


def test_refusals_of_repair():
    net = without(0)
    a = tensors(net)
    with pytest.raises(PathError, match="t = 2 is not between"):
        repair(net, a, a, a, 2, pictures())
    with pytest.raises(PathError, match="no data"):
        repair(net, a, a, a, 0.5, [])
    with pytest.raises(PathError, match="no linear or convolution layer '1'"):
        repair(net, a, a, a, 0.5, pictures(), layers=["1"])
    bare = without(0, bias=False)
    with pytest.raises(PathError, match="'0' has no bias"):
        repair(bare, *[tensors(bare)] * 3, 0.5, pictures())
    single = nn.Sequential(nn.Flatten(), nn.Linear(50, 2)).double()
    with pytest.raises(PathError, match="no layer to repair"):
        repair(single, *[tensors(single)] * 3, 0.5, pictures())
    broken = tensors(net)
    broken["0.bias"][0] = torch.nan
    with pytest.raises(PathError, match="through '0' is not finite"):
        repair(net, broken, a, a, 0.5, pictures())
