"""The manifolds under test, small."""

from __future__ import annotations

from isthmus.geometry.euclidean import Euclidean, Sphere
from isthmus.geometry.fixed_rank import FixedRank
from isthmus.geometry.grassmann import Grassmann
from isthmus.geometry.product import Product
from isthmus.geometry.quotient import Quotient
from isthmus.geometry.spd import SPD
from isthmus.geometry.stiefel import Stiefel

MANIFOLDS = [
    Euclidean(3, 2),
    Sphere(5),
    Stiefel(9, 3),
    Stiefel(5, 4),
    Stiefel(4, 4),
    Stiefel(6, 1),
    SPD(4),
    Grassmann(9, 3),
    Grassmann(5, 4),
    Product(Sphere(3), SPD(2)),
    FixedRank(7, 6, 3),
    Quotient(FixedRank(7, 6, 3)),
]
