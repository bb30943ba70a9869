"""Evaluation of policies against others that are named, in every seat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maze_train.errors import ConfigError
from maze_train.nets.joint import acting_alone
from maze_train.runners.named_policies import named_policy
from maze_train.spaces.agents import agent_spaces
from maze_train.training.evaluators import RolloutEvaluator
from maze_train.training.generators import generators_kept
from maze_train.training.policies import is_trainable, policies_of_agents

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from maze_train.config.train_config import TrainConfig
    from maze_train.envs.vector import MazeVectorEnv
    from maze_train.rollout.acting import ActingModel, RecurrentModel
    from maze_train.training.builder import AlgorithmBuilder
    from maze_train.types import Array


class OpponentEvaluator(RolloutEvaluator):
    """Plays n episodes in each seat against each opponent, and reports who won.

    An opponent plays all other agents that it can; the rest keep their policies. A larger return
    than those of all that the opponent plays wins an episode, a smaller one than any of them loses
    it, and else it is a draw.

    Args:
        make_env: See `RolloutEvaluator`.
        n_episodes: Episodes in each seat against each opponent, >= 1.
        opponents: The models by agent that an opponent can play, by its name.
        seats: Agents that the policies which are judged play, one at a time.
        **kwargs: Further arguments of `RolloutEvaluator`.
    """

    def __init__(
        self,
        make_env: Callable[[int], MazeVectorEnv],
        n_episodes: int,
        opponents: Mapping[str, Mapping[str, nn.Module]],
        seats: Sequence[str],
        **kwargs: Any,
    ) -> None:
        super().__init__(make_env, n_episodes, **kwargs)
        self._opponents, self._seats = opponents, list(seats)

    def evaluate(self, policy: ActingModel | RecurrentModel) -> dict[str, float]:
        """Play; metrics are `<prefix>/vs_<name>/return_mean`, `win_rate` and so on."""
        metrics: dict[str, float] = {}
        with generators_kept(), torch.no_grad():
            if self._env is None:
                self._env = self._make_env(self._num_envs)
            for name, models in self._opponents.items():
                results = [
                    self._play_seat(seat, policy, models, self._env)
                    for seat in self._seats
                    if models.keys() - {seat}
                ]
                own, best = (np.concatenate(column) for column in zip(*results, strict=True))
                found = {
                    "return_mean": own.mean(),
                    "win_rate": (own > best).mean(),
                    "draw_rate": (own == best).mean(),
                    "loss_rate": (own < best).mean(),
                }
                start = f"{self.prefix}/vs_{name}"
                metrics.update({f"{start}/{key}": float(value) for key, value in found.items()})
        return metrics

    def _play_seat(
        self, seat: str, policy: Any, models: Mapping[str, nn.Module], env: MazeVectorEnv
    ) -> tuple[Array, Array]:
        """Returns of the policy in a seat, and the best ones of the others, `[n]`."""
        own = {agent: policy.by_policy[owner] for agent, owner in policy.agents.items()}
        others = models.keys() - {seat}
        chosen = {agent: models[agent] if agent in others else own[agent] for agent in own}
        *_, returns = self._play(acting_alone(chosen), env)
        return returns[seat], np.max([returns[agent] for agent in others], axis=0)


def opponent_evaluator(config: TrainConfig, builder: AlgorithmBuilder[Any]) -> OpponentEvaluator:
    """The evaluator that `evaluation.opponents` asks for.

    Raises:
        ConfigError: If there is one agent, or an opponent is none or does not fit.
    """
    settings, spaces = config.evaluation, agent_spaces(*builder.spaces)
    if spaces is None or len(spaces.agents) < 2:
        problem = "the environment has one agent; leave it out"
        raise ConfigError("evaluation.opponents", problem, list(settings.opponents))
    owners = policies_of_agents(spaces, config.policies)
    seats = [
        agent
        for agent, owner in owners.items()
        if is_trainable(owner, config.policies, config.policies_to_train)
    ]
    opponents = {}
    for name, source in settings.opponents.items():
        key = f"evaluation.opponents.{name}"
        named = {
            agent: named_policy(source, key, spaces.of(agent), agent, config.trust, config)
            for agent in spaces.agents
        }
        opponents[name] = {
            agent: policy.make_model().to(builder.context.device)
            for agent, policy in named.items()
            if policy.fits
        }
        if not any(opponents[name].keys() - {seat} for seat in seats):
            problem = f"it is for no agent besides one that learns; there are {', '.join(named)}"
            raise ConfigError(key, problem, source)
    return OpponentEvaluator(
        lambda num_envs: builder.context.make_env(num_envs, training=False),
        settings.n_episodes,
        opponents,
        seats,
        concurrency=settings.concurrency,
        seed=builder.context.seeds.integer("opponents"),
        deterministic=settings.deterministic,
    )
