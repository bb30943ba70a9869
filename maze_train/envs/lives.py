"""Atari training with third-party vector environments: episodes per life, sign rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.core.errors import EnvError
from maze_train.core.step_end import RUNNING, TERMINATED, EpisodeEnd, StepBatch, is_transition

if TYPE_CHECKING:
    from maze_train.core.types import Array


class AtariLives:
    """Terminates an episode when a life is lost (Mnih et al. 2015, Methods).

    The next episode continues the game from the last frame. `EpisodeEnd.counted` contains raw
    returns and lengths of whole games.

    Args:
        name: Name of the environments in messages.
        num_envs: Number of environments.
    """

    def __init__(self, name: str, num_envs: int) -> None:
        self._name = name
        self._returns, self._lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        self._lives = np.zeros(num_envs, np.int64)

    def begin(self, infos: Mapping[str, Any]) -> None:
        """Begin new games."""
        self._returns[:] = self._lengths[:] = 0
        self._lives = self._read(infos)

    def apply(self, batch: StepBatch[Array], infos: Mapping[str, Any]) -> None:
        """Replace rewards by their signs and add the episode ends of lost lives, in place."""
        before, self._lives = self._lives, self._read(infos)
        self._returns += batch.rewards
        self._lengths += is_transition(batch.end)
        for end in batch.ends:
            i = end.env
            end.counted = float(self._returns[i]), int(self._lengths[i])
            self._returns[i] = self._lengths[i] = 0
        batch.rewards = np.sign(batch.rewards)
        # Some games continue for a few frames after the last life is lost.
        lost = (self._lives < before) & (self._lives > 0) & (batch.end == RUNNING)
        if not lost.any():
            return
        batch.end[lost] = TERMINATED
        ends = [*batch.ends, *(EpisodeEnd(i, {}) for i in np.flatnonzero(lost).tolist())]
        batch.ends = sorted(ends, key=lambda end: end.env)
        obs: Any = batch.obs
        final: Any = batch.final_obs
        rows = lost.reshape(-1, *[1] * (obs.ndim - 1))
        batch.final_obs = obs if final is None else np.where(rows, obs, final)

    def _read(self, infos: Mapping[str, Any]) -> Array:
        if "lives" not in infos:
            raise EnvError(
                f"{self._name} does not report infos['lives'], which Atari training requires: got "
                f"{sorted(infos)}"
            )
        return np.array(infos["lives"])
