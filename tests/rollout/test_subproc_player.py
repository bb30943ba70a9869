"""Episodes in processes: the same to the bit as in one process, whatever befalls the processes."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from actor_envs import BrokenLaterEnv, ExitsEnv, OddOneOutEnv
from cases import everyday
from es_problems import DiesWhileStartingEnv
from leftovers import has_ended, left_of, run_owner
from player_problems import (
    PROBLEMS,
    RECORDED,
    EndlessEnv,
    FailsForSeedEnv,
    PictureEnv,
    UnequalEnv,
    WalkEnv,
    bits,
    play_alone,
)

from maze_train.errors import ConfigError, EnvError, SpaceError, WorkerError
from maze_train.rollout.agents import PolicyAgent, RandomAgent
from maze_train.rollout.player import PlaySettings, RolloutPlayer
from maze_train.workers.places import LocalProcesses

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_S = 60.0
SHORT_S = 1.0
"""Seconds after which a process counts as hung, where that is tested."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]


@pytest.fixture
def start(no_file_is_left: None) -> Iterator[Any]:
    """Starts players; afterwards no process is left of them."""
    started: list[RolloutPlayer] = []

    def start(make: Any, make_agent: Any = RandomAgent, **settings: Any) -> RolloutPlayer:
        found = {"n_workers": 2, "concurrency": 4, "timeout_s": 30.0, **settings}
        started.append(in_processes(make, make_agent, found.pop("settings", RECORDED), **found))
        return started[-1]

    yield start
    while started:
        started.pop().close()


def in_processes(
    make: Any,
    make_agent: Any = RandomAgent,
    settings: PlaySettings = RECORDED,
    *,
    n_workers: int = 2,
    concurrency: int = 2,
    on_non_finite: str = "raise",
    **others: Any,
) -> RolloutPlayer:
    """A player with worker processes."""
    place = LocalProcesses(n_workers, **{"start_method": "fork", **others})
    return RolloutPlayer(
        make, make_agent, settings, place, concurrency=concurrency, on_non_finite=on_non_finite
    )


def processes(player: RolloutPlayer) -> list[Any]:
    """The processes of a player."""
    return player._pool.processes


def take(player: RolloutPlayer, seeds: Any) -> list[Any]:
    """Bits of all episodes."""
    return [bits(episode) for episode in player.play(seeds)]


class Enough:
    """Called meanwhile, it interrupts after some calls.

    Args:
        calls: How many.
    """

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, steps: int) -> None:
        self.calls -= 1
        if not self.calls:
            raise KeyboardInterrupt


# -- the same numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", everyday(3, PROBLEMS))
def test_processes_make_no_difference(start: Any, kind: str) -> None:
    """One or two, with several episodes each; also when they are asked again."""
    make, make_agent = PROBLEMS[kind]()
    expected = play_alone(make, make_agent, range(12))
    for n_workers, concurrency in ((1, 3), (2, 8)):
        player = start(make, make_agent, n_workers=n_workers, concurrency=concurrency)
        steps: list[int] = []
        episodes = [bits(episode) for episode in player.play(range(12), steps.append)]
        assert episodes == expected
        assert sum(steps) == player.steps_made == sum(episode[3] for episode in expected)
        assert take(player, range(5)) == expected[:5]
        assert player.worker_restarts == 0
        assert player.spaces == (make().observation_space, make().action_space)


def test_processes_of_a_fork_server(start: Any) -> None:
    """They import what they need, functions within functions included."""
    make, make_agent = PROBLEMS["sampled discrete"]()
    local = lambda slots: make_agent(slots)  # noqa: E731 (what has no name that can be imported)
    player = start(make, local, start_method="forkserver")
    assert take(player, range(6)) == play_alone(make, make_agent, range(6))


# -- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("victims", [[0], [1], [0, 1]])
@pytest.mark.parametrize("after", everyday(1, [1, 0, 7]))
def test_killed_processes(
    start: Any, victims: list[int], after: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the middle of episodes; others play them again, and nobody sees a difference."""
    make, make_agent = PROBLEMS["user"]()
    player = start(make, make_agent, on_worker_failure="restart")
    episodes = player.play(range(40))
    found = [bits(next(episodes)) for _ in range(after + 1)]
    for victim in victims:
        os.kill(processes(player)[victim].pid, signal.SIGKILL)
    found += [bits(episode) for episode in episodes]
    assert found == play_alone(make, make_agent, range(40))
    assert player.worker_restarts == len(victims)
    told = capfd.readouterr().err
    assert told.count("are played again, with the same numbers") == len(victims)
    assert re.search(rf"warning: worker {victims[0]} .*SIGKILL.*with the seeds \d+", told)


def test_a_process_that_dies_while_it_starts_again(start: Any, tmp_path: Path) -> None:
    """It is started once more."""
    player = start(partial(DiesWhileStartingEnv, tmp_path), on_worker_failure="restart")
    episodes = player.play(range(200))
    found = [bits(next(episodes))]
    (tmp_path / "kill").touch()
    processes(player)[0].kill()
    while player.worker_restarts < 2:
        found.append(bits(next(episodes)))
    assert found == play_alone(UnequalEnv, RandomAgent, range(len(found)))


FAILURES = {
    "raise": r"step 2 of the episode with seed 5: RuntimeError: the wheel came off",
    "kill": r"died in a step of an episode \(signal SIGKILL.*it had the episodes with the seed.*5",
    "hang": r"hangs: it did not finish a step of an episode within timeout_s = 1 sec.*; .*5",
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_that_does_not_come_again(
    start: Any, how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The episode is played again and comes out as in a process without failure."""
    make = partial(FailsForSeedEnv, how, 5, tmp_path / "failed")
    player = start(make, on_worker_failure="restart", timeout_s=SHORT_S)
    found = take(player, range(12))
    assert found == play_alone(partial(FailsForSeedEnv, how, -1), RandomAgent, range(12))
    told = capfd.readouterr().err
    assert re.search(FAILURES[how], told)
    assert told.count("warning:") == player.worker_restarts == 1
    assert ("In the worker process:" in told) == (how == "raise")


@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_that_comes_again(
    start: Any, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It ends the run with its error, instead of one process after the other."""
    make = partial(FailsForSeedEnv, how, 5)
    player = start(make, on_worker_failure="restart", timeout_s=SHORT_S, max_worker_restarts=100)
    pids = [process.pid for process in processes(player)]
    found: list[int] = []
    with pytest.raises(WorkerError, match=FAILURES[how]) as caught:
        found += [episode.number for episode in player.play(range(12))]
    assert found == list(range(len(found)))
    assert "it failed when it was played again, too" in str(caught.value)
    assert player.worker_restarts == (1 if how == "raise" else 2)
    assert ("In the worker process:" in str(caught.value)) == (how == "raise")
    assert all(has_ended(pid) for pid in pids)
    assert multiprocessing.active_children() == []


def test_an_environment_that_exits(start: Any) -> None:
    """It is an error of the environment, whose number is that among all."""
    player = start(ExitsEnv)
    words = r"worker 1 \(environments 2 to 3\): environment [23] failed at step 2 .*SystemExit: 0"
    with pytest.raises(WorkerError, match=words):
        list(player.play(range(12)))


@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_without_restarts(start: Any, how: str) -> None:
    """The error says what happened, and no process is left, even before anybody closes them."""
    player = start(partial(FailsForSeedEnv, how, 5), timeout_s=SHORT_S)
    with pytest.raises(WorkerError, match=rf"^worker [01] \(environments .*{FAILURES[how]}"):
        list(player.play(range(12)))
    assert multiprocessing.active_children() == []
    with pytest.raises(EnvError, match="this player is closed"):
        list(player.play([1]))


def test_numbers_that_are_not_finite(start: Any) -> None:
    """They are an error that a restart is no remedy for, or lose the episode."""
    make = partial(FailsForSeedEnv, "nan", 5)
    player = start(make, on_worker_failure="restart")
    with pytest.raises(WorkerError, match=r"seed 5: NonFiniteError"):
        list(player.play(range(12)))
    assert player.worker_restarts == 0
    player = start(make, on_non_finite="skip")
    assert [episode.lost for episode in player.play(range(7))] == [k == 5 for k in range(7)]


def fails(observation: Any) -> Any:
    """A policy that is no good."""
    raise KeyError("speed")


def test_a_policy_that_raises(start: Any) -> None:
    """The error names it, the seed, and where."""
    player = start(WalkEnv, partial(PolicyAgent, lambda: fails), on_worker_failure="restart")
    words = r"(?s)^worker \d .*policy test_subproc_player\.fails failed at step 1 .*seed \d+: KeyE"
    with pytest.raises(WorkerError, match=words + ".*In the worker process:.*KeyError: 'speed'"):
        list(player.play(range(12)))
    assert player.worker_restarts <= 12


def test_what_can_not_be_built(tmp_path: Path) -> None:
    """Errors of settings are told as what they are, others with the process; none is left."""

    def refuses(slots: Any) -> Any:
        raise ConfigError("policy", "expected another one")

    marker = tmp_path / "broken"
    marker.touch()
    with pytest.raises(ConfigError, match="another one"):
        in_processes(WalkEnv, refuses)
    with pytest.raises(WorkerError, match=r"^worker 0 .*ValueError: no such level"):
        in_processes(partial(BrokenLaterEnv, marker))
    with pytest.raises(SpaceError, match="all environments must have equal"):
        in_processes(partial(OddOneOutEnv, tmp_path / "one"))
    with pytest.raises(ConfigError, match=r"policy.*can not be sent to a worker process"):
        in_processes(WalkEnv, partial(refuses, (k for k in "ab")))
    with pytest.raises(ConfigError, match="n_workers"):
        in_processes(WalkEnv, n_workers=-1)
    assert multiprocessing.active_children() == []


# -- one after the other -------------------------------------------------------------------------


def test_few_episodes_are_begun_ahead(start: Any) -> None:
    """What waits in memory for an endless episode is bounded."""
    player = start(partial(PictureEnv, endless=(0,)), settings=PlaySettings())
    with pytest.raises(KeyboardInterrupt):
        next(player.play(range(1000), Enough(12)))
    assert player._queue.next == 8
    assert [episode.number for episode in player.play([3, 4, 5])] == [0, 1, 2]


def test_episodes_that_are_not_wanted_any_more(start: Any) -> None:
    """Another call begins anew, and news of the first one are not taken for its own."""
    player = start(UnequalEnv)
    expected = play_alone(UnequalEnv, RandomAgent, range(100, 112))
    for _ in range(5):
        first = player.play(range(50))
        next(first)
        second = player.play(range(100, 112))
        found = [bits(next(second))]
        with pytest.raises(EnvError, match="called off"):
            next(first)
        assert found + [bits(episode) for episode in second] == expected


def test_processes_that_have_nothing_to_do(start: Any) -> None:
    """They do not count as hung, nor while nobody listens to them."""
    player = start(UnequalEnv, n_workers=2, concurrency=2, timeout_s=0.4)
    for _ in range(2):
        episodes = player.play(range(20))
        next(episodes)
        time.sleep(0.6)
        assert len(list(episodes)) == 19
        time.sleep(0.6)
    assert player.worker_restarts == 0


def test_closing(start: Any) -> None:
    """At any time, several times; processes survive signals of a job until then."""
    for plays in (False, True):
        player = start(EndlessEnv)
        pids = [process.pid for process in processes(player)]
        os.kill(pids[0], signal.SIGINT)
        os.kill(pids[1], signal.SIGTERM)
        if plays:
            with pytest.raises(KeyboardInterrupt):
                next(player.play(range(9), Enough(3)))
        player.close()
        player.close()
        assert all(has_ended(pid) for pid in pids)


def test_episodes_that_wait_are_kept(start: Any) -> None:
    """What processes told of is there when playing ends early."""
    make = partial(PictureEnv, endless=(9,))
    player = start(make)

    def enough(steps: int) -> None:
        if len(player.waiting) >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(player.play([9, *range(8)], enough))
    expected = play_alone(make, RandomAgent, range(8))
    assert len(player.waiting) >= 4
    for number, episode in player.waiting.items():
        assert bits(episode)[1:] == expected[number - 1][1:]


# -- videos --------------------------------------------------------------------------------------


def test_videos(start: Any, tmp_path: Path) -> None:
    """The same files as in one process; those of killed processes are removed."""
    pytest.importorskip("imageio_ffmpeg")
    make = partial(PictureEnv, endless=(9,))
    here, there = (
        PlaySettings(video_dir=str(tmp_path / name), video_every=3) for name in ("here", "there")
    )
    expected = play_alone(make, RandomAgent, range(8), here)
    player = start(make, settings=there, on_worker_failure="restart")
    found = take(player, range(8))
    assert [episode[:7] for episode in found] == [episode[:7] for episode in expected]
    names = [f"episode_{k:06d}_seed_{k}.mp4" for k in (0, 3, 6)]
    for name in names:
        ours, theirs = ((tmp_path / where / name).read_bytes() for where in ("here", "there"))
        assert ours == theirs
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == names

    def kill(steps: int) -> None:
        if list((tmp_path / "there").glob(".*.tmp")):
            for process in processes(player):
                process.kill()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(player.play([9], kill))
    player.close()
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == names


def test_videos_of_what_can_not_be_seen(tmp_path: Path) -> None:
    """That is told before anything is played."""
    pytest.importorskip("imageio_ffmpeg")
    settings = PlaySettings(video_dir=str(tmp_path))
    with pytest.raises(EnvError, match='build the environment with render_mode="rgb_array"'):
        in_processes(WalkEnv, RandomAgent, settings, n_workers=1)
    assert list(tmp_path.iterdir()) == []


# -- the end of the process ----------------------------------------------------------------------

PARENT = """
import sys
from functools import partial
from player_problems import *
from maze_train.rollout.agents import RandomAgent
from maze_train.rollout.player import PlaySettings, RolloutPlayer
from maze_train.workers.places import LocalProcesses

if __name__ == "__main__":
    make = partial(PictureEnv, endless=range(8))
    settings = PlaySettings(video_dir=sys.argv[2] if len(sys.argv) > 2 else None)
    place = LocalProcesses(2, start_method=sys.argv[1])
    with RolloutPlayer(make, RandomAgent, settings, place, concurrency=4) as player:
        pids = [process.pid for process in player._pool.processes]
        made = 0
        def tell(steps):
            global made
            if made < 100 <= made + steps:
                print(*pids, flush=True)
            made += steps
        next(player.play(range(8), tell))
"""


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_process_that_asked_ends(
    tmp_path: Path, start_method: str, number: signal.Signals
) -> None:
    """By Ctrl+C or killed: what played for it ends, and Ctrl+C leaves no half of a video."""
    pytest.importorskip("imageio_ffmpeg")
    videos = tmp_path / "videos"
    with run_owner(PARENT, tmp_path, start_method, str(videos)) as (parent, pids):
        assert len(pids) == 2
        assert not any(has_ended(pid) for pid in pids)
        if number == signal.SIGINT:
            os.killpg(parent.pid, number)  # as a terminal does
        else:
            parent.kill()
        told = parent.communicate(timeout=PATIENCE_S)[1]
        assert parent.returncode == -number
        assert left_of(pids, PATIENCE_S) == []
        if number == signal.SIGINT:
            assert "KeyboardInterrupt" in told
            assert list(videos.iterdir()) == []
