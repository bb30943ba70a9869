"""Multi-agent evaluation against opponents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from maze_train.collect.episodes import return_of_team
from maze_train.config.train_config import TrainConfig
from maze_train.core.errors import ConfigError
from maze_train.core.types import Array
from maze_train.envs.vector import MazeVectorEnv
from maze_train.nets.joint import acting_alone
from maze_train.run.policies import resolve
from maze_train.spaces.agents import agent_spaces, teams_in
from maze_train.training.evaluators import RolloutEvaluator
from maze_train.training.generators import generators_kept
from maze_train.training.multi_agent_models import is_trainable, policies_of_agents
from maze_train.training.trainer import Run


class OpponentEvaluator(RolloutEvaluator):
    """Plays n episodes against each opponent, once per team of the evaluated policies.

    The evaluated policies control all agents of one team (a single agent if the environment has no
    teams). The opponent controls all other agents that it supports; the remaining agents keep their
    policies. The return of a team is the sum over its agents. The result is a win if the team has a
    larger return than all teams of the opponent, a loss if the team has a smaller return than the
    best team of the opponent, and otherwise a draw.

    Args:
        make_env: See `RolloutEvaluator`.
        n_episodes: Episodes per team and opponent, >= 1.
        opponents: Mapping from opponent names to the model of each agent.
        teams: Agents of each team.
        seats: Teams that the evaluated policies control, one at a time.
        **kwargs: Further arguments of `RolloutEvaluator`.
    """

    def __init__(
        self,
        make_env: Callable[[int], MazeVectorEnv],
        n_episodes: int,
        opponents: Mapping[str, Mapping[str, nn.Module]],
        teams: Sequence[Sequence[str]],
        seats: Sequence[Sequence[str]],
        **kwargs: Any,
    ) -> None:
        super().__init__(make_env, n_episodes, **kwargs)
        self._opponents, self._teams, self._seats = opponents, teams, seats

    def evaluate(self, policy: nn.Module) -> dict[str, float]:
        """Play the episodes and return metrics such as `<prefix>/vs_<name>/return_mean`."""
        metrics: dict[str, float] = {}
        with generators_kept(), torch.no_grad():
            env = self._environments()
            for name, models in self._opponents.items():
                results = [
                    self._play_seat(seat, policy, models, env)
                    for seat in self._seats
                    if models.keys() - set(seat)
                ]
                means, own, best = map(np.concatenate, zip(*results, strict=True))
                found = {
                    "return_mean": means.mean(),
                    "win_rate": (own > best).mean(),
                    "draw_rate": (own == best).mean(),
                    "loss_rate": (own < best).mean(),
                }
                start = f"{self.prefix}/vs_{name}"
                metrics.update({f"{start}/{key}": float(value) for key, value in found.items()})
        return metrics

    def _play_seat(
        self, seat: Sequence[str], policy: Any, models: Mapping[str, nn.Module], env: MazeVectorEnv
    ) -> tuple[Array, Array, Array]:
        """Return a team's mean return per agent, its return, and the best return of other teams."""
        own = {agent: policy.by_policy[owner] for agent, owner in policy.agents.items()}
        others = models.keys() - set(seat)
        chosen = {agent: models[agent] if agent in others else own[agent] for agent in own}
        *_, reported = self._play(acting_alone(chosen), env)
        returns = {agent: reported[f"{agent}/episode_return_mean"] for agent in own}
        total = return_of_team(seat, returns)
        against = [return_of_team(team, returns) for team in self._teams if others & set(team)]
        return total / len(seat), total, np.max(against, axis=0)


def opponent_evaluator(run: Run, config: TrainConfig) -> OpponentEvaluator:
    """Build the evaluator of `evaluation.opponents`.

    Raises:
        ConfigError: If the environment has a single agent, or an opponent is not a policy or does
            not match the spaces.
    """
    settings, spaces = config.evaluation, agent_spaces(*run.spaces)
    if spaces is None or len(spaces.agents) < 2:
        problem = "only for multi-agent environments; remove this setting"
        raise ConfigError("evaluation.opponents", problem, list(settings.opponents))
    owners = policies_of_agents(spaces, config.policies)
    with closing(run.env_factory.for_evaluation()()) as env:
        teams = teams_in(env.metadata, spaces.agents)
    seats = [
        team
        for team in teams
        if any(
            is_trainable(owners[agent], config.policies, config.policies_to_train) for agent in team
        )
    ]
    opponents = {}
    for name, source in settings.opponents.items():
        key = f"evaluation.opponents.{name}"
        named = {
            agent: resolve(source, key, spaces.of(agent), agent, config) for agent in spaces.agents
        }
        opponents[name] = {
            agent: policy.make_model().to(run.device)
            for agent, policy in named.items()
            if policy.fits
        }
        if not any(opponents[name].keys() - set(seat) for seat in seats):
            problem = (
                "cannot be an opponent: its spaces match no agent of another team; agents: "
                f"{', '.join(named)}"
            )
            raise ConfigError(key, problem, source)
    evaluator = OpponentEvaluator(
        partial(run.make_env, training=False),
        settings.n_episodes,
        opponents,
        teams,
        seats,
        concurrency=settings.num_envs(config.runner.concurrency),
        seed=run.seeds.integer("opponents"),
        deterministic=settings.deterministic,
        calls=run.env_calls.evaluation,
    )
    if run.ranks.is_first:  # Only the first process evaluates.
        run.env_calls.in_evaluation_envs.append(evaluator.make_calls)
    return evaluator
