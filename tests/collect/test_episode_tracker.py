from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maze_train.collect.episodes import EpisodeTracker, FinishedEpisodes, ReportedInfos
from maze_train.core.events import Statistics
from maze_train.core.step_end import StepEnd


def slow_follow(rollouts):
    """Return all episodes by a loop over time and environments."""
    num_envs = rollouts[0][0].shape[1]
    running = [[0.0, 0] for _ in range(num_envs)]
    episodes = []
    for rewards, done in rollouts:
        for t in range(len(rewards)):
            for b in range(num_envs):
                running[b][0] += rewards[t, b]
                running[b][1] += 1
                if done[t, b]:
                    episodes.append(tuple(running[b]))
                    running[b] = [0.0, 0]
    return episodes, running


@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.floats(0.0, 1.0),
    st.integers(0, 2**32 - 1),
)
def test_episode_statistics_equal_a_loop(num_envs, lengths, share, seed):
    """Returns and lengths of episodes over several rollouts match plain sums."""
    rng = np.random.default_rng(seed)
    rollouts = [
        (rng.normal(size=(n, num_envs)), rng.random((n, num_envs)) < share) for n in lengths
    ]
    tracker = EpisodeTracker(num_envs)
    finished = [tracker.follow(rewards, done) for rewards, done in rollouts]
    expected, running = slow_follow(rollouts)
    assert [n for f in finished for n in f.lengths] == [n for _, n in expected]
    returns = [r for f in finished for r in f.returns]
    assert returns == pytest.approx([r for r, _ in expected], abs=1e-9)
    assert tracker.lengths.tolist() == [n for _, n in running]
    assert tracker.returns.tolist() == pytest.approx([r for r, _ in running], abs=1e-9)


def test_ignored_rows_do_not_count():
    """Rows that are not transitions do not count, also if an episode spans two rollouts."""
    tracker = EpisodeTracker(2)
    done = np.array([[0, 0], [1, 0], [0, 1], [0, 0], [1, 0]], bool)
    ignored = np.array([[0, 1], [0, 0], [1, 0], [0, 1], [0, 0]], bool)
    end = np.where(ignored, StepEnd.RESET_ONLY, done)
    finished = tracker.follow(np.where(ignored, 0.0, 1.0), end)
    assert finished.lengths == [2, 2, 2]
    assert finished.returns == [2.0, 2.0, 2.0]
    assert tracker.lengths.tolist() == [0, 1]
    assert tracker.follow(np.ones((1, 2)), np.array([[0, 1]], bool)).lengths == [2]


def test_whole_rewards_are_summed_exactly():
    """Returns of float32 rewards are summed in double precision."""
    tracker = EpisodeTracker(1)
    rewards = np.full((1000, 1), 0.1, np.float32)
    done = np.zeros((1000, 1), bool)
    done[-1] = True
    (episode,) = tracker.follow(rewards, done).returns
    assert episode == pytest.approx(1000 * float(np.float32(0.1)), rel=1e-12)


def test_statistics_of_episodes():
    """Statistics are mean, extremes, length, number and success rate; none without episodes."""
    statistics, infos = Statistics(), ReportedInfos()
    FinishedEpisodes().record(statistics, infos)
    assert statistics.reduce() == {}
    FinishedEpisodes([1.0, 5.0], [2, 3], [1.0]).record(statistics, infos)
    FinishedEpisodes([-3.0], [7], [0.0]).record(statistics, infos)
    assert statistics.reduce() == {
        "train/episode_return_mean": 1.0,
        "train/episode_return_max": 5.0,
        "train/episode_return_min": -3.0,
        "train/episode_length_mean": 4.0,
        "train/episodes": 3.0,
        "train/success_rate": 0.5,
    }


def test_missing_success_is_a_failure_once_it_was_reported(capsys):
    """Before, there is no rate. NaN is a missing value, of any key; notes are printed once."""
    infos, nan = ReportedInfos(), float("nan")

    def rates(successes, fuel=()):
        statistics = Statistics()
        agents = {"a": successes[:1]}
        lists = {"agent_successes": agents, "infos": {"fuel": list(fuel)}}
        FinishedEpisodes([1.0] * 4, [1] * 4, successes, **lists).record(statistics, infos)
        return {
            name.removeprefix("train/"): value
            for name, value in statistics.reduce().items()
            if "episode" not in name
        }

    assert rates([nan] * 4, [nan]) == {}
    assert rates([nan, nan, 1.0, nan], [nan, 3.0]) == {"success_rate": 0.25, "info/fuel": 3.0}
    assert rates([nan] * 4) == {"success_rate": 0.0}
    assert rates([1.0, 0.0, 1.0, nan]) == {"success_rate": 0.5, "a/success_rate": 1.0}
    assert rates([nan] * 4) == {"success_rate": 0.0, "a/success_rate": 0.0}
    told = capsys.readouterr().err
    assert (told.count("no is_success"), told.count("NaN for fuel")) == (1, 1)
