"""Reference estimators, written from the definitions with loops over episodes.

They share no formula with the package: advantages are explicit sums, returns are mixtures of
n-step returns, and an episode end is a `break`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from reference_returns import FloatArray


FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass
class Trajectory:
    """Columns of a rollout, [T, B]; next_values are the values of the true successors."""

    rewards: FloatArray
    values: FloatArray
    next_values: FloatArray
    terminated: BoolArray
    truncated: BoolArray

    def tensor(self, name: str) -> torch.Tensor:
        """Return one column as a tensor."""
        return torch.from_numpy(getattr(self, name).copy())


def make_trajectory(num_steps: int, num_envs: int, seed: int = 0) -> Trajectory:
    """Return random rewards and values; a quarter of the rows is terminal, a quarter is truncated.

    Within episodes the next value is the value of the next row; at an episode end it is the value
    of a final observation that is in no row.
    """
    rng = np.random.default_rng(seed)
    rewards, values, next_values = rng.normal(size=(3, num_steps, num_envs))
    terminated, truncated = rng.random((2, num_steps, num_envs)) < 0.25
    goes_on = ~(terminated | truncated)[:-1]
    next_values[:-1][goes_on] = values[1:][goes_on]
    return Trajectory(rewards, values, next_values, terminated, truncated)


def slow_recurrence(inputs: FloatArray, decays: FloatArray) -> FloatArray:
    """acc_t = x_t + d_t * acc_{t+1}, computed row by row."""
    result = np.zeros_like(inputs)
    following = np.zeros_like(inputs[0])
    for t in range(len(inputs) - 1, -1, -1):
        following = inputs[t] + decays[t] * following
        result[t] = following
    return result


def slow_advantages(data: Trajectory, gamma: float, gae_lambda: float) -> FloatArray:
    """Sum over k of (gamma * lambda)^k delta_{t+k} up to the end of the episode."""
    num_steps, num_envs = data.rewards.shape
    result = np.zeros((num_steps, num_envs))
    for b in range(num_envs):
        for t in range(num_steps):
            for k in range(t, num_steps):
                follows = 0.0 if data.terminated[k, b] else gamma * data.next_values[k, b]
                delta = data.rewards[k, b] + follows - data.values[k, b]
                result[t, b] += (gamma * gae_lambda) ** (k - t) * delta
                if data.terminated[k, b] or data.truncated[k, b]:
                    break
    return result


def _n_step_return(data: Trajectory, gamma: float, b: int, start: int, stop: int) -> float:
    """Return the discounted rewards of rows start .. stop - 1 plus the bootstrap value."""
    total = 0.0
    for k in range(start, stop):
        total += gamma ** (k - start) * data.rewards[k, b]
    if not data.terminated[stop - 1, b]:
        total += gamma ** (stop - start) * data.next_values[stop - 1, b]
    return total


def slow_returns(data: Trajectory, gamma: float, gae_lambda: float) -> FloatArray:
    """(1 - lambda) * sum of lambda^(n-1) * (n-step return); the longest return has the rest."""
    num_steps, num_envs = data.rewards.shape
    result = np.zeros((num_steps, num_envs))
    for b in range(num_envs):
        for t in range(num_steps):
            end = t
            while end < num_steps - 1 and not (data.terminated[end, b] or data.truncated[end, b]):
                end += 1
            for stop in range(t + 1, end + 1):
                weight = (1.0 - gae_lambda) * gae_lambda ** (stop - t - 1)
                result[t, b] += weight * _n_step_return(data, gamma, b, t, stop)
            result[t, b] += gae_lambda ** (end - t) * _n_step_return(data, gamma, b, t, end + 1)
    return result


# -- losses, written from the papers for one sample at a time --------------------------------------


def slow_surrogate(log_ratios: FloatArray, advantages: FloatArray, clip_range: float) -> float:
    """Return the negative mean of the minimum of the unclipped and the clipped objective."""
    total = 0.0
    for log_ratio, advantage in zip(log_ratios.flat, advantages.flat, strict=True):
        ratio = math.exp(log_ratio)
        clipped = min(max(ratio, 1.0 - clip_range), 1.0 + clip_range)
        total += min(ratio * advantage, clipped * advantage)
    return -total / log_ratios.size


def slow_clipped_value_loss(
    values: FloatArray, old_values: FloatArray, targets: FloatArray, clip_range: float
) -> float:
    """Return the mean of the maximum of the unclipped and the clipped squared error."""
    total = 0.0
    for value, old, target in zip(values.flat, old_values.flat, targets.flat, strict=True):
        clipped = old + min(max(value - old, -clip_range), clip_range)
        total += max((value - target) ** 2, (clipped - target) ** 2)
    return total / values.size


def slow_two_hot(scalar: float, low: int, high: int) -> FloatArray:
    """Return weights of the two neighbouring integers, in inverse proportion to their distance."""
    scalar = min(max(scalar, low), high)
    below = math.floor(scalar)
    result = np.zeros(high - low + 1)
    result[below - low] = 1.0 - (scalar - below)
    if below < high:
        result[below - low + 1] = scalar - below
    return result


def slow_two_hot_loss(logits: FloatArray, targets: FloatArray, low: int, high: int) -> float:
    """Return the mean cross-entropy of softmax(logits) and the two-hot targets, row by row."""
    total = 0.0
    for row, target in zip(logits, targets, strict=True):
        normalizer = sum(math.exp(logit) for logit in row)
        for weight, logit in zip(slow_two_hot(target, low, high), row, strict=True):
            total -= weight * math.log(math.exp(logit) / normalizer)
    return total / len(logits)


# -- V-trace, written from the paper as sums -------------------------------------------------------


FloatArray = npt.NDArray[np.float64]


@dataclass
class Steps:
    """Arguments of V-trace in order, [T, ...] each."""

    log_rhos: FloatArray
    discounts: FloatArray
    rewards: FloatArray
    values: FloatArray
    next_values: FloatArray
    lambdas: FloatArray


def make_steps(shape: tuple[int, ...], seed: int, scale: float = 2.0) -> Steps:
    """Return random steps; a fifth of the discounts and a fifth of the lambdas are 0."""
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
    """Targets of eq. 1: V(x_s) + sum over t >= s of gamma^(t-s) (c_s ... c_(t-1)) delta_t.

    Advantages of section 4.2: rho_s (r_s + gamma q_(s+1) - V(x_s)), where q mixes the target and
    the value of the next state by lambda.
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
