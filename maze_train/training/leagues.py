"""Self-play of a run: leagues as the settings of its policies ask for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maze_train.errors import ConfigError
from maze_train.rollout.league import League
from maze_train.rollout.league_collector import LeagueCollector

if TYPE_CHECKING:
    from maze_train.learner.group import LearnerGroup
    from maze_train.nets.joint import JointModel
    from maze_train.rollout.turn_collector import TurnCollector
    from maze_train.training.build_context import BuildContext


def with_leagues(
    turns: TurnCollector, model: JointModel, context: BuildContext[Any], learners: LearnerGroup
) -> LeagueCollector:
    """A collector in which policies play against their snapshots.

    Args:
        turns: Collects the turns of the policies.
        model: The policies, and who acts with which.
        context: What the run is built from.
        learners: They get the snapshots.

    Raises:
        ConfigError: If a policy has no second agent that a snapshot could play.
    """
    agents = list(model.agents)
    leagues = []
    for policy, own in context.policies.items():
        if own.opponents is None:
            continue
        if context.envs_per_actor:
            problem = "snapshots play where the learner acts; expected runner.envs_per_actor=0"
            raise ConfigError(f"policies.{policy}.opponents", problem, own.opponents.draw)
        members = model.members[policy]
        if len(members) < 2:
            problem = f"snapshots need a second agent of {policy}; it has {', '.join(members)}"
            raise ConfigError(f"policies.{policy}.opponents", problem, own.opponents.draw)
        seats = [agents.index(agent) for agent in members]
        seed = context.seeds.integer(f"league/{policy}")
        leagues.append(League(policy, seats, own.opponents, seed))
    checkpoint = context.read_checkpoint()
    saved = checkpoint.state["learners"]["learner"]["modules"] if checkpoint else ()
    length = context.algorithm.epoch_length
    return LeagueCollector(turns, model, leagues, learners, length, saved)
