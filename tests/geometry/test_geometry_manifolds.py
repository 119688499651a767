"""What every manifold promises."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.geometry.diagnose import diagnose
from isthmus.geometry.euclidean import Euclidean, Sphere
from isthmus.geometry.fixed_rank import FixedRank
from isthmus.geometry.grassmann import Grassmann
from isthmus.geometry.manifold import GeometryWarning
from isthmus.geometry.product import Product
from isthmus.geometry.quotient import Quotient
from isthmus.geometry.spd import SPD
from isthmus.geometry.stiefel import Stiefel

from .manifolds import MANIFOLDS


def parts(x):
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=str)
def test_diagnosis(manifold):
    found = diagnose(manifold)
    assert found.exp_log < 1e-11
    assert found.distance < 1e-12
    assert found.symmetry < 1e-12
    assert found.isometry < 1e-12
    assert found.gradient < 1e-9


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=str)
def test_batches_agree_with_single_points(manifold, generator):
    x = manifold.random(generator, (2, 3))
    u = manifold.scale(0.4, manifold.random_tangent(generator, x))
    y = manifold.exp(x, u)
    lengths = manifold.dist(x, y)
    assert lengths.shape == (2, 3)

    def at(point, i, j):
        chosen = [part[i, j] for part in parts(point)]
        return (
            type(point)(*chosen)
            if hasattr(point, "_fields")
            else (tuple(chosen) if isinstance(point, tuple) else chosen[0])
        )

    for i in range(2):
        for j in range(3):
            one = manifold.dist(at(x, i, j), at(y, i, j))
            torch.testing.assert_close(one, lengths[i, j], rtol=0, atol=1e-13)


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=str)
def test_one_point_against_many(manifold, generator):
    x = manifold.random(generator)
    many = manifold.stack(
        [manifold.exp(x, manifold.scale(0.3, manifold.random_tangent(generator, x))) for _ in "abc"]
    )
    torch.testing.assert_close(
        manifold.dist(x, many), torch.full((3,), 0.3, dtype=torch.float64), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=str)
def test_equal_points_have_distance_zero(manifold, generator):
    x = manifold.random(generator)
    assert float(manifold.dist(x, x)) < 1e-13


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=str)
def test_projection_is_idempotent(manifold, generator):
    x = manifold.random(generator)
    u = manifold.random_tangent(generator, x)
    for before, after in zip(parts(u), parts(manifold.project(x, u)), strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=1e-13)


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=str)
def test_float32_points_are_restored(manifold, generator):
    x = manifold.random(generator)
    rough = [part.to(torch.float32) for part in parts(x)]
    rough = (
        type(x)(*rough)
        if hasattr(x, "_fields")
        else (tuple(rough) if isinstance(x, tuple) else rough[0])
    )
    fine = manifold.point(rough)
    assert all(part.dtype == torch.float64 for part in parts(fine))
    manifold.point(fine)
    assert float(manifold.dist(x, fine)) < 1e-5


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.floats(0.0, 0.85), which=st.integers(0, 10))
def test_log_inverts_exp_and_triangles_close(seed, length, which):
    torch.set_num_threads(1)
    manifold = MANIFOLDS[which]
    if isinstance(manifold, FixedRank | Quotient | Grassmann):
        length /= 2
    generator = torch.Generator().manual_seed(seed)
    x = manifold.random(generator)
    y = manifold.exp(x, manifold.scale(length, manifold.random_tangent(generator, x)))
    z = manifold.exp(x, manifold.scale(length, manifold.random_tangent(generator, x)))
    xy, xz, yz = (float(manifold.dist(*pair)) for pair in ((x, y), (x, z), (y, z)))
    assert xy == pytest.approx(length, abs=1e-11)
    assert yz <= xy + xz + 1e-11


@pytest.mark.parametrize("n", [2, 3, 5])
def test_sphere_against_arccosine_and_its_cut_locus(n, generator):
    sphere = Sphere(n)
    x, y = sphere.random(generator), sphere.random(generator)
    torch.testing.assert_close(sphere.dist(x, y), torch.dot(x, y).acos(), rtol=0, atol=1e-12)
    assert not sphere.logarithm(x, -x).certified
    with pytest.warns(GeometryWarning, match="no geodesic"):
        sphere.log(x, -x)


def test_grassmann_against_principal_angles_of_scipy(generator):
    from scipy.linalg import subspace_angles

    for n, p in [(12, 4), (5, 4), (6, 3)]:
        manifold = Grassmann(n, p)
        x, y = manifold.random(generator), manifold.random(generator)
        angles = torch.as_tensor(subspace_angles(x.numpy(), y.numpy()))
        torch.testing.assert_close(
            manifold.dist(x, y), torch.linalg.vector_norm(angles), rtol=0, atol=1e-10
        )


def test_grassmann_is_never_farther_than_stiefel(generator):
    for n, p in [(20, 3), (7, 5)]:
        x = Stiefel(n, p).random(generator)
        y = Stiefel(n, p).exp(x, 0.8 * Stiefel(n, p).random_tangent(generator, x))
        grassmann = Grassmann(n, p)
        assert grassmann.dist(x, y) <= Stiefel(n, p).dist(x, y) + 1e-12
        horizontal = Stiefel(n, p).log(x, grassmann.exp(x, grassmann.log(x, y)))
        assert float((x.mT @ horizontal).abs().max()) < 1e-12


def test_spd_against_scipy(generator):
    import numpy as np
    from scipy.linalg import eigh, expm, logm, sqrtm

    spd = SPD(5)
    x, y = spd.random(generator), spd.random(generator)
    values = eigh(y.numpy(), x.numpy(), eigvals_only=True)
    assert float(spd.dist(x, y)) == pytest.approx(np.sqrt((np.log(values) ** 2).sum()), abs=1e-12)
    root = sqrtm(x.numpy())
    inverse = np.linalg.inv(root)
    log = root @ logm(inverse @ y.numpy() @ inverse) @ root
    np.testing.assert_allclose(spd.log(x, y).numpy(), log, atol=1e-11)
    u = spd.random_tangent(generator, x)
    exp = root @ expm(inverse @ u.numpy() @ inverse) @ root
    np.testing.assert_allclose(spd.exp(x, u).numpy(), exp, atol=1e-11)


def test_ill_conditioned_matrices_warn():
    with pytest.warns(GeometryWarning, match="condition number"):
        SPD(2).point(torch.diag(torch.tensor([1.0, 1e-10], dtype=torch.float64)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SPD(2).point(torch.diag(torch.tensor([1.0, 1e-6], dtype=torch.float64)))


def test_product_adds_squares(generator):
    product = Product(Sphere(3), Euclidean(2))
    x, y = product.random(generator), product.random(generator)
    squares = Sphere(3).dist(x[0], y[0]) ** 2 + Euclidean(2).dist(x[1], y[1]) ** 2
    torch.testing.assert_close(product.dist(x, y) ** 2, squares)


def test_the_package_imports_no_torch():
    code = "import sys, isthmus.geometry, isthmus.geometry.gram; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
