"""Linear heads: one per task, kept outside the encoder.

A head is fitted once, on features of the *base* encoder, and never changes again. The base, the
experts and every merged encoder are then judged under the same head, so that a difference in
accuracy is a difference between encoders; and encoders without heads have tensors of the same
names and shapes, so that they merge.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from isthmus.lab.cache import share_files


@dataclass(frozen=True)
class Head:
    """Logits are ``features @ weight.T + bias``.

    Attributes:
        weight: ``[C, D]``, a row per class.
        bias: ``[C]``.
    """

    weight: Tensor
    bias: Tensor

    def logits(self, features: Tensor) -> Tensor:
        """Logits ``[N, C]`` of features ``[N, D]``."""
        return features @ self.weight.T + self.bias

    def save(self, path: Path, key: str) -> None:
        """Write the head as one safetensors file, whole or not at all.

        Args:
            path: Where to.
            key: The content key of what the head was fitted on; `load` asks for it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        save_file({"weight": self.weight, "bias": self.bias}, partial, {"key": key})
        share_files(path.parent)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path, key: str) -> Head | None:
        """Read a head that `save` wrote, or return None where there is none with this key."""
        if not path.is_file():
            return None
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("key") != key:
                return None
            return cls(file.get_tensor("weight"), file.get_tensor("bias"))


def fit_head(features: Tensor, labels: tuple[int, ...], inverse_penalty: float) -> Head:
    """Fit a linear probe: multinomial logistic regression with a quadratic penalty.

    The problem is convex, hence its answer has no seed.

    Args:
        features: ``[N, D]``, of the frozen base.
        labels: ``N`` labels; every class from 0 to C-1 occurs.
        inverse_penalty: scikit-learn's ``C``; larger fits the training data closer.
    """
    from sklearn.linear_model import LogisticRegression

    probe = LogisticRegression(C=inverse_penalty, max_iter=2000).fit(features.numpy(), labels)
    weight = torch.from_numpy(probe.coef_).float()
    bias = torch.from_numpy(probe.intercept_).float()
    if len(probe.classes_) == 2:  # For two classes scikit-learn keeps the difference of the rows.
        weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
    return Head(weight.contiguous(), bias.contiguous())
