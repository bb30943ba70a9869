"""Base class of vectorized simulators that exchange tensors on one device."""

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
    """B environments that step together and exchange tensors on one device.

    When an episode ends, the next one begins in the same step. Observations and actions are one
    tensor, or one flat mapping of tensors (keys joined by `/`). No method synchronises the device.

    Attributes:
        num_envs: B.
        device: Device of all tensors.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        can_be_restored: Whether `state_dict` can save the running episodes.
        truncation: How to compute value targets at a time limit if the simulator does not return
            final observations; see `EnvConfig.truncation`.
        has_lasting_state: Whether `state_dict` contains state that `reset` does not initialise.
        name: Name in messages.
        replaced_ends: Whether `truncation` has turned the truncation of any episode into
            termination; a bool tensor on the device after the first step that applies `truncation`.
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

    @property
    def called(self) -> Any:
        """The object whose attributes callbacks may access, see `TrainingView.call_envs`.

        Raises:
            EnvError: If changes to the object would have no effect.
        """
        return self

    @abstractmethod
    def reset(self, seed: int) -> TensorTree:
        """Begin a new episode in every environment; return the first observations, `[B, ...]`."""

    def step(self, actions: TensorTree) -> StepBatch[Tensor]:
        """Step every environment once, and apply `truncation`.

        Args:
            actions: Actions in the action space, `[B, ...]`.

        Returns:
            The step. `final_obs` is None if the simulator does not return final observations.
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
        """Like `reset`, but return the first observations as NumPy arrays by leaf."""
        return arrays_of(self.reset(seed))

    def step_arrays(self, actions: Mapping[str, Array]) -> StepBatch[Array]:
        """Like `step`, with NumPy arrays by leaf; `columns` is filled only if an episode ended."""
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
        """Return the state of the running episodes as arrays and tensors.

        Raises:
            EnvError: If `can_be_restored` is False.
        """
        raise EnvError(f"{self.name} cannot save the state of its episodes")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the running episodes from `state`.

        Raises:
            EnvError: If `can_be_restored` is False.
        """
        raise EnvError(f"{self.name} cannot restore the state of its episodes")

    def render(self) -> Any:
        """Return an image `[height, width, 3]` of the first environment; None if not supported."""
        return None

    def close(self) -> None:  # noqa: B027 (optional)
        """Release the resources of the simulator."""


def offered(env: object, names: Iterable[str]) -> dict[str, Any]:
    """Return the attributes among `names` that a third-party object has, in this order."""
    return {name: getattr(env, name) for name in names if hasattr(env, name)}


def arrays_of(tree: TensorTree) -> dict[str, Array]:
    """Copy tensors to NumPy arrays by leaf."""
    return {key: x.cpu().numpy().copy() for key, x in leaves_by_key(tree).items()}


def flat_leaves(view: FlatView, value: object) -> TensorTree:
    """Convert an element of a space to one tensor or a flat mapping of tensors."""
    leaves = leaves_by_key(value) if view.is_single else dict(view.read(value))
    return as_tree(leaves, not view.is_single)
