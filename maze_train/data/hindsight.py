"""Replay buffers with hindsight experience replay."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from maze_train.data.relabelling import Hindsight, Strategy
from maze_train.data.replay import PrioritizedReplayBuffer, UniformReplayBuffer


class HindsightReplayBuffer(UniformReplayBuffer):
    """Replay buffer that relabels samples with goals achieved later in the same episode.

    Call `use_environment` before adding experience. Stored rewards and episode ends are verified
    against the environment's `compute_reward` and `compute_terminated`.

    Args:
        *args: Size, observation space and actions, as for `UniformReplayBuffer`. The observation
            space must be a Dict with `achieved_goal` and `desired_goal` arrays of the same shape
            and dtype.
        strategy: Steps whose achieved goals replace the desired goal: `future`, `final` or
            `episode`.
        relabelled_per_original: Ratio of relabelled to original samples (>= 0).
        **settings: All other arguments of `UniformReplayBuffer`.

    Raises:
        ConfigError: If a setting is out of range.
        SpaceError: If observations have no goals.
    """

    keeps_terminal_obs = True
    entry_nbytes: ClassVar[int] = Hindsight.entry_nbytes

    def __init__(
        self,
        *args: Any,
        strategy: Strategy = "future",
        relabelled_per_original: float = 4,
        **settings: Any,
    ) -> None:
        relabelling = partial(
            Hindsight, strategy=strategy, relabelled_per_original=relabelled_per_original
        )
        super().__init__(*args, relabelling=relabelling, **settings)


class PrioritizedHindsightReplayBuffer(PrioritizedReplayBuffer, HindsightReplayBuffer):
    """Hindsight replay buffer with prioritized sampling; accepts the arguments of both buffers."""

    entry_nbytes = PrioritizedReplayBuffer.entry_nbytes + HindsightReplayBuffer.entry_nbytes
