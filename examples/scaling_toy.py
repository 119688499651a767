"""Draws the smallest network with a symmetry, f(x) = a b x, and two means of it.

    python examples/scaling_toy.py docs/figures/scaling-toy.svg

(a, b) and (ca, b/c) are the same function, so every hyperbola of one product is one function. One
model is fixed and a second one runs along its hyperbola: the mean of the parameters becomes another
function at every step, and zero where the two are opposite; the mean on the quotient stays.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from isthmus.geometry.scaling_toy import (
    balanced,
    euclidean_mean,
    product,
    quotient_mean,
    rescale,
)

FIXED, SLOPE = (1.5, 1.0), 0.8
"""One model, and the product ab of the other."""


def draw(target: Path) -> None:
    """Write the figure.

    Args:
        target: An .svg or .png file.
    """
    # A fixed salt and no date make the file the same on every run.
    matplotlib.rcParams.update({"svg.hashsalt": "isthmus", "svg.fonttype": "none", "font.size": 9})
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    plane, slopes = figure.subplots(1, 2, width_ratios=[1, 1.2])
    a = np.linspace(0.25, 3, 200)
    for sign in (1, -1):
        plane.plot(sign * a, sign * product(FIXED) / a, color="tab:blue", alpha=0.5)
        plane.plot(sign * a, sign * SLOPE / a, color="tab:orange", alpha=0.5)
    scales = np.array([-2.5, -1.0, 0.4, 1.0, 2.5])
    second = rescale(balanced(SLOPE), scales)
    means = np.array([euclidean_mean([FIXED, point], [1, 1]) for point in second])
    plane.plot(*np.array(FIXED), "o", color="tab:blue", label="one model")
    plane.plot(*second.T, "o", color="tab:orange", label="the other, rescaled")
    plane.plot(*means.T, "x", color="tab:red", label="means of the parameters")
    plane.plot(
        *quotient_mean([FIXED, second[0]], [1, 1]), "*", color="tab:green", label="quotient mean"
    )
    plane.set(xlabel="a", ylabel="b", xlim=(-3, 3), ylim=(-3, 3), title="parameters")
    plane.legend(fontsize=7, loc="upper left")

    c = np.concatenate([np.linspace(-4, -0.2, 200), [np.nan], np.linspace(0.2, 4, 200)])
    moving = rescale(balanced(SLOPE), np.where(np.isnan(c), 1, c))
    naive = np.array([product(euclidean_mean([FIXED, point], [1, 1])) for point in moving])
    kept = np.array([product(quotient_mean([FIXED, point], [1, 1])) for point in moving])
    gap = np.isnan(c)
    slopes.plot(c, np.where(gap, np.nan, naive), color="tab:red", label="mean of the parameters")
    slopes.plot(c, np.where(gap, np.nan, kept), color="tab:green", label="quotient mean")
    slopes.axhline(0, color="gray", linewidth=0.5)
    slopes.set(xlabel="c, the scale at which the other model is written down", title="slope ab")
    slopes.legend(fontsize=7)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
