"""A family of tiny models, and a recipe for it."""

from __future__ import annotations

import pytest

from .models import family, recipe


@pytest.fixture
def models(tmp_path):
    return family(tmp_path / "models")


@pytest.fixture
def ties(models):
    return recipe("ties", models[1:], models[0], parameters={"density": 0.5})
