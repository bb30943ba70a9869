"""Replay buffers with hindsight."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from gymnasium import spaces

from maze_train.core.types import TensorTree
from maze_train.data.relabelling import Hindsight, Strategy
from maze_train.data.replay import PrioritizedReplayBuffer, UniformReplayBuffer
from maze_train.data.replay_sampling import PrioritizedSampler


class HindsightReplayBuffer(UniformReplayBuffer):
    """A replay buffer with `Hindsight`: most samples get a goal which their episode reached.

    `use_environment` has to be called first. Stored rewards and ends are compared with the results
    of the functions of the environment.

    Args:
        buffer_size: As for `UniformReplayBuffer`.
        observation_space: A Dict with arrays `achieved_goal` and `desired_goal` of one shape and
            data type, and more.
        actions: As for `UniformReplayBuffer`.
        strategy: Where goals come from: `future`, `final` or `episode`.
        relabelled_per_original: k, samples with another goal for each one with its own. >= 0.
        **settings: All other arguments of `UniformReplayBuffer`.

    Raises:
        ConfigError: If a setting is out of range.
        SpaceError: If observations have no goals.
    """

    keeps_terminal_obs = True
    entry_nbytes: ClassVar[int] = Hindsight.entry_nbytes

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        actions: TensorTree,
        *,
        strategy: Strategy = "future",
        relabelled_per_original: float = 4,
        **settings: Any,
    ) -> None:
        relabelling = partial(
            Hindsight,
            observation_space=observation_space,
            strategy=strategy,
            relabelled_per_original=relabelled_per_original,
        )
        super().__init__(
            buffer_size, observation_space, actions, relabelling=relabelling, **settings
        )


class PrioritizedHindsightReplayBuffer(HindsightReplayBuffer):
    """A replay buffer with `Hindsight` and a `PrioritizedSampler`.

    Args:
        buffer_size: As for `HindsightReplayBuffer`.
        observation_space: As for `HindsightReplayBuffer`.
        actions: As for `HindsightReplayBuffer`.
        alpha: As for `PrioritizedReplayBuffer`.
        beta: As for `PrioritizedReplayBuffer`.
        epsilon: As for `PrioritizedReplayBuffer`.
        **settings: All other arguments of `HindsightReplayBuffer`.

    Raises:
        ConfigError: If a setting is out of range.
        SpaceError: If observations have no goals.
    """

    entry_nbytes = PrioritizedReplayBuffer.entry_nbytes + HindsightReplayBuffer.entry_nbytes
    growing = PrioritizedReplayBuffer.growing

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        actions: TensorTree,
        *,
        alpha: float = 0.6,
        beta: float = growing["beta"],
        epsilon: float = 1e-6,
        **settings: Any,
    ) -> None:
        sampler = partial(PrioritizedSampler, alpha=alpha, beta=beta, epsilon=epsilon)
        super().__init__(buffer_size, observation_space, actions, sampler=sampler, **settings)
