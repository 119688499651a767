"""The relative distance of two models."""

import pytest
import torch

from isthmus.errors import PathError
from isthmus.paths.distance import relative_distance


def test_it_is_that_of_the_flat_vectors():
    generator = torch.Generator().manual_seed(0)
    a, b = (
        {"w": torch.randn(3, 4, generator=generator), "b": torch.randn(3, generator=generator)}
        for _ in range(2)
    )
    flat = [torch.cat([x.flatten() for x in model.values()]).double() for model in (a, b)]
    assert relative_distance(a, b) == pytest.approx(
        float((flat[0] - flat[1]).norm() / flat[0].norm())
    )


def test_counters_do_not_count_and_zero_is_no_divisor():
    one = {"w": torch.zeros(2), "n": torch.tensor(3)}
    other = {"w": torch.tensor([3.0, 4.0]), "n": torch.tensor(9)}
    assert relative_distance(one, other) == 5
    assert relative_distance(one, one) == 0


def test_other_names_and_shapes():
    with pytest.raises(PathError):
        relative_distance({"w": torch.ones(2)}, {"v": torch.ones(2)})
    with pytest.raises(PathError):
        relative_distance({"w": torch.ones(2)}, {"w": torch.ones(3)})
