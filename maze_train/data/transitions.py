"""Transitions, and the contract of buffers that replay them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from maze_train.data.rollout import Rollout
from maze_train.errors import ShapeError
from maze_train.types import as_tree, leaves_by_key, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import gymnasium

    from maze_train.types import Tensor, TensorTree


@dataclass(frozen=True, slots=True)
class Transitions:
    """n transitions that were sampled, each over one step or several."""

    obs: TensorTree
    """Observations, `[n, ...]`."""

    actions: TensorTree
    """Actions as the distribution sampled them, `[n, ...]`."""

    rewards: Tensor
    """Σ_{i<k} gamma^i r_{t+i} over the k steps that were made, `[n]` float32."""

    discounts: Tensor
    """gamma^k, or 0 where the last of these steps was terminated, `[n]` float32."""

    next_obs: TensorTree
    """Observations after the last of these steps, `[n, ...]`: where it was truncated, the true last
    one; where it was terminated, any."""

    indices: Tensor
    """Positions in the buffer, for `update_priorities`, `[n]` int64."""

    weights: Tensor | None = None
    """Importance weights in (0, 1], `[n]` float32; None: all are 1."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One step of one environment, without batch dimension."""

    obs: TensorTree
    action: TensorTree
    reward: float
    next_obs: TensorTree
    """The observation that the step led to, also where the episode ended."""
    terminated: bool
    truncated: bool


class BaseReplayBuffer(ABC):
    """Takes experience in the order of time and gives samples of it."""

    keeps_terminal_obs: ClassVar[bool] = False
    """Whether rollouts need the last observations of terminated episodes as well."""

    entry_nbytes: ClassVar[int] = 0
    """Bytes that a transition takes besides its columns."""

    growing: ClassVar[Mapping[str, float]] = MappingProxyType({})
    """Arguments whose value grows to 1 over the run, and where each begins by default."""

    @abstractmethod
    def add_rollout(self, rollout: Rollout) -> None:
        """Store a rollout; it goes on where the last one ended, unless `interrupt` was called."""

    @abstractmethod
    def add_transition(self, transition: Transition) -> None:
        """Store one step of a lone environment."""

    @abstractmethod
    def interrupt(self) -> None:
        """Say that all environments begin new episodes before the next rollout."""

    def reserve(self, n_transitions: int) -> None:  # noqa: B027
        """Announce the most transitions that will come, before the first; limits memory."""

    def use_environment(self, make_env: Callable[[], gymnasium.Env[Any, Any]]) -> None:  # noqa: B027
        """Learn what only an environment can tell, before the first rollout.

        Args:
            make_env: Gives an environment of those that collect, in this process, which nobody
                steps.
        """

    @abstractmethod
    def sample_batch(self, n_samples: int) -> Transitions:
        """Transitions drawn with replacement."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of transitions that can be sampled."""

    def update_priorities(self, indices: Tensor, errors: Tensor) -> None:  # noqa: B027
        """Take the errors of predictions for samples; buffers without priorities ignore them.

        Args:
            indices: `Transitions.indices`, `[n]`.
            errors: Errors of temporal differences, of any sign, `[n]`.
        """

    def set_progress(self, fraction: float) -> None:  # noqa: B027
        """Set the share of training that is over, in [0, 1], for what changes over time."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that later samples depend on."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""


def as_rollout(transition: Transition) -> Rollout:
    """One step of one environment, with the observation after it."""
    obs, next_obs = leaves_by_key(transition.obs), leaves_by_key(transition.next_obs)
    shapes, next_shapes = ({k: list(x.shape) for k, x in o.items()} for o in (obs, next_obs))
    if shapes != next_shapes:
        raise ShapeError(f"obs has the shapes {shapes}, next_obs {next_shapes}: expected the same")
    rows = {key: torch.stack([leaf, next_obs[key]])[:, None] for key, leaf in obs.items()}
    has_keys, num_ended = (
        isinstance(transition.obs, dict),
        int(transition.truncated or transition.terminated),
    )
    return Rollout(
        obs=as_tree(rows, has_keys),
        actions=tree_map(lambda x: x[None, None], transition.action),
        rewards=torch.tensor([[transition.reward]], dtype=torch.float32),
        terminated=torch.tensor([[transition.terminated]]),
        truncated=torch.tensor([[transition.truncated]]),
        final_obs=as_tree({key: leaf[1, :num_ended] for key, leaf in rows.items()}, has_keys),
        final_positions=torch.zeros(num_ended, dtype=torch.int64),
    )
