"""V-trace written from the paper, as sums; and policies and values of a small decision process.

The sums share no formula with the package, which computes a recursion.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


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


GAMMA = 0.8
MOVES = np.array(
    [
        [[0.7, 0.3, 0.0, 0.0], [0.2, 0.0, 0.8, 0.0]],
        [[0.9, 0.0, 0.1, 0.0], [0.0, 0.1, 0.0, 0.9]],
        [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.4, 0.6]],
    ]
)
REWARDS = np.array([[0.0, -1.0], [0.5, 1.0], [-2.0, 3.0]])
BEHAVIOUR = np.array([[0.9, 0.1], [0.3, 0.7], [0.5, 0.5]])
TARGET = np.array([[0.2, 0.8], [0.6, 0.4], [0.1, 0.9]])
"""A chain of three states and a terminal one, [state, action, next state]; its rewards and two
policies, [state, action]."""


def policy_between(rho_bar: float | None) -> FloatArray:
    """pi_rho of section 4.1: proportional to min(rho_bar * mu, pi)."""
    weights = TARGET if rho_bar is None else np.minimum(rho_bar * BEHAVIOUR, TARGET)
    policy: FloatArray = weights / weights.sum(1, keepdims=True)
    return policy


def exact_values(policy: FloatArray) -> FloatArray:
    """Values of the three states under a policy, and the 0 of the terminal one."""
    moves = np.einsum("sa,san->sn", policy, MOVES)[:, :3]
    rewards = (policy * REWARDS).sum(1)
    return np.append(np.linalg.solve(np.eye(3) - GAMMA * moves, rewards), 0.0)


def all_trajectories(num_steps: int) -> tuple[IntArray, IntArray, FloatArray]:
    """Everything that can happen in a number of steps of the behaviour policy.

    Returns:
        States [T + 1, N], actions [T, N], and probabilities given the first state [N]. After the
        terminal state, 3, comes state 0 of a new episode.
    """
    found: list[tuple[list[int], list[int], float]] = []
    steps = list(product(range(2), range(4)))
    for start, taken in product(range(3), product(steps, repeat=num_steps)):
        states, probability = [start], 1.0
        for action, follower in taken:
            state = states[-1] % 3
            probability *= BEHAVIOUR[state, action] * MOVES[state, action, follower]
            states.append(follower)
        if probability > 0.0:
            found.append((states, [action for action, _ in taken], probability))
    all_states, all_actions, probabilities = zip(*found, strict=True)
    return np.array(all_states).T, np.array(all_actions).T, np.array(probabilities)
