"""Small models gain nothing of a second thread, and on a busy machine lose by it."""

from __future__ import annotations

import pytest

from isthmus.geometry.linalg import one_thread


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield
