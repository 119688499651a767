"""Small networks with their specs."""

from itertools import pairwise

import torch

from isthmus.symmetry.heads import Heads
from isthmus.symmetry.matrix_groups import GeneralLinear, Orthogonal
from isthmus.symmetry.monomial import Monomial
from isthmus.symmetry.rope import RopeCommutant
from isthmus.symmetry.spec import FREE, Spec, on


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def mlp(*widths, factors="positive"):
    """A ReLU network: its spec, and its tensors' shapes."""
    axes = {f"h{i}": Monomial(n, factors) for i, n in enumerate(widths[1:-1])}
    tensors, shapes = {}, {}
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        writes = on(f"h{i}") if f"h{i}" in axes else FREE
        reads = on(f"h{i - 1}", "dual") if i else FREE
        tensors |= {f"{i}.weight": (writes, reads), f"{i}.bias": (writes,)}
        shapes |= {f"{i}.weight": (outputs, inputs), f"{i}.bias": (outputs,)}
    return Spec(axes, tensors), shapes


def run_mlp(parameters, x):
    depth = len(parameters) // 2
    for i in range(depth):
        x = x @ parameters[f"{i}.weight"].T + parameters[f"{i}.bias"]
        x = x.relu() if i < depth - 1 else x
    return x


STREAMS = {
    "permutation": Monomial(24),
    "signed": Monomial(24, "sign"),
    "orthogonal": Orthogonal(24),
    "centred": Orthogonal(24, keeps_mean=True),
}


def decoder(stream="permutation", *, layers=2, groups=2, queries=2, size=6, inner=32, words=60):
    """Blocks of attention with RoPE and of a gated MLP on a stream of width 24, tied head."""
    group = STREAMS[stream]
    width = group.size("vector")
    axes = {"stream": group}
    reads = on("stream", "dual")
    tensors, shapes = {"embed": (FREE, reads)}, {"embed": (words, width)}
    for i in range(layers):
        heads, hidden = f"heads{i}", f"hidden{i}"
        axes[heads] = Heads(groups, queries, RopeCommutant(size), GeneralLinear(size))
        axes[hidden] = Monomial(inner, "nonzero")
        tensors |= {
            f"{i}.q": (on(heads, "query"), reads),
            f"{i}.k": (on(heads, "key"), reads),
            f"{i}.v": (on(heads, "value"), reads),
            f"{i}.o": (on("stream"), on(heads, "output")),
            f"{i}.gate": (on(hidden, "gain"), reads),
            f"{i}.up": (on(hidden), reads),
            f"{i}.down": (on("stream"), on(hidden, "dual")),
        }
        shapes |= {
            f"{i}.q": (groups * queries * size, width),
            f"{i}.k": (groups * size, width),
            f"{i}.v": (groups * size, width),
            f"{i}.o": (width, groups * queries * size),
            f"{i}.gate": (inner, width),
            f"{i}.up": (inner, width),
            f"{i}.down": (width, inner),
        }
        if stream in ("permutation", "signed"):
            tensors[f"{i}.norm"], shapes[f"{i}.norm"] = (on("stream", "gain"),), (width,)
    return Spec(axes, tensors), shapes


def drawn(shapes, generator, dtype=torch.float64):
    return {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5).to(
            dtype
        )
        for name, shape in shapes.items()
    }


def distance(a, b):
    missed = sum(float((a[name] - b[name]).square().sum()) for name in a)
    return (missed / sum(float(a[name].square().sum()) for name in a)) ** 0.5
