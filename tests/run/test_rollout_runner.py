"""Rollouts: policies, files, and identical results on all runners."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import own_envs
import own_policies
import pytest
import yaml
from gymnasium import spaces
from rollouts import RANDOM, numbers, play, rows
from short_runs import PPO, SMALL, summary

from maze_train import load_policy, train
from maze_train.config.rollout_config import load_rollout_config
from maze_train.core.errors import ConfigError, EnvError, MissingExtraError, RunDirectoryError
from maze_train.data.datasets import open_dataset
from maze_train.run.rollout import RolloutRunner
from maze_train.tracking.tracker import JSONSummaryWriter

DICT_ENV = {"_target_": "own_envs.SpacesEnv", "kwargs": {"obs": "dict", "action": "box"}}
LOCAL: dict[str, Any] = {"runner": "local", "runner.n_workers": 2}


pytestmark = pytest.mark.usefixtures("empty_directory")


@pytest.fixture(scope="module")
def cartpole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a short run on CartPole; return its directory."""
    directory = tmp_path_factory.mktemp("runs") / "cartpole"
    given = {**SMALL, **PPO, "evaluation.dump_interval": 1}
    train(env="CartPole-v1", **given, run_dir=str(directory))
    return directory


@pytest.fixture
def run(cartpole_run: Path, tmp_path: Path) -> str:
    """Return a copy of the run."""
    shutil.copytree(cartpole_run, tmp_path / "run")
    return "run"


def test_rollout_plays_the_policy_of_a_run(run: str) -> None:
    """Results contain every episode and match the policy in its environment."""
    result = play(run=run, seed=3)
    assert result.output_dir == Path("out").absolute()
    assert [episode.seed for episode in result.episodes] == [3, 4, 5, 6, 7]
    policy, env = load_policy(run), gymnasium.make("CartPole-v1")
    (obs, _), ended, total = env.reset(seed=4), False, 0.0
    while not ended:
        obs, reward, terminated, truncated, _ = env.step(policy.act(obs))
        ended, total = terminated or truncated, total + float(reward)
    assert result.episodes[1].episode_return == total
    assert rows()[1] == {
        "number": "1",
        "seed": "4",
        "return": repr(total),
        "length": str(int(total)),
        "success": "",
        "terminated": "1",
        "truncated": "0",
        "lost": "0",
    }


def test_rollout_summary_has_statistics_and_settings(run: str) -> None:
    """The summary contains statistics and the settings of the rollout."""
    result = play(run=run)
    returns = [float(row["return"]) for row in rows()]
    found = summary("out")
    assert found["stop_reason"] == "finished"
    assert (found["episodes"], found["episodes_requested"], found["lost"]) == (5, 5, 0)
    assert found["return_mean"] == result.summary.return_mean == np.mean(returns)
    assert found["return_std"] == np.std(returns)
    assert (found["length_min"], found["length_max"]) == (min(returns), max(returns))
    assert found["env_steps"] == sum(returns)
    assert found["success_rate"] is None
    assert (found["first_seed"], found["last_seed"]) == (0, 4)
    assert "seeds" not in found
    assert "agents" not in found
    assert found["env"]["id"] == "CartPole-v1"
    score = json.loads(Path(run, "best/score.json").read_text())
    del score["sha256"]
    assert found["policy"] == {"run": "run", "algorithm": "ppo", "deterministic": True, **score}
    assert set(found["versions"]) == {"python", "maze_train", "torch", "numpy", "gymnasium"}


def test_listed_seeds_keep_their_order() -> None:
    """Seeds are any iterable of integers, in this order in the summary."""
    play(**RANDOM, seeds=np.array([7, 6, 5]))
    assert summary("out")["seeds"] == [7, 6, 5] == [int(row["seed"]) for row in rows()]
    assert "first_seed" not in summary("out")


def test_rollout_directories_are_never_overwritten(run: str) -> None:
    """Results are in the run or in `outputs`, and never overwrite files."""
    names = [play(run=place, output_dir=None).output_dir for place in (run, f"{run}/best")]
    last = sorted(Path(run, "checkpoints").glob("epoch_*"))[-1]
    for place in (f"{run}/policies/epoch_000001", f"{run}@final", last):
        names.append(play(run=str(place), output_dir=None).output_dir)
    assert {path.parent for path in names} == {Path("run/rollouts").absolute()}
    assert len(set(names)) == 5
    with pytest.raises(RunDirectoryError, match="no saved policy 'last': expected one of best, "):
        play(run=f"{run}@last")
    path = play(**RANDOM, output_dir=None).output_dir
    assert path.parent == Path("outputs/CartPole-v1-random-rollout").absolute()
    for taken in (run, str(path)):
        with pytest.raises(ConfigError, match="already contains results"):
            play(run=run, output_dir=taken)


def test_written_configuration_repeats_the_rollout(
    run: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The written configuration repeats the rollout from any directory."""
    play(run=run, seeds=[9, 2], deterministic=False, **{"env.max_episode_steps": 30})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    node = yaml.safe_load((tmp_path / "out/rollout.yaml").read_text())
    assert node["output_dir"] is None
    again = RolloutRunner(load_rollout_config({**node, "output_dir": "out"})).run()
    assert rows(again.output_dir) == rows(tmp_path / "out")


def test_rollout_settings_override_the_environment_of_the_run(run: str) -> None:
    """Settings override or replace the environment of the run."""
    found = play(run=run, output_dir="b", **{"env.kwargs.sutton_barto_reward": True})
    assert found.summary.return_max == -1.0

    class Short(gymnasium.wrappers.TimeLimit):
        def __init__(self) -> None:
            super().__init__(gymnasium.make("CartPole-v1"), 3)

    assert play(run=run, env=Short, output_dir="c").summary.length_max == 3


def test_rollout_in_other_spaces_raises(run: str) -> None:
    """The error contains both spaces; nothing is written."""
    before = sorted(Path().rglob("*"))
    for env, what in (("Acrobot-v1", "observation space"), (make_three_actions, "action space")):
        with pytest.raises(ConfigError, match=f"has the {what} .*, but the policy has "):
            play(run=run, env=env)
    assert sorted(Path().rglob("*")) == before


class ThreeActions(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole with an additional action."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.action_space = spaces.Discrete(3)


def make_three_actions() -> gymnasium.Env[Any, Any]:
    """Return the environment with three actions."""
    return ThreeActions()


def test_random_actions_depend_on_the_episode_seed() -> None:
    """Random actions are determined by the episode seed, in any environment."""
    results = [
        play(policy="random", env=DICT_ENV, output_dir=name, **{"runner.concurrency": n})
        for name, n in (("a", 1), ("b", 3))
    ]
    assert rows("a") == rows("b")
    assert len({episode.episode_return for episode in results[0].episodes}) == 5
    assert summary("a")["policy"] == {"policy": "random"}
    assert summary("a")["deterministic"] is None


@pytest.mark.parametrize(
    ("policy", "total"),
    [
        ({"_target_": "own_policies.Counting", "first": 2}, 0.0),
        (own_policies.Counting(1), 1.0),
        (own_policies.always_one, 5.0),
    ],
    ids=["target", "object", "function"],
)
def test_custom_policy_is_reset_for_each_episode(policy: Any, total: float) -> None:
    """Custom policies are reset at the start of each episode."""
    result = play(policy=policy, env=own_envs.SpacesEnv)
    assert [episode.episode_return for episode in result.episodes] == [total] * 5


def test_invalid_policies_raise() -> None:
    """Invalid policies, and errors in their construction, raise an error."""
    with pytest.raises(ConfigError, match=r"policy = 3: expected 'random', a model"):
        play(policy=3, env="CartPole-v1")
    with pytest.raises(ConfigError, match="unexpected keyword argument 'frist'"):
        play(policy={"_target_": "own_policies.Counting", "frist": 2}, env="CartPole-v1")
    assert list(Path().rglob("*")) == []


def test_truncated_episodes_keep_their_return() -> None:
    """Truncated episodes are included with their return so far."""
    play(policy="random", env=own_envs.SpacesEnv, max_episode_steps=2)
    ends = [(row["length"], row["terminated"], row["truncated"]) for row in rows()]
    assert ends == [("2", "0", "1")] * 5


def test_record_dir_appends_to_a_dataset() -> None:
    """`record_dir` may contain episodes with the same spaces."""
    for seed in (0, 5):
        play(**RANDOM, seed=seed, record=True, record_dir="data", output_dir=f"out{seed}")
    dataset = open_dataset("data")
    assert list(dataset.seeds) == list(range(10))
    returns = [float(row["return"]) for row in rows("out5")]
    assert [t.episode_return for t in list(dataset)[5:]] == returns
    assert dataset.metadata.env["id"] == "CartPole-v1"
    assert dataset.metadata.policy == {"policy": "random"}
    assert not Path("out0/trajectories").exists()
    other: dict[str, Any] = {"policy": "random", "env": "Acrobot-v1", "record": True}
    with pytest.raises(ConfigError, match=r"'\S+data': the dataset \S+data has the obs") as told:
        play(**other, record_dir="data")
    assert told.value.key == "record_dir"
    with pytest.raises(ConfigError, match=r"record_dir = '\S+': \S+out0 .* no dataset\.json"):
        play(**other, record_dir="out0")
    assert not Path("out").exists()


def test_every_kth_episode_has_a_video() -> None:
    """Every k-th episode has a video of the same length."""
    result = play(**RANDOM, video=True, video_interval=3)
    names = [e.video and Path(e.video).name for e in result.episodes]
    first, second = "episode_000000_seed_0.mp4", "episode_000003_seed_3.mp4"
    assert names == [first, None, None, second, None]
    from imageio_ffmpeg import count_frames_and_secs

    frames, _ = count_frames_and_secs(result.episodes[3].video)
    assert frames == result.episodes[3].length + 1
    assert summary("out")["env"]["kwargs"] == {}


def test_render_human_uses_one_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering requires a single environment in this process."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    modes = []
    make = gymnasium.make
    monkeypatch.setattr(
        gymnasium, "make", lambda *a, **k: modes.append(k.get("render_mode")) or make(*a, **k)
    )
    play(**RANDOM, render="human", n_episodes=1, max_episode_steps=2)
    assert modes == ["human", "human"]  # one of them is inspected before the rollout


def test_unsupported_rendering_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the setting or the extra; nothing is written."""
    needs = "requires an environment with render_mode="
    for given, message in (
        ({"video": True}, f"video = True: {needs}'rgb_array'"),
        ({"render": "human"}, f"render = 'human': {needs}"),
        ({"video": True, "env.kwargs.render_mode": "ansi"}, "expected 'rgb_array'"),
    ):
        with pytest.raises(ConfigError, match=message):
            play(policy="random", env={"_target_": "own_envs.SpacesEnv"}, **given)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(MissingExtraError, match="video"):
        play(**RANDOM, video=True)
    assert list(Path().rglob("*")) == []


@pytest.mark.parametrize("fault", ["nan_reward", "nan_observation"])
def test_dropped_episodes_are_counted(fault: str) -> None:
    """With `skip`, aborted episodes are in the files but not in the averages."""
    env = {"_target_": "own_envs.FaultyEnv", "kwargs": {"fault": fault, "at": 8}}
    one = {"runner.concurrency": 1}
    skip = {"on_non_finite": "skip", "n_episodes": 3, "record": True}
    found = play(policy="random", env=env, **skip, **one).summary
    assert (found.episodes, found.lost) == (3, 2)
    assert [row["lost"] for row in rows()] == ["0", "1", "1"]
    assert found.return_mean == float(rows()[0]["return"])
    assert len(open_dataset("out/trajectories")) == 1
    with pytest.raises(EnvError, match="seed 1"):
        play(policy="random", env=env, output_dir="other", **one)


def test_failed_rollout_keeps_finished_episodes(capfd: pytest.CaptureFixture[str]) -> None:
    """Files are complete up to the failure, including recordings."""
    env = {"_target_": "own_envs.FaultyEnv", "kwargs": {"at": 12}}
    with pytest.raises(EnvError, match="the wheel came off"):
        play(policy="random", env=env, record=True, **{"runner.concurrency": 1})
    assert numbers() == [0, 1]
    assert (summary("out")["stop_reason"], summary("out")["episodes"]) == ("error", 2)
    assert len(open_dataset("out/trajectories")) == 2
    told = capfd.readouterr().err
    assert f"stopped after 2 of 5 episodes; results: {Path('out').absolute()}" in told


def test_unwritable_results_raise(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Obstructed paths and full disks raise errors that name the path."""
    Path("file").write_text("")
    message = r"output_dir = '\S+file/out': cannot be written: .*; choose another path: output_dir="
    with pytest.raises(ConfigError, match=message):
        play(run=run, output_dir="file/out")

    monkeypatch.setattr(JSONSummaryWriter, "finish", lambda *_: fills_disk())
    with pytest.raises(RunDirectoryError, match=r"out cannot be written: .*No space left"):
        play(run=run)


def fills_disk() -> None:
    """Raise the error of a full disk."""
    raise OSError(28, "No space left on device")


def test_rollout_prints_title_table_and_paths(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Title, table and paths are printed, except in quiet mode."""
    play(run=run, output_dir="quiet")
    assert capsys.readouterr().out == ""
    result = play(run=run, progress="lines", record=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "PPO on CartPole-v1, 5 episodes"
    assert lines[2].split() == ["mean", "std", "min", "max"]
    assert lines[3].split()[0] == "return"
    assert float(lines[3].split()[4]) == pytest.approx(result.summary.return_max, rel=1e-3)
    assert [line.split() for line in lines[-2:]] == [
        ["results", str(result.output_dir)],
        ["dataset", str(result.output_dir / "trajectories")],
    ]
