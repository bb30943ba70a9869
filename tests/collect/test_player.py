"""Episodes depend only on policy and seed, bit for bit, on every runner; recordings."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from actor_envs import ActorEnv, BrokenLaterEnv, FailsForSeedEnv, OddOneOutEnv
from cases import everyday
from es_problems import (
    PROBLEMS,
    RECORDED,
    Episodes,
    PictureEnv,
    ReusingEnv,
    Rollouts,
    UnequalEnv,
    WalkEnv,
    bits,
    closing_env,
    model_problem,
    pair_bits,
    play_alone,
)
from gymnasium import spaces
from leftovers import has_ended

from maze_train.collect.recording import PlaySettings
from maze_train.collect.row_policies import UserRows, random_rows
from maze_train.core.errors import ConfigError, EnvError, SpaceError, WorkerError
from maze_train.core.step_end import DROPPED, TERMINATED, TRUNCATED
from maze_train.core.types import leaves_by_key, tree_map
from maze_train.spaces.describe import flatten_value, unflatten_value

SEEDS = [0, 1, 2, 3, 4, 5, 6, 7, 2**32 - 1, 3, 12345678901]
SHORT_S = 1.0
"""Timeout in seconds after which a process counts as hung."""

slow = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
every_backend = pytest.mark.parametrize("n_workers", [0, pytest.param(2, marks=slow)])


def player_of(make, make_rows=random_rows, settings=RECORDED, **more):
    """Return a player that records, in this process or in `n_workers` processes."""
    return Episodes(make, make_rows=make_rows, settings=settings, **more).of


@pytest.fixture
def start(no_file_is_left):
    """Function that starts players, with two processes by default; they are closed afterwards."""
    with ExitStack() as stack:

        def start(*args, n_workers=2, **settings):
            player = player_of(*args, n_workers=n_workers, **settings)
            return stack.enter_context(player)

        yield start


def processes_of(player):
    """Return the processes of a player."""
    return player.workers.processes


def take(player, seeds):
    """Return all episodes as bytes."""
    return [bits(episode) for episode in player.play(seeds)]


# -- determinism ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", everyday(4, PROBLEMS))
def test_episodes_are_independent_of_concurrency_and_order(kind):
    """Episodes of a seed are identical for any number of environments and any order."""
    make, make_rows = PROBLEMS[kind]()
    expected = play_alone(make, make_rows, SEEDS)
    assert [episode[:2] for episode in expected] == list(enumerate(SEEDS))
    assert expected[3][2:8] == expected[9][2:8]  # same seed
    assert len({episode[2] for episode in expected}) == len(set(SEEDS))
    for num_envs in (3, 8):
        with player_of(make, make_rows, num_envs=num_envs) as player:
            assert [bits(episode) for episode in player.play(SEEDS)] == expected
            again = [bits(episode)[1:] for episode in player.play(SEEDS[::-1])]
            assert again == [episode[1:] for episode in expected[::-1]]


@pytest.mark.parametrize(
    "kind", everyday(2, ["sampled box", "sampled discrete", "dicts", "memory", "user dict"])
)
def test_episodes_are_independent_of_workers(start, kind):
    """Episodes are identical for any number of workers and in repeated calls."""
    make, make_rows = PROBLEMS[kind]()
    expected = play_alone(make, make_rows, range(12))
    for n_workers, num_envs in ((1, 3), (2, 8)):
        player = start(make, make_rows, n_workers=n_workers, num_envs=num_envs)
        steps = []
        episodes = [bits(episode) for episode in player.play(range(12), steps.append)]
        assert episodes == expected
        assert sum(steps) == player.steps_made == sum(episode[3] for episode in expected)
        assert take(player, range(5)) == expected[:5]
        assert player.worker_restarts == 0
        assert player.spaces == (make().observation_space, make().action_space)


def test_playing_uses_one_thread():
    """Models act with one thread, and the number of threads is restored."""
    make, make_rows = model_problem("box", "box", "memory")
    expected = play_alone(make, make_rows, range(4))
    torch.set_num_threads(2)
    try:
        assert play_alone(make, make_rows, range(4)) == expected
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("kind", ["sampled box", "random box", "user"])
def test_action_seed_changes_sampled_actions_only(kind):
    """The action seed changes sampled actions, but not the initial observation."""
    make, make_rows = PROBLEMS[kind]()
    found = []
    for action_seed in (0, 0, 1):
        settings = PlaySettings(record=True, action_seed=action_seed)
        with player_of(make, make_rows, settings=settings) as player:
            found.append([episode.trajectory for episode in player.play(range(3))])
    for a, b, c in zip(*found, strict=True):
        np.testing.assert_array_equal(a.actions, b.actions)
        np.testing.assert_array_equal(a.obs[0], c.obs[0])
        steps = min(len(a.actions), len(c.actions))
        assert not np.array_equal(a.actions[:steps], c.actions[:steps])


def test_players_copy_weights_at_construction():
    """Players copy the weights of a model at construction and leave its mode unchanged."""
    make, make_rows = model_problem("box", "discrete", "own")
    expected = play_alone(make, make_rows, range(6))
    model = make_rows.args[0].train()
    with player_of(make, make_rows) as player:
        with torch.no_grad():
            for param in model.parameters():
                param += 1.0
        assert [bits(episode) for episode in player.play(range(6))] == expected
    assert model.training


# -- recordings ----------------------------------------------------------------------------------


def check_replay(make, trajectory):
    """Check that replaying the actions of a trajectory reproduces it."""
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
    assert trajectory.terminated == flags[0]
    assert trajectory.truncated == (flags[1] and not flags[0])


def compare(value, tree, t):
    """Check that a flat observation matches step t."""
    found = leaves_by_key(value)
    assert found.keys() == leaves_by_key(tree).keys()
    for key, part in found.items():
        np.testing.assert_array_equal(leaves_by_key(tree)[key][t], part)


@pytest.mark.parametrize("kind", everyday(4, PROBLEMS))
def test_recorded_episodes_can_be_replayed(kind):
    """Trajectories contain the final observation, the actions of the environment, and rewards."""
    make, make_rows = PROBLEMS[kind]()
    ends = set()
    with player_of(make, make_rows, num_envs=3) as player:
        observation, action = player.spaces
        for episode in player.play(range(12)):
            trajectory = episode.trajectory
            assert trajectory is not None
            check_replay(make, trajectory)
            assert trajectory.seed == episode.seed == episode.number
            assert trajectory.num_steps == episode.length
            assert trajectory.rewards.dtype == np.float64
            assert trajectory.rewards.sum() == pytest.approx(episode.episode_return, rel=1e-12)
            assert trajectory.terminated == (episode.end == TERMINATED)
            assert trajectory.truncated == (episode.end == TRUNCATED)
            ends.add(episode.end)
            if isinstance(observation, spaces.Box):
                assert trajectory.obs.dtype == observation.dtype
            if not isinstance(action, spaces.Dict):
                assert trajectory.actions.dtype == action.dtype
    assert TERMINATED in ends


def test_memory_that_is_used_again():
    """Trajectories contain copies of observations and actions, including the final observation."""
    make = partial(WalkEnv, "box", "box")
    reusing = partial(ReusingEnv, "box", "box")
    expected = play_alone(make, random_rows, range(8))
    assert play_alone(reusing, random_rows, range(8)) == expected
    with player_of(reusing, num_envs=3) as player:
        assert [bits(episode) for episode in player.play(range(8))] == expected


# -- failures ------------------------------------------------------------------------------------


@every_backend
def test_dropped_episodes_have_no_trajectory(start, n_workers):
    """Lost episodes have no trajectory, or raise an error that names the seed."""
    make = partial(FailsForSeedEnv, "lost", 4)
    player = start(make, n_workers=n_workers, on_non_finite="skip")
    found = list(player.play(range(8)))
    assert [episode.lost for episode in found] == [k == 4 for k in range(8)]
    assert [episode.trajectory is None for episode in found] == [k == 4 for k in range(8)]
    assert (found[4].length, found[4].end) == (2, DROPPED)
    player = start(make, n_workers=n_workers, on_worker_failure="restart")
    with pytest.raises(EnvError, match=r"step 2 .*seed 4: .* nan"):
        list(player.play(range(8)))
    assert player.worker_restarts == 0  # a restart would not help


class LastIsBadEnv(ActorEnv):
    """Environment whose final observation is not finite."""

    def observe(self):
        """Return NaN at the end."""
        return super().observe() * (np.nan if self.t == getattr(self, "length", 0) else 1.0)


def test_a_last_observation_that_is_not_finite():
    """A non-finite final observation loses a recorded episode, or raises an error."""
    with player_of(LastIsBadEnv, on_non_finite="skip") as player:
        found = list(player.play(range(3)))
    assert all(episode.lost and episode.trajectory is None for episode in found)
    with player_of(LastIsBadEnv) as player, pytest.raises(EnvError, match=r"seed 0: .*final obs"):
        list(player.play([0]))
    with player_of(LastIsBadEnv, settings=PlaySettings()) as player:
        assert not any(episode.lost for episode in player.play(range(3)))


def test_environment_error_names_the_seed():
    """An error of an environment names the seed; earlier and later episodes are played."""
    make = partial(FailsForSeedEnv, "raise", 5)
    with player_of(make, num_envs=2) as player:
        episodes = player.play(range(9))
        found = [next(episodes).number for _ in range(3)]
        with pytest.raises(EnvError, match=r"step 2 of the episode with seed 5: RuntimeError"):
            found += [episode.number for episode in episodes]
        assert found[:3] == [0, 1, 2]
        assert [episode.seed for episode in player.play([7, 8])] == [7, 8]


def fails(observation):
    """Raise an error."""
    raise KeyError("speed")


@every_backend
def test_policy_error_names_policy_seed_and_step(start, n_workers):
    """An error of a policy names policy, seed and step."""
    player = start(
        WalkEnv, partial(UserRows, lambda: fails), n_workers=n_workers, max_worker_restarts=0
    )
    words = r"policy test_player\.fails failed at step 1 of the episode with seed \d+: KeyError"
    with pytest.raises(EnvError, match=words) as caught:
        list(player.play(range(12)))
    if n_workers:
        words = r"(?s)^worker \d .*In the worker process:.*KeyError: 'speed'"
        assert re.search(words, str(caught.value))
    else:
        assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("key", ["video_every", "action_seed", "num_envs"])
def test_settings_are_checked(key):
    """Values out of range raise ConfigError."""
    with pytest.raises(ConfigError, match=key):
        player_of(WalkEnv, num_envs=0) if key == "num_envs" else PlaySettings(**{key: -1})


def refuses(envs):
    """Raise ConfigError instead of building an agent."""
    raise ConfigError("policy", "expected another one")


def test_an_agent_that_can_not_be_built():
    """If the agent cannot be built, all environments are closed."""
    make, closed = closing_env()
    with pytest.raises(ConfigError, match="another one"):
        player_of(make, refuses, num_envs=3)
    assert len(closed) == 3


@slow
def test_constructor_errors_leave_no_process(tmp_path):
    """Errors in constructors keep their type or name the worker; no process remains."""
    marker = tmp_path / "broken"
    marker.touch()
    with pytest.raises(ConfigError, match="another one"):
        player_of(WalkEnv, refuses, n_workers=2)
    with pytest.raises(WorkerError, match=r"^worker 0 .*ValueError: no such level"):
        player_of(partial(BrokenLaterEnv, marker), n_workers=2)
    with pytest.raises(SpaceError, match="all environments must have equal"):
        player_of(partial(OddOneOutEnv, tmp_path / "one"), n_workers=2, num_envs=2)
    with pytest.raises(ConfigError, match=r"policy.*cannot be sent to a worker process"):
        player_of(WalkEnv, partial(refuses, (k for k in "ab")), n_workers=2)
    with pytest.raises(ConfigError, match="n_workers"):
        player_of(WalkEnv, n_workers=-1)
    assert multiprocessing.active_children() == []


@slow
@pytest.mark.parametrize(
    ("kind", "bits_of", "victims", "after"),
    everyday(
        1,
        [(Episodes, bits, [0], 1), (Episodes, bits, [0, 1], 7), (Rollouts, pair_bits, [1], 7)],
        are_rows=True,
    ),
)
def test_episodes_of_killed_processes_are_repeated(
    no_file_is_left, kind, bits_of, victims, after, capfd
):
    """Episodes of killed processes are repeated with identical results."""
    count = 40
    with closing(kind()) as here:
        expected = here.take(count, count) if kind is Rollouts else here.take(count)
    with closing(kind(n_workers=2, num_envs=6, on_worker_failure="restart")) as there:
        pool = there.of.pool if kind is Rollouts else there.of
        with there.generate(count) as results:
            found = [bits_of(next(results)) for _ in range(after)]
            for victim in victims:
                os.kill(processes_of(pool)[victim].pid, signal.SIGKILL)
            found += map(bits_of, islice(results, count - after))
        assert found == expected
        assert pool.worker_restarts == len(victims)
        told = capfd.readouterr().err
        for victim in victims:
            name = rf"worker {victim} \(environments {3 * victim} to {3 * victim + 2}\)"
            words = rf"warning: {name} died .*SIGKILL.*its \d+ episodes are repeated with the"
            assert re.search(words, told)
        assert re.search(r"SIGKILL.*with the seeds \d+", told)
        # A worker killed between rounds is replaced when it is needed; its steps remain counted.
        made = pool.steps_made
        processes_of(pool)[0].kill()
        processes_of(pool)[0].join()
        assert there.take(6) == expected[:6]
        assert pool.steps_made > made
        assert pool.worker_restarts == len(victims) + 1


FAILURES = {
    "raise": r"environment [0-3] failed at step 2 of .* seed 5: RuntimeError: the wheel came off",
    "leave": r"environment [0-3] failed at step 2 of .* seed 5: SystemExit: 0",
    "kill": r"died in a step of an episode \(signal SIGKILL.*it was running the episodes.*5",
    "hang": r"hangs: .* a step of an episode within timeout_s = 1 seconds, and was killed; .*5",
}


@slow
@pytest.mark.parametrize(
    ("how", "again"),
    everyday(
        2,
        [
            *(("raise", False), ("kill", True), ("kill", False)),
            *(("leave", True), ("hang", False)),
        ],
        are_rows=True,
    ),
)
def test_failed_episode_is_repeated_once(start, how, again, tmp_path, capfd):
    """A failed episode is repeated once; a second failure raises its error."""
    make = partial(FailsForSeedEnv, how, 5, None if again else tmp_path / "failed")
    player = start(make, on_worker_failure="restart", timeout_s=SHORT_S, max_worker_restarts=100)
    pids = [process.pid for process in processes_of(player)]
    expected = play_alone(partial(FailsForSeedEnv, how, -1), random_rows, range(12))
    found, is_raised = [], how in ("raise", "leave")
    if again:
        with pytest.raises(WorkerError, match=FAILURES[how]) as caught:
            found += map(bits, player.play(range(12)))
        told = str(caught.value)
        assert "a repetition failed as well" in told
        assert all(has_ended(pid) for pid in pids)
        assert multiprocessing.active_children() == []
        with pytest.raises(EnvError, match="is closed: build a new one"):
            list(player.play([1]))
    else:
        found += map(bits, player.play(range(12)))
        told = capfd.readouterr().err
        assert len(found) == 12
    assert found == expected[: len(found)]
    assert re.search(FAILURES[how], told)
    assert player.worker_restarts == (1 if is_raised or not again else 2)
    assert ("In the worker process:" in told) == is_raised


# -- order of episodes ---------------------------------------------------------------------------


def test_waiting_episodes_are_bounded():
    """The number of episodes that wait for a long episode is bounded; all steps are counted."""
    begun = []

    class Noted(UnequalEnv):
        def reset(self, *, seed=None, options=None):
            found = super().reset(seed=seed, options=options)
            self.length = 300 if seed == 0 else 2
            begun.append(seed)
            return found

    steps = []
    with player_of(Noted, num_envs=4) as player:
        episodes = player.play(range(100), steps.append)
        next(episodes)
        assert begun == list(range(8))
        for number in range(1, 9):
            assert next(episodes).number == number
            assert len(begun) <= number + 8
        assert [episode.number for episode in episodes] == list(range(9, 100))
        assert sum(steps) == player.steps_made == 300 + 99 * 2


@every_backend
def test_finished_episodes_survive_an_interruption(start, n_workers):
    """Finished episodes are kept when playing is interrupted, until the next call takes them."""
    make = partial(PictureEnv, endless=(9,))
    player = start(make, n_workers=n_workers)

    def enough(steps):
        if len(player.waiting) >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(player.play([9, *range(8)], enough))
    expected = play_alone(make, random_rows, range(8))
    assert len(player.waiting) >= 4
    for number, episode in player.waiting.items():
        assert bits(episode)[1:] == expected[number - 1][1:]
    episodes = player.play([1, 2, 3])
    assert next(episodes).number == 0
    assert [0 in player.waiting, *(e.number for e in episodes)] == [True, 1, 2]
    assert player.waiting == {}


@pytest.mark.parametrize("where", ["reset", "step", "receive"])
def test_interrupt_does_not_change_later_episodes(where):
    """After an interrupt at any point, later episodes are identical."""

    class Interrupted(PictureEnv):
        def step(self, action):
            interrupt("step")
            return super().step(action)

        def reset(self, **seed_and_options):
            interrupt("reset")
            return super().reset(**seed_and_options)

    left = {where: 3}

    def interrupt(place):
        left[place] = left.get(place, 0) - 1
        if left[place] == 0:
            raise KeyboardInterrupt

    with player_of(Interrupted) as player:
        receive = player.workers.receive

        def received(index):
            interrupt("receive")
            return receive(index)

        player.workers.receive = received
        with pytest.raises(KeyboardInterrupt):
            list(player.play(range(4)))
        for _ in range(2):
            assert take(player, range(8)) == play_alone(PictureEnv, random_rows, range(8))


@every_backend
def test_second_play_cancels_the_first(start, n_workers):
    """A second call of `play` cancels the first; its results are discarded."""
    player = start(UnequalEnv, n_workers=n_workers)
    expected = play_alone(UnequalEnv, random_rows, range(100, 112))
    for _ in range(5):
        first = player.play(range(50))
        next(first)
        second = player.play(range(100, 112))
        found = [bits(next(second))]
        with pytest.raises(EnvError, match=r"cancelled, because play\(\) was called again"):
            next(first)
        assert found + [bits(episode) for episode in second] == expected
    assert list(player.play([])) == []


def test_player_can_be_closed_twice():
    """`close` can be called twice; afterwards playing raises EnvError."""
    make, closed = closing_env()
    player = player_of(make, num_envs=2)
    episodes = player.play(range(9))
    next(episodes)
    player.close()
    player.close()
    assert len(closed) == 2
    with pytest.raises(EnvError, match="is closed: build a new one"):
        list(episodes)
    with pytest.raises(EnvError, match="is closed: build a new one"):
        list(player.play([0]))


# -- videos --------------------------------------------------------------------------------------


@slow
def test_worker_videos_equal_one_process(start, tmp_path):
    """Videos equal those of one process; partial videos of killed processes are removed."""
    pytest.importorskip("imageio_ffmpeg")
    make = partial(PictureEnv, endless=(9,))
    here, there = (
        PlaySettings(video_dir=str(tmp_path / name), video_every=3) for name in ("here", "there")
    )
    expected = play_alone(make, random_rows, range(8), here)
    player = start(make, settings=there, on_worker_failure="restart")
    found = take(player, range(8))
    assert [episode[:5] for episode in found] == [episode[:5] for episode in expected]
    names = [f"episode_{k:06d}_seed_{k}.mp4" for k in (0, 3, 6)]
    for name in names:
        ours, theirs = ((tmp_path / where / name).read_bytes() for where in ("here", "there"))
        assert ours == theirs
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == names

    def kill(steps):
        if list((tmp_path / "there").glob(".*.tmp")):
            for process in processes_of(player):
                process.kill()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(player.play([9], kill))
    player.close()
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == names
