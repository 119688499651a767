"""Millions of small constrained quadratic programmes: a primal active-set method, compiled by numba.

From a feasible start, each step goes towards the minimum over the coefficients that are free, stops at the
first bound in the way and fixes that coefficient; at the minimum of a face the coefficient whose multiplier
has the wrong sign is freed (Nocedal and Wright 2006, Numerical Optimization, algorithm 16.3). J falls with
every step, so that no face comes twice where A is positive definite.

Importing numba takes half a second, so this module is imported where it is needed.
"""

from __future__ import annotations

import numpy as np

from isthmus.methods.kernels import compiled


@compiled
def solve_blocks(matrix, linear, lower, upper, total, d, steps):  # type: ignore[no-untyped-def]
    """Minimise dᵀAd + 2bᵀd in every block, within bounds and, if total > 0, with Σ d = total.

    Args:
        matrix: A, shape [N, n, n] or [1, n, n], positive definite, float64.
        linear: b, shape [N, n], float64.
        lower: Bound of every coefficient; may be infinite.
        upper: Likewise.
        total: Of the coefficients of a block, or 0.
        d: Shape [N, n], feasible; overwritten by the solution.
        steps: At most so many in a block.

    Returns:
        The largest number of steps in a block.
    """
    blocks, n = linear.shape
    shared = matrix.shape[0] == 1
    factor = np.empty((n, n))
    slope, p, q = np.empty(n), np.empty(n), np.empty(n)
    free = np.empty(n, np.bool_)
    index = np.empty(n, np.int64)
    longest = 0
    for block in range(blocks):
        a = matrix[0] if shared else matrix[block]
        x = d[block]
        size, largest = 0.0, 0
        for i in range(n):
            free[i] = lower < x[i] < upper
            if x[i] > x[largest]:
                largest = i
            if a[i, i] > 0:
                size = max(size, abs(linear[block, i]) / np.sqrt(a[i, i]))
                size = max(size, abs(x[i]) * np.sqrt(a[i, i]))
        if total > 0:
            free[largest] = True
        step = 0
        while step < steps:
            step += 1
            count = 0
            for i in range(n):
                slope[i] = linear[block, i]
                for j in range(n):
                    slope[i] += a[i, j] * x[j]
                if free[i]:
                    index[count] = i
                    count += 1
            # Cholesky on the face, then A p = −slope and A q = 1 there.
            for r in range(count):
                for s in range(r + 1):
                    entry = a[index[r], index[s]]
                    for t in range(s):
                        entry -= factor[r, t] * factor[s, t]
                    if r > s:
                        factor[r, s] = entry / factor[s, s]
                    elif entry > 0:
                        factor[r, r] = np.sqrt(entry)
                    else:  # rounding: keep this coefficient where it is
                        factor[r, r] = np.inf
            for r in range(count):
                p[r], q[r] = -slope[index[r]], 1.0
                for t in range(r):
                    p[r] -= factor[r, t] * p[t]
                    q[r] -= factor[r, t] * q[t]
                p[r] /= factor[r, r]
                q[r] /= factor[r, r]
            for r in range(count - 1, -1, -1):
                for t in range(r + 1, count):
                    p[r] -= factor[t, r] * p[t]
                    q[r] -= factor[t, r] * q[t]
                p[r] /= factor[r, r]
                q[r] /= factor[r, r]
            multiplier = 0.0
            if total > 0:
                drift, spread = 0.0, 0.0
                for r in range(count):
                    drift += p[r]
                    spread += q[r]
                # Aᵀ(x + p) + b = multiplier on the face, with Σ p = 0.
                multiplier = -drift / spread
                for r in range(count):
                    p[r] += multiplier * q[r]
            length, blocking = 1.0, -1
            for r in range(count):
                i = index[r]
                reach = np.inf
                if p[r] < 0:
                    reach = (lower - x[i]) / p[r]
                elif p[r] > 0:
                    reach = (upper - x[i]) / p[r]
                if reach < length:
                    length, blocking = max(reach, 0.0), i
            for r in range(count):
                i = index[r]
                if i == blocking:
                    x[i] = lower if p[r] < 0 else upper
                    free[i] = False
                else:
                    x[i] = min(max(x[i] + length * p[r], lower), upper)
            if blocking >= 0:
                continue
            # The minimum of this face: does a fixed coefficient want to move inwards?
            worst, chosen = 1e-14 * size, -1
            for i in range(n):
                if free[i] or lower == upper:
                    continue
                gain = linear[block, i] - multiplier
                for j in range(n):
                    gain += a[i, j] * x[j]
                if x[i] == lower:
                    gain = -gain
                if a[i, i] > 0:
                    gain /= np.sqrt(a[i, i])
                if gain > worst:
                    worst, chosen = gain, i
            if chosen < 0:
                break
            free[chosen] = True
        longest = max(longest, step)
    return longest
