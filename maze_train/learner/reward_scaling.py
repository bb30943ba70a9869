"""Scaling of rewards by the standard deviation of discounted returns."""

from __future__ import annotations

from typing import Any

import torch

from maze_train.core.checks import check_same_shape
from maze_train.core.errors import ShapeError, TrainingError
from maze_train.core.step_end import is_followed_by_new, is_transition
from maze_train.core.types import Tensor
from maze_train.functional.moments import Moments, batch_moments, merge_moments
from maze_train.functional.returns import backward_recurrence

EPSILON = 1e-8
"""Constant added to the variance."""

RESOLUTION = 1e-6
"""A standard deviation below this fraction of the mean is treated as rounding error."""


class RewardScaler:
    """Scales rewards so that discounted returns have a standard deviation near 1.

    For each environment and episode,

    G_t = r_t + gamma * G_{t-1} * (1 - ended_{t-1}),  scaled r_t = r_t / sqrt(var(G) + 1e-8)

    and the scaled rewards are clipped. The variance is computed over all G so far, including the
    current rollout. The mean is not subtracted, so rewards keep their sign.

    While all G are equal (before the first nonzero reward, or after a single step), rewards are
    only clipped. The variance is underestimated in the first rollouts, while G still accumulates.

    Args:
        gamma: Discount of the agent, in [0, 1].
        clip: Bound of the scaled rewards, > 0; 0 disables clipping.
        only_large: Whether to treat a standard deviation below 1 as 1, so that rewards are never
            scaled up.

    Source: Engstrom et al. (2020), arXiv:2005.12729, algorithm 1, with the sum reset in each
    episode.
    """

    def __init__(self, gamma: float, clip: float, only_large: bool = False) -> None:
        self.gamma = gamma
        self.only_large = only_large
        self.clip = clip
        self.moments = batch_moments(torch.zeros(0))
        self._carry = torch.zeros(0, dtype=torch.float64)

    def scale(self, rewards: Tensor, end: Tensor) -> Tensor:
        """Update the statistics with a rollout, then scale the rewards of the rollout.

        Episodes continue from the previous rollout unless the number of environments changes.

        Args:
            rewards: Raw rewards, `[T, B]`.
            end: End codes of the steps (`maze_train.core.step_end.StepEnd`), `[T, B]`. Steps that
                are not transitions are excluded from the statistics, but their rewards are scaled.

        Returns:
            New tensor of scaled rewards, `[T, B]`, with the dtype of the rewards.

        Raises:
            ShapeError: If the tensors differ in shape or are not `[T, B]`.
            TrainingError: If a reward is not finite. The statistics are not modified.
        """
        if rewards.dim() != 2:
            raise ShapeError(f"rewards has shape {list(rewards.shape)}, expected [T, B]")
        check_same_shape(rewards=rewards, end=end)
        end = end.cpu()
        valid = is_transition(end)
        _check_finite(rewards, valid)
        sums, carry = self._discounted_sums(rewards.detach().cpu().double(), end, valid)
        batch = batch_moments(sums[valid])
        self.moments, self._carry = merge_moments(self.moments, batch), carry
        scaled = rewards / self._divisor()
        return scaled.clamp_(-self.clip, self.clip) if self.clip else scaled

    def _discounted_sums(
        self, rewards: Tensor, end: Tensor, valid: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return G `[T, B]` and the initial value for the next rollout `[B]`."""
        steps, n = rewards.shape
        carry = self._carry if self._carry.shape == (n,) else rewards.new_zeros(n)
        if steps == 0:
            return rewards, carry
        goes_on = ~is_followed_by_new(end)
        # Steps that are not transitions are not discounted.
        discounts = torch.full_like(rewards, self.gamma).masked_fill_(~valid, 1.0)
        inputs, decays = rewards.where(valid, 0.0), discounts.clone()
        inputs[0] += discounts[0] * carry
        decays[1:] *= goes_on[:-1]
        # The recursion of discounted returns, applied forward in time.
        sums = backward_recurrence(inputs.flip(0), decays.flip(0)).flip(0)
        return sums, sums[-1] * goes_on[-1]

    def _divisor(self) -> float:
        mean, var = float(self.moments.mean), float(self.moments.var)
        if var <= (RESOLUTION * mean) ** 2:
            return 1.0
        deviation = float((var + EPSILON) ** 0.5)
        return max(1.0, deviation) if self.only_large else deviation

    def forget(self, envs: Tensor) -> None:
        """Reset the sums of environments whose episodes were aborted.

        Args:
            envs: Environments to reset, `[B]` bool. In multi-agent training, the sums of all agents
                are reset.
        """
        if len(self._carry) % len(envs) == 0:
            self._carry = self._carry.masked_fill(envs.repeat(len(self._carry) // len(envs)), 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return statistics and running sums as tensors."""
        return {
            "count": self.moments.count.clone(),
            "mean": self.moments.mean.clone(),
            "var": self.moments.var.clone(),
            "carry": self._carry.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`."""
        self.moments = Moments(
            count=state["count"].clone(), mean=state["mean"].clone(), var=state["var"].clone()
        )
        self._carry = state["carry"].clone()


def _check_finite(rewards: Tensor, valid: Tensor) -> None:
    finite = torch.isfinite(rewards).cpu() | ~valid
    if not bool(finite.all()):
        step, env = finite.logical_not().nonzero()[0].tolist()
        raise TrainingError(
            f"the reward of environment {env} at step {step} of the rollout is "
            f"{float(rewards[step, env])}: expected finite rewards, check env.step()"
        )
