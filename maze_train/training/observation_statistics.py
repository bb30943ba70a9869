"""Statistics of observations before training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maze_train.errors import TrainingError
from maze_train.learner.modules import DEFAULT_MODULE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from maze_train.nets.normalization import ObservationNormalizer


MOST_IDLE = 100
"""Rollouts in a row without a turn of those that lack statistics, after which training ends."""


def begin_statistics(
    waiting: Mapping[str, ObservationNormalizer], make_collector: Callable[[], Any], acting: Any
) -> None:
    """Collect rollouts until there are enough statistics; see `AlgorithmBuilder.begin_statistics`.

    Args:
        waiting: Normaliser of each module that takes statistics.
        make_collector: Makes what collects rollouts.
        acting: Chooses the actions.
    """
    collector: Any = None
    idle = 0
    while few := {key for key, own in waiting.items() if own.is_waiting}:
        collector = collector or make_collector()
        experience, episodes = collector.collect(acting)
        episodes.check_steps(" before training")
        parts = experience if isinstance(experience, dict) else {DEFAULT_MODULE: experience}
        idle = 0 if few & parts.keys() else idle + 1
        if idle == MOST_IDLE:
            raise TrainingError(
                f"no agent of {', '.join(sorted(few))} acted in {idle} rollouts before "
                "training, which take statistics of observations: give it a model with "
                "normalization.mode=none in policies"
            )
        for key, rollout in parts.items():
            if own := waiting.get(key):
                own.update(rollout.to(own.mean.device).acted_on(own.keys))
    for own in waiting.values():
        if own.config.mode == "estimated":
            own.freeze()
