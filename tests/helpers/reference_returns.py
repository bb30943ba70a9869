"""Slow estimators, written from the definitions: loops over episodes, flags in place of arrays.

They share no formula with the package: advantages are explicit sums, returns are mixtures of
n-step returns, and an episode end is a `break`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass
class Trajectory:
    """Columns of a rollout, [T, B]; next_values is v of the true successor."""

    rewards: FloatArray
    values: FloatArray
    next_values: FloatArray
    terminated: BoolArray
    truncated: BoolArray

    def tensor(self, name: str) -> torch.Tensor:
        """One column as a tensor."""
        return torch.from_numpy(getattr(self, name).copy())


def make_trajectory(num_steps: int, num_envs: int, seed: int = 0) -> Trajectory:
    """Random rewards and values; a fourth of the rows is terminal, a fourth is truncated.

    Inside of episodes the next value is the value of the next row; at an end it is the value of
    a last observation that appears in no row.
    """
    rng = np.random.default_rng(seed)
    rewards, values, next_values = rng.normal(size=(3, num_steps, num_envs))
    terminated, truncated = rng.random((2, num_steps, num_envs)) < 0.25
    goes_on = ~(terminated | truncated)[:-1]
    next_values[:-1][goes_on] = values[1:][goes_on]
    return Trajectory(rewards, values, next_values, terminated, truncated)


def slow_recurrence(inputs: FloatArray, decays: FloatArray) -> FloatArray:
    """acc_t = x_t + d_t * acc_{t+1}, one row after the other."""
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
    """Rewards of the rows start .. stop - 1, then the value after them unless it is terminal."""
    total = 0.0
    for k in range(start, stop):
        total += gamma ** (k - start) * data.rewards[k, b]
    if not data.terminated[stop - 1, b]:
        total += gamma ** (stop - start) * data.next_values[stop - 1, b]
    return total


def slow_returns(data: Trajectory, gamma: float, gae_lambda: float) -> FloatArray:
    """(1 - lambda) * sum of lambda^(n-1) * (n-step return), the rest on the longest return."""
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
