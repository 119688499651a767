"""The methods by name."""

from __future__ import annotations

from difflib import get_close_matches

from isthmus.errors import MethodError
from isthmus.methods.calibrated import FISHER, PROJECTION, REGMEAN, REGMEAN_PLUS_PLUS
from isthmus.methods.cat import CAT
from isthmus.methods.geomerge import GEOMERGE
from isthmus.methods.iso import ISO_C, ISO_CTS
from isthmus.methods.linear import LINEAR
from isthmus.methods.method import Method
from isthmus.methods.passthrough import PASSTHROUGH
from isthmus.methods.slerp import SLERP
from isthmus.methods.task_vectors import (
    DARE_LINEAR,
    DARE_TIES,
    MAGNITUDE,
    TASK_ARITHMETIC,
    TIES,
)
from isthmus.methods.tsv import TSV_MERGE

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        LINEAR,
        TASK_ARITHMETIC,
        MAGNITUDE,
        TIES,
        DARE_LINEAR,
        DARE_TIES,
        TSV_MERGE,
        ISO_C,
        ISO_CTS,
        CAT,
        GEOMERGE,
        SLERP,
        PASSTHROUGH,
        PROJECTION,
        REGMEAN,
        REGMEAN_PLUS_PLUS,
        FISHER,
    )
}


def get_method(name: str) -> Method:
    """The method of that name.

    Raises:
        MethodError: if there is none; the nearest known name is suggested.
    """
    if name in METHODS:
        return METHODS[name]
    near = get_close_matches(name, METHODS, n=1)
    raise MethodError(
        f"there is no merge method {name!r}",
        f"Did you mean {near[0]!r}?" if near else f"Known methods: {', '.join(METHODS)}.",
    )
