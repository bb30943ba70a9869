"""Win rates of trained policies in PettingZoo board games against fixed opponents.

    python benchmarks/board_games.py RUN [RUN ...] [--games 1000] [--seat player_1]

A run is a directory, or `<run>@final` for the final policy. It plays each seat against a random
player and, in tic-tac-toe, against a perfect player, with its most likely actions and with sampled
actions. The perfect player samples uniformly from all optimal moves, so games differ. Seeds apply
to the environments; the players' moves are not seeded.
"""

from __future__ import annotations

import argparse
import random
from functools import cache
from typing import Any

import numpy as np
import torch

from maze_train import SequentialVectorEnv, load_policy, make_env
from maze_train.collect.fixed_policies import fixed_policy, random_policy
from maze_train.run.opponents import OpponentEvaluator
from maze_train.spaces.agents import agent_spaces

TRUST = ["pettingzoo"]
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def has_won(marks: int) -> bool:
    """Return whether the fields of a player (a bit mask) contain a line."""
    return any(all(marks >> field & 1 for field in line) for line in LINES)


@cache
def outcome(own: int, other: int) -> int:
    """Return the value for the player to move under optimal play: 1, 0 or -1."""
    if has_won(other):
        return -1
    moves = free_fields(own, other)
    return max((-outcome(other, own | 1 << field) for field in moves), default=0)


def free_fields(own: int, other: int) -> list[int]:
    """Return the empty fields."""
    return [field for field in range(9) if not (own | other) >> field & 1]


class PerfectTicTacToe:
    """Perfect player for tictactoe_v3 that samples uniformly from the optimal moves."""

    def __init__(self, *spaces: Any, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def act(self, observation: Any) -> int:
        """Return a move for an observation with two planes: own fields and the opponent's."""
        planes = np.reshape(observation["observation"], (9, 2)).astype(bool)
        own, other = (sum(1 << int(i) for i in np.flatnonzero(plane)) for plane in planes.T)
        moves = free_fields(own, other) if observation["action_mask"].any() else []
        outcomes = {field: -outcome(other, own | 1 << field) for field in moves}
        best = [field for field in moves if outcomes[field] == max(outcomes.values())]
        return self._random.choice(best or [0])


def judge(run: str, games: int, seats: list[str], is_tictactoe: bool) -> None:
    """Play the games of one run and print its table."""
    policy = load_policy(run, TRUST)
    spaces = agent_spaces(policy.observation_space, policy.action_space)
    assert spaces is not None
    each = {agent: spaces.of(agent) for agent in spaces.agents}
    players = {"random": {agent: random_policy(*own) for agent, own in each.items()}}
    if is_tictactoe:
        node = {"_target_": "board_games.PerfectTicTacToe"}
        players["perfect"] = {agent: fixed_policy(node, "", *own) for agent, own in each.items()}
    directory = run.partition("@")[0]
    for seat in seats or list(spaces.agents):
        for deterministic in (True, False):
            evaluator = OpponentEvaluator(
                lambda count: SequentialVectorEnv([lambda: make_env(directory, TRUST)] * count),
                games,
                players,
                [seat],
                concurrency=50,
                seed=1,
                deterministic=deterministic,
            )
            found = evaluator.evaluate(policy.model)
            for name in players:
                rates = [found[f"eval/vs_{name}/{key}_rate"] for key in ("win", "draw", "loss")]
                how = "most likely" if deterministic else "sampled"
                columns = " ".join(f"{100 * rate:6.1f} %" for rate in rates)
                print(f"{run}  {seat}  {how:<11}  {name:<7}  {columns}")


def main() -> None:
    """Evaluate each given run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--games", type=int, default=1000)
    parser.add_argument("--seat", action="append", default=[])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("policy, seat, actions, opponent: won, drawn, lost")
    for run in arguments.runs:
        directory = run.partition("@")[0]
        env = make_env(directory, TRUST)
        judge(run, arguments.games, arguments.seat, "tictactoe" in str(env.metadata.get("name")))


if __name__ == "__main__":
    main()
