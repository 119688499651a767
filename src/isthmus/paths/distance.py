"""How far two models are apart."""

from __future__ import annotations

import math

from isthmus.paths.mixing import Parameters, check_names, same_shape


def relative_distance(a: Parameters, b: Parameters) -> float:
    """‖a − b‖ / ‖a‖ over all floating-point tensors, in float64; ‖b‖ where a is zero.

    Raises:
        PathError: Other names or shapes.
    """
    check_names((a, b))
    apart = size = 0.0
    for name in a:
        one, other = a[name], b[name]
        if not one.is_floating_point():
            continue
        same_shape(name, one, other)
        wide = one.double()
        apart += float((wide - other.double()).square().sum())
        size += float(wide.square().sum())
    return math.sqrt(apart / size) if size else math.sqrt(apart)
