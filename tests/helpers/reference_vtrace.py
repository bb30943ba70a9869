"""V-trace written from the paper, as sums.

The sums share no formula with the package, which computes a recursion.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass
class Steps:
    """Arguments of V-trace, [T, ...] each, in its order."""

    log_rhos: FloatArray
    discounts: FloatArray
    rewards: FloatArray
    values: FloatArray
    next_values: FloatArray
    lambdas: FloatArray


def make_steps(shape: tuple[int, ...], seed: int, scale: float = 2.0) -> Steps:
    """Random steps: a fifth of the discounts and a fifth of the lambdas are 0."""
    rng = np.random.default_rng(seed)
    log_rhos = scale * rng.normal(size=shape)
    rewards, values, next_values = rng.normal(size=(3, *shape))
    discounts, lambdas = rng.uniform(0.3, 1.0, (2, *shape)) * (rng.random((2, *shape)) > 0.2)
    return Steps(log_rhos, discounts, rewards, values, next_values, lambdas)


def _clipped(ratio: float, threshold: float | None) -> float:
    return ratio if threshold is None else min(threshold, ratio)


def slow_vtrace(
    steps: Steps, rho_bar: float | None, pg_rho_bar: float | None, c_bar: float | None
) -> tuple[FloatArray, FloatArray]:
    """Targets by eq. 1: V(x_s) + sum over t >= s of gamma^(t-s) (c_s ... c_(t-1)) delta_t.

    Advantages by section 4.2: rho_s (r_s + gamma q_(s+1) - V(x_s)), where q mixes the target of the
    next state with its value, by lambda.
    """
    shape = steps.rewards.shape
    columns = [column.reshape(len(column), -1).T for column in vars(steps).values()]
    targets, advantages = np.zeros((2, *columns[0].shape))
    for n, (log_rho, gamma, r, v, v_next, lam) in enumerate(zip(*columns, strict=True)):
        rho = np.exp(log_rho)
        for s in range(len(r)):
            targets[n, s] = v[s]
            for t in range(s, len(r)):
                weight = 1.0
                for i in range(s, t):
                    weight *= gamma[i] * lam[i] * _clipped(rho[i], c_bar)
                error = r[t] + gamma[t] * v_next[t] - v[t]
                targets[n, s] += weight * _clipped(rho[t], rho_bar) * error
        for s in range(len(r)):
            q = v_next[s]
            if s + 1 < len(r):
                q += lam[s] * (targets[n, s + 1] - v[s + 1])
            advantages[n, s] = _clipped(rho[s], pg_rho_bar) * (r[s] + gamma[s] * q - v[s])
    return targets.T.reshape(shape), advantages.T.reshape(shape)
