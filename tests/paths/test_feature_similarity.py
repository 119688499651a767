import numpy as np
import pytest
import torch

from isthmus.errors import PathError
from isthmus.paths.feature_similarity import linear_cka


def features(seed: int, examples: int = 40, units: int = 6) -> torch.Tensor:
    return torch.randn(examples, units, generator=torch.Generator().manual_seed(seed))


def test_rotated_and_scaled_features_are_the_same() -> None:
    x = features(0)
    rotation = torch.linalg.qr(features(1, 6, 6)).Q
    assert linear_cka(x, 3 * x @ rotation + 5) == pytest.approx(1, abs=1e-6)


def test_it_is_the_alignment_of_centred_gram_matrices() -> None:
    """HSIC with linear kernels, from the [N, N] Gram matrices of Kornblith et al."""
    x, y = features(0).double(), features(1, units=9).double()
    centring = np.eye(40) - 1 / 40
    k, m = (centring @ (z @ z.T).numpy() @ centring for z in (x, y))
    expected = np.sum(k * m) / (np.linalg.norm(k) * np.linalg.norm(m))
    assert linear_cka(x, y) == pytest.approx(expected, rel=1e-10)
    assert linear_cka(x, y) == pytest.approx(linear_cka(y, x), rel=1e-12)


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (torch.zeros(4, 2), torch.randn(4, 2), "the same for every example"),
        (torch.randn(4, 2), torch.randn(5, 2), "shapes"),
        (torch.randn(4), torch.randn(4), "shapes"),
    ],
)
def test_features_that_say_nothing(x: torch.Tensor, y: torch.Tensor, said: str) -> None:
    with pytest.raises(PathError, match=said):
        linear_cka(x, y)
