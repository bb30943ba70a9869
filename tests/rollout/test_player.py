"""Episodes of one process: a function of policy and seed, to the bit; recorded as they were."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from player_problems import (
    PROBLEMS,
    RECORDED,
    ActorEnv,
    EndlessEnv,
    FailsForSeedEnv,
    ReusingEnv,
    UnequalEnv,
    WalkEnv,
    bits,
    model_problem,
    play_alone,
)

from maze_train.envs.monitoring import MonitoringWrapper
from maze_train.envs.wrappers import RewardScalingWrapper
from maze_train.errors import ConfigError, EnvError
from maze_train.rollout.agents import PolicyAgent, RandomAgent
from maze_train.rollout.player import PlaySettings, RolloutPlayer
from maze_train.spaces.describe import flatten_value, unflatten_value
from maze_train.trees import tree_map

if TYPE_CHECKING:
    from maze_train.data.trajectories import Trajectory

SEEDS = [0, 1, 2, 3, 4, 5, 6, 7, 2**32 - 1, 3, 12345678901]


def sequential(make: Any, make_agent: Any = RandomAgent, **kwargs: Any) -> RolloutPlayer:
    """A player that records, unless it is told otherwise."""
    settings = kwargs.pop("settings", RECORDED)
    return RolloutPlayer(make, make_agent, settings, **kwargs)


# -- the same numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PROBLEMS)
def test_neighbours_make_no_difference(kind: str) -> None:
    """One at a time, several, in another order: each seed gives the same episode."""
    make, make_agent = PROBLEMS[kind]()
    expected = play_alone(make, make_agent, SEEDS)
    assert [episode[:2] for episode in expected] == list(enumerate(SEEDS))
    assert expected[3][2:8] == expected[9][2:8]  # the same seed
    assert len({episode[2] for episode in expected}) == len(set(SEEDS))
    for concurrency in (3, 8):
        with sequential(make, make_agent, concurrency=concurrency) as player:
            assert [bits(episode) for episode in player.play(SEEDS)] == expected
            again = [bits(episode)[1:] for episode in player.play(SEEDS[::-1])]
            assert again == [episode[1:] for episode in expected[::-1]]


def test_threads_make_no_difference() -> None:
    """A model computes with one thread, and leaves the number of threads as it was."""
    make, make_agent = model_problem("box", "box", "memory")
    expected = play_alone(make, make_agent, range(4))
    torch.set_num_threads(2)
    try:
        assert play_alone(make, make_agent, range(4)) == expected
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("kind", ["sampled box", "random box", "user"])
def test_the_action_seed(kind: str) -> None:
    """It changes what is done by chance, not how the environment begins."""
    make, make_agent = PROBLEMS[kind]()
    found: list[Any] = []
    for action_seed in (0, 0, 1):
        settings = PlaySettings(record=True, action_seed=action_seed)
        with sequential(make, make_agent, settings=settings) as player:
            found.append([episode.trajectory for episode in player.play(range(3))])
    for a, b, c in zip(*found, strict=True):
        np.testing.assert_array_equal(a.actions, b.actions)
        np.testing.assert_array_equal(a.obs[0], c.obs[0])
        steps = min(len(a.actions), len(c.actions))
        assert not np.array_equal(a.actions[:steps], c.actions[:steps])


def test_weights_are_those_of_the_beginning() -> None:
    """A model that is trained on does not change what is played; it is left as it is."""
    make, make_agent = model_problem("box", "discrete", "own")
    expected = play_alone(make, make_agent, range(6))
    model = make_agent.args[0].train()
    with sequential(make, make_agent) as player:
        with torch.no_grad():
            for param in model.parameters():
                param += 1.0
        assert [bits(episode) for episode in player.play(range(6))] == expected
    assert model.training


# -- recordings ----------------------------------------------------------------------------------


def check_replay(make: Any, trajectory: Trajectory) -> None:
    """Taking the actions of a trajectory again leads to all that is in it."""
    env = make()
    obs, _ = env.reset(seed=trajectory.seed)
    view = env.observation_space
    flags = (False, False)
    for t in range(trajectory.num_steps):
        compare(flatten_value(view, obs), trajectory.obs, t)
        action = tree_map(lambda x, t=t: x[t], trajectory.actions)
        obs, reward, *flags, _ = env.step(unflatten_value(env.action_space, action))
        assert trajectory.rewards[t] == reward
        assert any(flags) == (t == trajectory.num_steps - 1)
    compare(flatten_value(view, obs), trajectory.obs, trajectory.num_steps)
    assert [trajectory.terminated, trajectory.truncated] == list(flags)


def compare(value: Any, tree: Any, t: int) -> None:
    """A flat observation is that of step t."""
    leaves = tree if isinstance(tree, dict) else {"": tree}
    found = value if isinstance(value, dict) else {"": value}
    assert found.keys() == leaves.keys()
    for key, part in found.items():
        np.testing.assert_array_equal(leaves[key][t], part)


@pytest.mark.parametrize("kind", PROBLEMS)
def test_recorded_episodes_can_be_replayed(kind: str) -> None:
    """Observations with the true last one, actions as the environment got them, rewards."""
    make, make_agent = PROBLEMS[kind]()
    ends = set()
    with sequential(make, make_agent, concurrency=3) as player:
        observation, action = player.spaces
        for episode in player.play(range(12)):
            trajectory = episode.trajectory
            assert trajectory is not None
            check_replay(make, trajectory)
            assert trajectory.seed == episode.seed == episode.number
            assert trajectory.num_steps == episode.length
            assert trajectory.rewards.dtype == np.float64
            assert trajectory.rewards.sum() == pytest.approx(episode.episode_return, rel=1e-12)
            assert trajectory.terminated == episode.terminated
            assert trajectory.truncated == episode.truncated
            ends.add((episode.terminated, episode.truncated))
            if isinstance(observation, spaces.Box):
                assert trajectory.obs.dtype == observation.dtype
            if not isinstance(action, spaces.Dict):
                assert trajectory.actions.dtype == action.dtype
    assert ends >= {(True, False)}


def test_both_ends_are_recorded() -> None:
    """Terminated and truncated, whatever follows in the slot."""
    ends = set()
    with sequential(partial(ActorEnv, "dict", "dict"), concurrency=2) as player:
        for episode in player.play(range(20)):
            assert episode.trajectory is not None
            check_replay(partial(ActorEnv, "dict", "dict"), episode.trajectory)
            ends.add((episode.trajectory.terminated, episode.trajectory.truncated))
    assert ends == {(True, False), (False, True)}


def test_memory_that_is_used_again() -> None:
    """Observations and actions are copies, those after the last step too."""
    make = partial(WalkEnv, "box", "box")
    reusing = partial(ReusingEnv, "box", "box")
    expected = play_alone(make, RandomAgent, range(8))
    assert play_alone(reusing, RandomAgent, range(8)) == expected
    with sequential(reusing, concurrency=3) as player:
        assert [bits(episode) for episode in player.play(range(8))] == expected


def test_nothing_is_recorded_that_is_not_asked_for() -> None:
    """Numbers are the same."""
    with sequential(WalkEnv, settings=PlaySettings()) as player:
        found = list(player.play(range(5)))
    assert all(episode.trajectory is episode.video is None for episode in found)
    expected = play_alone(WalkEnv, RandomAgent, range(5))
    assert [bits(episode) for episode in found] == [episode[:8] for episode in expected]


def test_raw_returns_and_successes() -> None:
    """A monitored environment tells raw returns, and the last info whether there was success."""

    def scaled() -> Any:
        return RewardScalingWrapper(MonitoringWrapper(WalkEnv()), 100.0)

    with sequential(WalkEnv) as plain, sequential(scaled) as other:
        pairs = list(zip(plain.play(range(9)), other.play(range(9)), strict=True))
    for raw, seen in pairs:
        assert seen.episode_return == raw.episode_return
        assert seen.trajectory is not None
        assert seen.trajectory.rewards.sum() == pytest.approx(100.0 * raw.episode_return)
    successes = [raw.success for raw, _ in pairs]
    assert {0.0} < {*np.nan_to_num(successes, nan=-1.0)} <= {-1.0, 0.0, 1.0}


# -- what is wrong -------------------------------------------------------------------------------


def test_lost_episodes() -> None:
    """They are told as lost, without a trajectory; or they are an error that names the seed."""
    make = partial(FailsForSeedEnv, "nan", 4)
    with sequential(make, concurrency=3, on_non_finite="skip") as player:
        found = list(player.play(range(8)))
    assert [episode.lost for episode in found] == [k == 4 for k in range(8)]
    assert [episode.trajectory is None for episode in found] == [k == 4 for k in range(8)]
    assert found[4].length == 2
    assert not found[4].terminated
    assert not found[4].truncated
    with sequential(make) as player, pytest.raises(EnvError, match=r"step 2 .*seed 4: .* nan"):
        list(player.play(range(8)))


class LastIsBadEnv(ActorEnv):
    """What is observed at last is not finite."""

    def observe(self) -> Any:
        """NaN at the end."""
        return super().observe() * (np.nan if self.t == getattr(self, "length", 0) else 1.0)


def test_a_last_observation_that_is_not_finite() -> None:
    """A trajectory with it would be of no use, so the episode is lost, or that is an error."""
    with sequential(LastIsBadEnv, on_non_finite="skip") as player:
        found = list(player.play(range(3)))
    assert all(episode.lost and episode.trajectory is None for episode in found)
    with sequential(LastIsBadEnv) as player, pytest.raises(EnvError, match=r"seed 0: .*last obs"):
        list(player.play([0]))
    with sequential(LastIsBadEnv, settings=PlaySettings()) as player:
        assert not any(episode.lost for episode in player.play(range(3)))


def test_an_environment_that_raises() -> None:
    """The error names the seed; the episodes before it are there, and others can be played."""
    make = partial(FailsForSeedEnv, "raise", 5)
    with sequential(make, concurrency=2) as player:
        episodes = player.play(range(9))
        found = [next(episodes).number for _ in range(3)]
        with pytest.raises(EnvError, match=r"step 2 of the episode with seed 5: RuntimeError"):
            found += [episode.number for episode in episodes]
        assert found[:3] == [0, 1, 2]
        assert [episode.seed for episode in player.play([7, 8])] == [7, 8]


def test_a_policy_that_raises() -> None:
    """The error names policy, seed and step."""

    def fails(observation: Any) -> Any:
        raise KeyError("speed")

    with sequential(WalkEnv, partial(PolicyAgent, lambda: fails)) as player:
        words = r"policy test_player\..*fails failed at step 1 of the episode with seed 11: KeyErr"
        with pytest.raises(EnvError, match=words) as caught:
            list(player.play([11]))
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("bad", [-1, 1.5, "7", None])
def test_seeds_have_to_be_integers(bad: Any) -> None:
    """That is told at once."""
    with (
        sequential(WalkEnv) as player,
        pytest.raises(ConfigError, match=r"^seeds\[1\] = .*expected an integer >= 0"),
    ):
        player.play([0, bad])


def test_settings_are_checked() -> None:
    """Numbers have ranges."""
    with pytest.raises(ConfigError, match="video_every"):
        PlaySettings(video_every=0)
    with pytest.raises(ConfigError, match="action_seed"):
        PlaySettings(action_seed=-1)
    with pytest.raises(ConfigError, match="concurrency"):
        sequential(WalkEnv, concurrency=0)


def test_an_agent_that_can_not_be_built() -> None:
    """The environments are closed."""
    closed: list[Any] = []

    class Closing(WalkEnv):
        def close(self) -> None:
            closed.append(self)

    def refuses(slots: Any) -> Any:
        raise ConfigError("policy", "expected another one")

    with pytest.raises(ConfigError, match="another one"):
        sequential(Closing, refuses, concurrency=3)
    assert len(closed) == 3


# -- one after the other -------------------------------------------------------------------------


class Begun(UnequalEnv):
    """Keeps a book of the episodes that began; that of seed 0 is a long one."""

    book: list[Any]
    longest = 300

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        found = super().reset(seed=seed, options=options)
        self.length = self.longest if seed == 0 else 2
        self.book.append(seed)
        return found


def test_few_episodes_are_begun_ahead() -> None:
    """What waits in memory for a long episode is bounded, and steps are counted."""

    class Noted(Begun):
        book: list[Any] = []  # noqa: RUF012

    steps: list[int] = []
    with sequential(Noted, concurrency=4) as player:
        episodes = player.play(range(100), steps.append)
        next(episodes)
        assert Noted.book == list(range(len(Noted.book)))
        assert len(Noted.book) <= 8
        for number in range(1, 9):
            assert next(episodes).number == number
            assert len(Noted.book) <= number + 8
        assert [episode.number for episode in episodes] == list(range(9, 100))
        assert sum(steps) == player.steps_made == 300 + 99 * 2


def test_episodes_that_wait_are_kept() -> None:
    """Those that are done when playing ends early, until the next call; taken ones are not."""

    class Noted(Begun):
        book: list[Any] = []  # noqa: RUF012
        longest = 10**9

    def enough(steps: int) -> None:
        if len(player.waiting) == 15:
            raise KeyboardInterrupt

    with sequential(Noted, concurrency=8) as player:
        with pytest.raises(KeyboardInterrupt):
            next(player.play(range(20), enough))
        found = sorted(player.waiting.items())
        assert [k for k, episode in found if episode.trajectory] == list(range(1, 16))
        episodes = player.play([1, 2, 3])
        assert next(episodes).number == 0
        assert [0 in player.waiting, *(e.number for e in episodes)] == [True, 1, 2]
        assert player.waiting == {}


def test_episodes_that_are_not_wanted_any_more() -> None:
    """Another call begins anew; the episodes of the first one are gone, and that is told."""
    with sequential(WalkEnv, concurrency=2) as player:
        first = player.play(range(50))
        next(first)
        second = player.play(range(50))
        assert next(second).number == 0
        with pytest.raises(EnvError, match=r"called off, since play\(\) was called again"):
            list(first)
        assert [episode.number for episode in second] == list(range(1, 50))
        assert list(player.play([])) == []


def test_what_is_called_meanwhile_may_raise() -> None:
    """It goes through, and another call is fine."""

    def enough(steps: int) -> None:
        raise KeyboardInterrupt

    with sequential(EndlessEnv) as player:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                next(player.play([0], enough))


def test_closing() -> None:
    """It can be done twice; afterwards nothing is played."""
    closed: list[Any] = []

    class Closing(WalkEnv):
        def close(self) -> None:
            closed.append(self)

    player = sequential(Closing, concurrency=2)
    episodes = player.play(range(9))
    next(episodes)
    player.close()
    player.close()
    assert len(closed) == 2
    with pytest.raises(EnvError, match="this player is closed"):
        list(episodes)
    with pytest.raises(EnvError, match="this player is closed"):
        list(player.play([0]))
