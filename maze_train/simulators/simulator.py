"""Many environments that take and give tensors on one device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces

from maze_train.core.errors import EnvError
from maze_train.core.step_end import TERMINATED, TRUNCATED, StepBatch, has_ended
from maze_train.core.types import Array, Tensor, TensorTree, as_tree, leaves_by_key
from maze_train.spaces.describe import FlatView


class Simulator(ABC):
    """B environments that step together, take tensors and give tensors on one device.

    An episode that ends is followed by the next one in the same step. Observations and actions are
    one tensor, or one flat mapping of tensors (keys joined by `/`). Nothing waits for the device.

    Attributes:
        num_envs: B.
        device: Where all tensors lie.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        can_be_restored: Whether `state_dict` gives the running episodes.
        truncation: Target of the value at a time limit if the simulator does not give the last
            observation, see `EnvConfig.truncation`.
        has_lasting_state: Whether that state holds more than a reset begins anew.
        name: Name in messages.
        replaced_ends: Whether `truncation` has replaced the end of an episode, as a bool tensor on
            the device once there may have been one.
    """

    num_envs: int
    device: torch.device
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    can_be_restored: bool = False
    truncation: Literal["bootstrap_previous", "as_termination"] = "bootstrap_previous"
    has_lasting_state: bool = False
    name: str = "the simulator"
    replaced_ends: Tensor | bool = False

    @abstractmethod
    def reset(self, seed: int) -> TensorTree:
        """Begin new episodes everywhere; returns the first observations, `[B, ...]`."""

    def step(self, actions: TensorTree) -> StepBatch[Tensor]:
        """Step every environment once, and apply `truncation`.

        Args:
            actions: As the action space says, `[B, ...]`.

        Returns:
            `final_obs` is None if the simulator does not give the last observations.
        """
        batch = self._step(actions)
        if batch.final_obs is None and self.truncation == "as_termination":
            cut = batch.end == TRUNCATED
            self.replaced_ends = cut.any() | self.replaced_ends
            batch.end = batch.end.masked_fill(cut, TERMINATED)
        return batch

    @abstractmethod
    def _step(self, actions: TensorTree) -> StepBatch[Tensor]:
        """Step every environment once; see `step`."""

    def reset_arrays(self, seed: int) -> dict[str, Array]:
        """As `reset`; returns copies of the first observations as arrays by leaf."""
        return arrays_of(self.reset(seed))

    def step_arrays(self, actions: Mapping[str, Array]) -> StepBatch[Array]:
        """As `step`, with arrays by leaf; numbers by name are there if an episode ended."""
        parts = {
            key: torch.from_numpy(np.ascontiguousarray(part)).to(self.device)
            for key, part in actions.items()
        }
        found = self.step(as_tree(parts, "" not in parts))
        end = found.end.cpu().numpy().copy()
        rewards = found.rewards.cpu().numpy().astype(np.float64)
        batch = StepBatch(arrays_of(found.obs), rewards, end)
        if has_ended(end).any():
            batch.final_obs = None if found.final_obs is None else arrays_of(found.final_obs)
            numbers = {key: x.cpu().expand(self.num_envs) for key, x in found.columns.items()}
            batch.columns = {key: x.numpy().copy() for key, x in numbers.items()}
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The running episodes as arrays and tensors.

        Raises:
            EnvError: If the simulator does not give them: `can_be_restored` is false.
        """
        raise EnvError(f"{self.name} does not give the state of its episodes")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the episodes of `state`.

        Raises:
            EnvError: If the simulator cannot.
        """
        raise EnvError(f"{self.name} takes no state of episodes")

    def render(self) -> Any:
        """A picture `[height, width, 3]` of the first environment; None: it cannot be drawn."""
        return None

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Release what the simulator holds."""


def offered(env: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return those attributes of a third-party object that it has, by name, in this order."""
    return {name: getattr(env, name) for name in names if hasattr(env, name)}


def arrays_of(tree: TensorTree) -> dict[str, Array]:
    """Copies of tensors as arrays by leaf."""
    return {key: x.cpu().numpy().copy() for key, x in leaves_by_key(tree).items()}


def flat_leaves(view: FlatView, value: Any) -> TensorTree:
    """A value of a space as one tensor, or as one flat mapping of tensors."""
    leaves = leaves_by_key(value) if view.is_single else dict(view.read(value))
    return as_tree(leaves, not view.is_single)
