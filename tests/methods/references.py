"""The methods written straight from their papers, in float64 and without any chunks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def linear(experts: np.ndarray, weights: Sequence[float], normalize: bool = True) -> np.ndarray:
    total = np.tensordot(np.asarray(weights, float), experts.astype(float), axes=1)
    return total / sum(weights) if normalize else total


def trim(delta: np.ndarray, density: float) -> np.ndarray:
    keep = max(1, int(density * delta.size))
    threshold = np.sort(np.abs(delta), axis=None)[-keep] if delta.size else 0
    return np.where(np.abs(delta) >= threshold, delta, 0)


def task_arithmetic(
    experts: np.ndarray,
    base: np.ndarray,
    weights: Sequence[float],
    densities: Sequence[float],  # noqa: ARG001  has no effect
    scale: float,
    normalize: bool,
) -> np.ndarray:
    deltas = [(x - base).astype(float) for x in experts]
    total = sum(w * d for w, d in zip(weights, deltas, strict=True))
    return base + scale * (total / sum(weights) if normalize else total)


def ties(
    experts: np.ndarray,
    base: np.ndarray,
    weights: Sequence[float],
    densities: Sequence[float],
    scale: float,
    normalize: bool,
) -> np.ndarray:
    """Trim, elect, disjoint merge: algorithm 1 of arXiv 2306.01708, with weights."""
    weighted = np.stack(
        [
            w * trim(x - base, d).astype(float)
            for x, w, d in zip(experts, weights, densities, strict=True)
        ]
    )
    elected = np.where(weighted.sum(0) >= 0, 1, -1)
    agrees = np.sign(weighted) == elected
    merged = (weighted * agrees).sum(0)
    if normalize:
        divisor = (np.asarray(weights, float).reshape(-1, *[1] * base.ndim) * agrees).sum(0)
        merged = merged / np.where(divisor == 0, 1, divisor)
    return base + scale * merged


def slerp(one: np.ndarray, other: np.ndarray, t: float) -> np.ndarray:
    """The rotation in the plane of both, built from an orthonormal basis instead of sines of arcs."""
    a, b = one.astype(float).ravel(), other.astype(float).ravel()
    unit_a, unit_b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    across = unit_b - (unit_a @ unit_b) * unit_a
    angle = np.arctan2(np.linalg.norm(across), unit_a @ unit_b)
    across /= np.linalg.norm(across)

    def arc(share: float) -> np.ndarray:
        """Coefficients on (a, b) that give the unit vector at `share` of the arc."""
        point = np.cos(share * angle) * unit_a + np.sin(share * angle) * across
        return np.linalg.lstsq(np.stack([unit_a, unit_b], 1), point, rcond=None)[0]

    ca, cb = arc(t)
    return (ca * a + cb * b).reshape(one.shape)


def kth_largest(values: np.ndarray, k: int) -> float:
    """By torch's selection, an independent implementation."""
    flat = torch.from_numpy(np.abs(values).ravel())
    return float(torch.kthvalue(flat, flat.numel() - k + 1).values)


def magnitude(
    experts: np.ndarray,
    base: np.ndarray,
    weights: Sequence[float],
    densities: Sequence[float],
    scale: float,
    normalize: bool,
) -> np.ndarray:
    deltas = [trim((x - base), d).astype(float) for x, d in zip(experts, densities, strict=True)]
    total = sum(w * d for w, d in zip(weights, deltas, strict=True))
    return base + scale * (total / sum(weights) if normalize else total)


def _polar(columns: np.ndarray) -> np.ndarray:
    """The orthonormal factor of full column rank, by an inverse root instead of its SVD."""
    values, vectors = np.linalg.eigh(columns.T @ columns)
    return columns @ (vectors / np.sqrt(values)) @ vectors.T


def tsv(deltas: np.ndarray) -> np.ndarray:
    """TSV-Merge, arXiv 2412.00081: a share of 1/K of min(m, n) singular directions from each."""
    share = min(deltas.shape[1:]) // len(deltas)
    parts = [np.linalg.svd(delta, full_matrices=False) for delta in deltas]
    left = np.concatenate([u[:, :share] for u, _, _ in parts], axis=1)
    right = np.concatenate([v[:share] for _, _, v in parts])
    lengths = np.concatenate([s[:share] for _, s, _ in parts])
    return _polar(left) @ np.diag(lengths) @ _polar(right.T).T


def iso_c(deltas: np.ndarray) -> np.ndarray:
    """Iso-C, arXiv 2502.04959."""
    u, s, v = np.linalg.svd(deltas.sum(axis=0), full_matrices=False)
    return s.mean() * u @ v


def iso_cts(deltas: np.ndarray, fraction: float = 0.8) -> np.ndarray:
    """Iso-CTS, arXiv 2502.04959."""
    count, size = len(deltas), min(deltas.shape[1:])
    own = round((size - int(size * fraction)) / count)
    common = size - own * count
    u, s, v = np.linalg.svd(deltas.sum(axis=0), full_matrices=False)
    parts = [(u[:, :common], s[:common], v[:common])]
    outside = np.eye(len(u)) - u[:, :common] @ u[:, :common].T
    for delta in deltas:
        u, s, v = np.linalg.svd(outside @ delta, full_matrices=False)
        parts.append((u[:, :own], s[:own], v[:own]))
    left = np.concatenate([u for u, _, _ in parts], axis=1)
    right = np.concatenate([v for _, _, v in parts])
    return np.concatenate([s for _, s, _ in parts]).mean() * _polar(left) @ _polar(right.T).T
