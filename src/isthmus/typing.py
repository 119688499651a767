"""Array types that several floors share."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float32] | NDArray[np.float64]
"""A numpy array of float32 or float64."""

StorageArray: TypeAlias = NDArray[Any]
"""A numpy array in a storage format, bfloat16 and float8 by way of ml_dtypes."""

Array: TypeAlias = Any
"""A numpy array or a torch tensor: the methods are written for both (array API)."""
