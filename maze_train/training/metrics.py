"""Metrics of evaluations by name, of which one selects the best policy."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from maze_train.errors import ConfigError, did_you_mean, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from maze_train.training.config import EvaluationConfig


OF_EPISODES = (
    "episode_return_mean",
    "episode_return_std",
    "episode_return_min",
    "episode_return_max",
    "episode_length_mean",
    "episodes",
    "success_rate",
)
"""Metrics of a `RolloutEvaluator`, each after its prefix."""

AGAINST_OPPONENTS = ("win_rate", "draw_rate", "loss_rate", "return_mean")
"""Metrics against an opponent, each after `eval/vs_<name>/`."""

OF_AGENT = "eval/{}/episode_return_mean"
"""Metric of one of several agents, by its name."""

OF_TRAINING = ("train/", "validation/", "league/")
"""Beginnings of metrics that evaluations do not report; the first epoch shows whether they are."""


def evaluation_metrics(config: EvaluationConfig, agents: Iterable[str] = ()) -> list[str]:
    """Names of the metrics of evaluations, without those of own evaluators.

    Args:
        config: Settings of evaluations.
        agents: Names of the agents, where there are several.
    """
    if not config.n_episodes:
        return []
    known = [f"eval/{name}" for name in OF_EPISODES]
    known += [OF_AGENT.format(agent) for agent in agents]
    return known + [
        f"eval/vs_{foe}/{name}" for foe in config.opponents for name in AGAINST_OPPONENTS
    ]


def check_selection(config: EvaluationConfig, agents: Sequence[str] | None = None) -> None:
    """Refuse a metric for the best policy that nothing would report, as far as it is known.

    Args:
        config: Settings of evaluations.
        agents: Names of the agents; none: there is one without a name; None: not known yet.

    Raises:
        ConfigError: If it is none of those that are reported.
    """
    metric = config.metric
    if not metric or config.evaluators or metric.startswith(OF_TRAINING):
        return
    known = evaluation_metrics(config, ["<agent>"] if agents is None else agents)
    may_be_of_agent = agents is None and known and re.fullmatch(OF_AGENT.format(".+"), metric)
    if metric not in known and not may_be_of_agent:
        hint = did_you_mean(nearest(metric, known, count=1), "", " ")
        reported = ", ".join(known) or "train/... only, without evaluation episodes"
        key = "metric" if agents is None else "evaluation.metric"
        raise ConfigError(key, f"not reported; {hint}reported: {reported}", metric)
