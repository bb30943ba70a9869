"""The command `maze-run`, with a runner that does not train."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from command_lines import CommandLine, maze_run
from omegaconf import OmegaConf
from short_runs import PPO as SHORT_PPO
from short_runs import SMALL

from maze_train import EnvConfig, config_to_dict
from maze_train.config.options import shipped_root
from maze_train.core.errors import ConfigError, SpaceError, TrainingError
from maze_train.jobs import COMMANDS, command_of, roll_out

if TYPE_CHECKING:
    from collections.abc import Callable

    from maze_train.config.train_config import TrainConfig

__all__ = ["maze_run"]

PPO = ("algorithm=ppo", "env=CartPole-v1")
ROLLOUT = ("rollout",)
RANDOM = (*ROLLOUT, "policy=random", "env=CartPole-v1")
LONG = "x" * 300
OWN_ALGORITHM = """
from dataclasses import dataclass
from typing import ClassVar
from maze_train.algorithms.ppo.config import PPOAlgorithmConfig

@dataclass(kw_only=True)
class MyConfig(PPOAlgorithmConfig):
    '''a custom algorithm.'''
    name: ClassVar[str] = "mine"
    bonus: float = 0.5
"""


def raises(error: BaseException) -> Callable[[TrainConfig], float]:
    """Return a training function that raises `error`."""

    def train(config: TrainConfig) -> float:
        raise error

    return train


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        ((*PPO, "algorithm.lr=1e-3"), {"algorithm.lr": 1e-3, "env.id": "CartPole-v1"}),
        (
            ("+algorithm=ppo", "+env=CartPole-v1", "+algorithm.lr=1e-3"),
            {"algorithm.lr": 1e-3, "env.id": "CartPole-v1", "algorithm.name": "ppo"},
        ),
        (
            (*PPO, "total_steps=1e6", "algorithm.n_epochs=20_000", "algorithm.batch_size=1k"),
            {
                "total_steps": 1_000_000,
                "algorithm.n_epochs": 20_000,
                "algorithm.batch_size": 1_000,
            },
        ),
        (
            ("+experiment=ppo/CartPole-v1", "algorithm.gamma=0.9"),
            {"algorithm.name": "ppo", "algorithm.gamma": 0.9, "env.id": "CartPole-v1"},
        ),
        (
            (*PPO, "algorithm.lr=[[0, 1e-3], [100_000, 1e-4]]"),
            {
                "algorithm.lr.points": [[0.0, 1e-3], [100_000.0, 1e-4]],
                "algorithm.lr.by": "env_steps",
            },
        ),
        (
            ("algorithm=a2c", "env._target_=my.Env", "env.kwargs.size=3"),
            {"env.id": None, "env.target": "my.Env", "env.kwargs": {"size": 3}},
        ),
    ],
)
def test_command_line_overrides_reach_the_config(
    maze_run: CommandLine, argv: tuple[str, ...], values: dict[str, Any]
) -> None:
    """Choices and values with or without `+`, numbers with suffixes and underscores, presets."""
    assert maze_run(*argv) == 0
    config = maze_run.configs[0]
    assert {key: attrgetter(key)(config) for key in values} == values
    assert maze_run.files() == []


def test_user_code_sees_its_own_arguments_and_environment(
    maze_run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is changed while a run trains, and a run may clear the environment variables."""
    before = list(sys.argv), dict(os.environ)

    def train(config: TrainConfig) -> float:
        assert before == (sys.argv, dict(os.environ))
        for name in list(os.environ):
            monkeypatch.delenv(name)
        return 1.0

    maze_run.train = train
    assert maze_run(*PPO) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "algorithm: choose one: algorithm=<name>\n  a2c     Synchronous advantage"),
        (("algoritm=ppo",), "algoritm = 'ppo': unknown; did you mean algorithm? allowed: env"),
        ((*PPO, "seeed=1", "algorithm.lrr=2"), "\nalgorithm.lrr = 2: unknown; did you mean"),
        (("--resolve", *PPO), "--resolve: shows the resolved configuration; add --cfg job"),
        ((*PPO, f"seed={'1' * 400}"), "seed = 'an integer of more than 300 digits': expected"),
        ((*PPO, f"algorithm.lr={'1' * 5000}"), "overrides: a number has too many digits"),
        ((f"algorithm={'x' * 300}",), "no such option; the name is too long"),
        (("-cd", "x" * 300), "no such directory"),
        (("algorithm=pp0",), "algorithm = 'pp0': no such option; did you mean ppo? available:\n"),
        (("experiment=ppo/Cartpole-v1",), "did you mean ppo/CartPole-v1?"),
        (("algorithm=ppo", "env=CartPole-v7"), "no such environment; did you mean CartPole-v1"),
        ((*PPO, "+seed=0,1"), " +seed=0,1: the value has commas; add -m"),
        ((*PPO, "seed=range(0,3)"), "'seed=range(0,3)' requires --multirun"),
        ((*PPO, "+algorithm.lr=[1"), " +algorithm.lr=[1: cannot be read"),
        ((*PPO, "--config-name", "train", "lr=1"), " lr = 1: unknown; did you mean algorithm.lr?"),
        ((*PPO, "--multi"), "--multi: no such option; did you mean --multirun?"),
        (
            (*PPO, "--learning-rate", "1"),
            "did you mean algorithm.lr? settings are written without dashes",
        ),
        ((*PPO, "~nothing"), "Could not delete from config. 'nothing' does not exist"),
        ((*PPO, "=1"), "=1: expected key=value"),
        ((*PPO, "experiment=[[1]]"), "experiment = '[[1]]': expected the name of an option"),
        ((*PPO, "-m", "model=range(1,3)"), "model = 'range(1,3)': expected the name of an option"),
        ((*PPO, "hydra.verbose=3"), "hydra.verbose = '3': expected true, false or names"),
        (
            (*PPO, "model.hidden_sizes=[8]", "model.hidden_sizes.a=1"),
            "model.hidden_sizes.a = 1: cannot be set in the configuration: invalid literal",
        ),
        ((*PPO, "learner_group.n_learners=1e18"), "expected a number in [1, 1024]"),
        ((*PPO, f"run_dir={LONG}"), f"run_dir = '{LONG}': the path of "),
        (ROLLOUT, "run = None: expected one of run=<directory of a run>, policy=random"),
        ((*ROLLOUT, "run=nowhere"), "run = 'nowhere': there is no saved policy"),
        ((*RANDOM, "algorithm=ppo"), "algorithm: not a group of the primary config (-cn)"),
        (("evaluate", "run=a"), "no such command; episodes are played by maze-run rollout run="),
        (("rolout", "run=a"), "key=value, such as env=CartPole-v1; did you mean rollout?"),
        (
            ("run=a", "rollout"),
            "rollout: expected key=value, a command comes first: maze-run rollout",
        ),
        ((*PPO, "total_steps=100,000"), "write numbers without commas: total_steps=100000"),
        ((*PPO, "algorithm.lr=0,001"), "write numbers without commas: algorithm.lr=0.001"),
        (
            (*PPO, "model.hidden_sizes=[64,", "64]", "seed=1"),
            "split by the shell at spaces; use quotes: 'model.hidden_sizes=[64, 64]'",
        ),
        (
            (*PPO, "tracking.writers=wandb"),
            "for a shell 'tracking.writers=[{_target_: maze_train.WandbWriter}]'",
        ),
        ((*PPO, "evaluation.metric=eval/return"), "did you mean eval/episode_return_mean?"),
        ((*PPO, "algorithm.desired_kl=0.01"), "did you mean algorithm.lr or algorithm.target_kl?"),
        (
            (*PPO, "algorithm.exploration_fraction=0.1"),
            "did you mean algorithm.epsilon (not available for this choice)?",
        ),
        (
            ("-cn", "compair"),
            "did you mean compare? available: check, compare, export, push, rollout",
        ),
        (("algorithm=ppo", "env=tictactoe_v3"), "did you mean pettingzoo:classic/tictactoe_v3"),
        (("algorithm=ppo", "env=math:Grid"), "did you mean env._target_=math.Grid?"),
        (("algorithm=my.Config",), "no such option; did you mean algorithm._target_=my.Config?"),
        (
            (*PPO, "model.policy=my:Net"),
            "a mapping; in YAML policy: {_target_: my.Net}, for a shell 'model.policy={_target_: my"
            '.Net}\', in Python {"_target_": "my.Net"}',
        ),
        ((*PPO, "env.kwargs=3"), "for a shell 'env.kwargs={key: value}', in Python {"),
        (("--config-dir", "nowhere"), "--config-dir = 'nowhere': no such directory"),
        (("-cp", "/my", "-cn", "mine"), "--config-path = '/my': replaces the shipped folder"),
    ],
)
def test_configuration_error_is_one_message_with_exit_code_2(
    maze_run: CommandLine, capfd: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    """Exit code 2 and one message with key, value and remedy; no run starts, no file is created."""
    assert maze_run(*argv) == 2
    output = capfd.readouterr()
    assert message in output.err
    assert output.err.startswith("maze-run: error: ")
    assert output.err.count("maze-run:") == 1
    assert "++" not in output.err
    assert "Traceback" not in output.err
    assert output.out == ""
    assert maze_run.configs == []
    assert maze_run.files() == []


@pytest.mark.parametrize(
    ("error", "code", "message", "has_traceback"),
    [
        (ConfigError("env.id", "wrong", "X"), 2, "maze-run: error: env.id = 'X': wrong\n", False),
        (SpaceError("a Text space"), 2, "maze-run: error: a Text space\n", False),
        (TrainingError("the loss is nan"), 1, "maze-run: error: the loss is nan\n", False),
        (ValueError("a bug"), 1, "maze-run: error: ValueError: a bug\n", True),
        (KeyboardInterrupt(), 130, "maze-run: interrupted\n", False),
        (SystemExit(3), 1, "maze-run: error: SystemExit: 3\n", True),
    ],
)
def test_errors_of_a_run_set_the_exit_code(
    maze_run: CommandLine,
    capfd: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
    has_traceback: bool,
) -> None:
    """Expected errors are one message; other exceptions are shown with their traceback."""
    maze_run.train = raises(error)
    assert maze_run(*PPO) == code
    text = capfd.readouterr().err
    assert text.endswith(message)
    assert ("Traceback" in text) is has_traceback
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # restored


def test_hydra_full_error_prints_the_traceback(
    maze_run: CommandLine, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HYDRA_FULL_ERROR=1 adds the traceback; a run without a best metric succeeds."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert maze_run(*PPO, "total_steps=x") == 2
    text = capfd.readouterr().err
    assert "Traceback" in text
    assert text.endswith("total_steps = 'x': expected an integer\n")
    maze_run.train = lambda config: float("nan")
    assert maze_run(*PPO) == 0


def test_rollout_settings_reach_the_runner(maze_run: CommandLine) -> None:
    """Training and evaluation use the same syntax; sweeps number the directories of their jobs."""
    assert maze_run(*RANDOM, "runner=local", "runner.n_workers=2", "n_episodes=1e2") == 0
    config = maze_run.configs[0]
    assert (config.policy, config.env) == ("random", EnvConfig(id="CartPole-v1"))
    assert (config.runner.n_workers, config.n_episodes, config.output_dir) == (2, 100, None)
    assert maze_run("-m", *RANDOM, "seed=0,100", "hydra.sweep.dir=s") == 0
    directories = [(config.seed, str(config.output_dir)) for config in maze_run.configs[1:]]
    assert directories == [(0, str(maze_run.folder / "s/0")), (100, str(maze_run.folder / "s/1"))]


def test_stored_rollout_file_repeats_the_rollout(maze_run: CommandLine) -> None:
    """Values of `rollout.yaml` can be overridden; a custom primary config may extend ours."""
    assert maze_run(*RANDOM, "runner=local", "seeds=[4,2]") == 0
    maze_run.write("old/rollout.yaml", yaml.safe_dump(config_to_dict(maze_run.configs[0])))
    assert maze_run("--config-dir", "old", *ROLLOUT) == 0
    assert maze_run.configs[1] == maze_run.configs[0]
    assert maze_run("--config-dir", "old", *ROLLOUT, "runner.n_workers=2") == 0
    assert maze_run.configs[2].runner.n_workers == 2
    text = "defaults: [rollout, {override env: CartPole-v1}, _self_]\npolicy: random\nseed: 3\n"
    maze_run.write("own/mine.yaml", text)
    assert maze_run("--config-dir", "own", "-cn", "mine", "n_episodes=2") == 0
    assert maze_run.configs[3].episode_seeds == [3, 4]


def test_rollout_job_returns_the_mean_return(maze_run: CommandLine) -> None:
    """Sweepers optimize the return value of a job."""
    assert roll_out({"policy": "random", "env": "CartPole-v1"}, None, ())() == 1.0


def test_sweep_runs_every_combination_in_numbered_directories(
    maze_run: CommandLine, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each job has a numbered directory below the sweep directory, named by its start time."""
    assert maze_run("-m", "+algorithm=a2c,ppo", "env=CartPole-v1", "seed=0,1") == 0
    chosen = [(config.algorithm.name, config.seed) for config in maze_run.configs]
    assert chosen == [("a2c", 0), ("a2c", 1), ("ppo", 0), ("ppo", 1)]
    folders = [str(config.run_dir) for config in maze_run.configs]
    assert [folder.rpartition("/")[2] for folder in folders] == ["0", "1", "2", "3"]
    pattern = (
        rf"{re.escape(str(maze_run.folder))}/outputs/sweeps/\d{{4}}-\d\d-\d\d_\d\d-\d\d-\d\d/0"
    )
    assert re.fullmatch(pattern, folders[0])
    lines = capfd.readouterr().out.splitlines()
    assert lines[1] == "maze-run: job 1: algorithm=a2c env=CartPole-v1 seed=1"


def test_sweep_uses_given_directories(maze_run: CommandLine) -> None:
    """`run_dir` and `hydra.sweep.dir` given by the user are used."""
    assert maze_run("-m", *PPO, "seed=0,1", "run_dir=a,b", "hydra.sweep.dir=s") == 0
    folders = [str(maze_run.folder / name) for name in "abab"]
    assert [config.run_dir for config in maze_run.configs] == folders
    assert "s/multirun.yaml" in maze_run.files()


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("a bug"), 1), (ConfigError("algorithm.lr", "wrong"), 2)]
)
def test_failed_job_does_not_stop_a_sweep(
    maze_run: CommandLine, capfd: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    """The error contains number and overrides of the job; the last line counts failed jobs."""

    def train(config: TrainConfig) -> float:
        if config.seed == 1:
            raise error
        Path(config.run_dir, "done").touch()
        return 1.0

    maze_run.train = train
    assert maze_run("-m", *PPO, "seed=0,1,2", "hydra.sweep.dir=s") == code
    assert [config.seed for config in maze_run.configs] == [0, 1, 2]
    text = capfd.readouterr().err
    assert "maze-run: error: job 1 (algorithm=ppo env=CartPole-v1 seed=1): " in text
    assert text.endswith("maze-run: 1 of 3 jobs failed\n")
    kept = ["s/.lock", "s/0", "s/0/done", "s/2", "s/2/done"]
    assert maze_run.files() == ["s", *kept, "s/jobs.csv", "s/multirun.yaml"]


@pytest.mark.parametrize(
    ("error", "code", "seeds"), [(ValueError("a bug"), 1, [0, 1]), (KeyboardInterrupt(), 130, [0])]
)
def test_failed_batch_does_not_stop_a_sweep(
    maze_run: CommandLine, error: BaseException, code: int, seeds: list[int]
) -> None:
    """After a failure in the first batch the second runs; after an interrupt it does not."""
    maze_run.train = raises(error)
    assert maze_run("-m", *PPO, "seed=0,1", "hydra.sweeper.max_batch_size=1") == code
    assert [config.seed for config in maze_run.configs] == seeds


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("seed=0,1", "algorithm.lr=0.1,-1"),
            "sweep: 2 of 4 jobs cannot run, so none was started:\n"
            "  job 1 (algorithm=ppo env=CartPole-v1 seed=0 algorithm.lr=-1): algorithm.lr = -1",
        ),
        (("seed=0,1", "hydra.sweep.dir=s", "run_dir=holds"), "job 1 (algorithm=ppo env=CartPole-v"),
        (
            ("experiment=glob(nothing*)",),
            "experiment = 'glob(nothing*)': matches no option, so the",
        ),
        (("seed=range(3,3)",), "seed = 'range(3,3)': has no values, so the sweep has no jobs"),
        (
            ("seed=0,1", "resume=auto"),
            "resume = 'auto': requires the directory of the sweep;",
        ),
    ],
)
def test_sweep_validates_all_jobs_before_the_first_starts(
    maze_run: CommandLine, capfd: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    """One message names all invalid jobs; no job starts, and no file is created."""
    maze_run.write("holds/metrics.csv", "")
    before = maze_run.files()
    assert maze_run("-m", *PPO, *argv) == 2
    output = capfd.readouterr()
    assert output.err.startswith("maze-run: error: ")
    assert output.err.count("maze-run:") == 1
    assert message in output.err
    assert output.out == ""
    assert (maze_run.configs, maze_run.files()) == ([], before)


@pytest.mark.parametrize("directory", ["a/b", "${env.id}/b"])
def test_hydra_run_dir_is_the_run_directory(maze_run: CommandLine, directory: str) -> None:
    """`hydra.run.dir` contains Hydra's files; `run_dir` has priority; errors leave no directory."""
    own = f"defaults: [train, _self_]\nhydra: {{run: {{dir: '{directory}'}}}}\n"
    maze_run.write("conf/mine.yaml", own)
    mine = ("--config-dir", "conf", "-cn", "mine", *PPO)
    before = maze_run.files()
    assert maze_run(*mine, "algorithm.lr=abc") == 2
    assert maze_run.files() == before
    files = ("hydra.output_subdir=.hydra", "hydra/job_logging=default")
    expected, other = (
        Path("a/b" if directory == "a/b" else "CartPole-v1/b").absolute(),
        Path("c").absolute(),
    )
    assert maze_run(*mine, *files) == maze_run(*mine, "run_dir=c") == 0
    assert [config.run_dir for config in maze_run.configs] == [str(expected), str(other)]
    assert (expected / ".hydra" / "overrides.yaml").is_file()
    assert list(expected.glob("*.log"))


@pytest.mark.parametrize("command", COMMANDS)
def test_primary_config_selects_the_command_by_name_or_keys(command: str) -> None:
    """A custom primary config is assigned to a command by its keys."""
    text = (shipped_root() / f"{command}.yaml").read_text()
    shipped = {key: value for key, value in yaml.safe_load(text).items() if key != "defaults"}
    assert command_of(command, {}) == command
    assert command_of("mine", {**shipped, "more": 1}) == command


@pytest.mark.parametrize("how", [("--config-dir", "own"), ("hydra.searchpath=[own]",)])
def test_user_config_directory_adds_options(maze_run: CommandLine, how: tuple[str, ...]) -> None:
    """A custom algorithm, environment and network require no registration."""
    maze_run.write("my_package_of_algorithms.py", OWN_ALGORITHM)
    target = "my_package_of_algorithms.MyConfig"
    maze_run.write("own/algorithm/mine.yaml", f"_target_: {target}\nbonus: 2\n")
    maze_run.write("own/env/CartPole-v1.yaml", "defaults: [Acrobot-v1, _self_]\nkwargs: {a: 1}\n")
    maze_run.write("own/model/wide.yaml", "hidden_sizes: [9]\n")
    choice = ("+algorithm=mine", "env=CartPole-v1", "model=wide", "algorithm.bonus=3")
    assert maze_run(*how, *choice) == 0
    config = maze_run.configs[0]
    assert type(config.algorithm).__name__ == "MyConfig"
    assert vars(config.algorithm)["bonus"] == 3.0
    assert (config.env.id, config.env.kwargs) == ("Acrobot-v1", {"a": 1})
    assert config.model.hidden_sizes == [9]


def test_errors_suggest_options_of_the_user_config_directory(
    maze_run: CommandLine, capfd: pytest.CaptureFixture[str]
) -> None:
    """Errors suggest the user's options, and name a broken file."""
    maze_run.write("own/algorithm/mine.yaml", "defaults: [ppo, _self_]\n")
    maze_run.write("own/algorithm/broken.yaml", "a: [1\n")
    maze_run.write("own/env/labyrinth.yaml", "_target_: my.Env\n")
    own = ("--config-dir", "own")
    assert maze_run(*own, "algorithm=mien") == 2
    assert "did you mean mine?" in capfd.readouterr().err
    assert maze_run(*own, "algorithm=ppo", "env=labirynth") == 2
    assert "did you mean labyrinth" in capfd.readouterr().err
    assert maze_run(*own, "algorithm=broken") == 2
    assert "broken.yaml" in capfd.readouterr().err
    assert maze_run("--help", *own) == 0
    assert "algorithm=mine" in capfd.readouterr().out


@pytest.mark.parametrize("line", ["/algorithm: pppo", "/algorithms: ppo", "algorithm: ppo"])
def test_invalid_override_in_a_file_is_reported_with_its_line(
    maze_run: CommandLine, capfd: pytest.CaptureFixture[str], line: str
) -> None:
    """The option does not exist, the group does not exist, or the slash is missing."""
    text = f"# @package _global_\ndefaults:\n  - override /env: CartPole-v1\n  - override {line}\n"
    maze_run.write("own/experiment/mine.yaml", text)
    assert maze_run("--config-dir", "own", "experiment=mine") == 2
    told = f"error: own/experiment/mine.yaml, line 4: {line.partition(':')[0].lstrip('/')}"
    assert told in capfd.readouterr().err


def test_user_primary_config_and_groups_extend_ours(
    maze_run: CommandLine, capfd: pytest.CaptureFixture[str]
) -> None:
    """A custom primary config extends ours and may have its own groups."""
    maze_run.write("own/mine.yaml", "defaults: [train, {task: easy}, _self_]\nseed: 7\n")
    for name, seed in (("easy", 1), ("hard", 2)):
        maze_run.write(f"own/task/{name}.yaml", f"# @package _global_\ntotal_steps: {seed}\n")
    maze_run.write("own/experiment/other.yaml", "defaults: [{override /algorithm: ppo}]\n")
    assert maze_run("--config-dir", "own", "experiment=other") == 2
    assert "begin the file with the line `# @package _global_`" in capfd.readouterr().err
    maze_run.write("own/experiment/plain.yaml", "algorithm:\n  lr: 0.1\n")
    assert maze_run("--config-dir", "own", *PPO, "experiment=plain") == 2
    assert "begin the file with the line `# @package _global_`" in capfd.readouterr().err
    assert maze_run("--config-dir", "own", "-cn", "mine", *PPO, "task=hard") == 0
    assert (maze_run.configs[0].seed, maze_run.configs[0].total_steps) == (7, 2)
    assert maze_run("--config-dir", "own", *PPO, "task=hard") == 2
    told = "task: not a group of the primary config (-cn); to add it, write + before the override"
    assert told in capfd.readouterr().err
    assert maze_run("--config-dir", "own", *PPO, "+task=hard") == 0
    assert maze_run.configs[1].total_steps == 2


def test_vars_define_values_for_interpolations(maze_run: CommandLine) -> None:
    """`vars` defines values for interpolations, in files and on the command line."""
    text = "# @package _global_\nvars: {size: 7}\nmodel: {hidden_sizes: ['${vars.size}']}\n"
    maze_run.write("own/experiment/mine.yaml", text)
    given = ("algorithm.lr=${vars.lr}", "vars.lr=0.25")
    assert maze_run("--config-dir", "own", *PPO, "experiment=mine", *given) == 0
    assert maze_run("--config-dir", "own", "-m", *PPO, "experiment=mine", *given, "seed=1,2") == 0
    for config in maze_run.configs:
        assert (config.algorithm.lr, config.model.hidden_sizes) == (0.25, [7])
    rollout = ("policy=random", "env=CartPole-v1", "n_episodes=${vars.n}", "vars.n=3")
    assert maze_run("rollout", *rollout) == 0
    assert maze_run.configs[-1].n_episodes == 3


@pytest.mark.parametrize(("name", "writer"), [("wandb", "WandbWriter"), ("mlflow", "MLflowWriter")])
def test_tracking_options_add_writers(maze_run: CommandLine, name: str, writer: str) -> None:
    """`tracking=wandb` and `tracking=mlflow` add a writer; other settings can be overridden."""
    assert maze_run(*PPO, f"tracking={name}", "tracking.csv=false") == 0
    tracking = maze_run.configs[0].tracking
    assert (tracking.writers, tracking.csv) == ([{"_target_": f"maze_train.{writer}"}], False)


@pytest.mark.slow
def test_hydra_verbose_prints_debug_messages(tmp_path: Path) -> None:
    """`hydra.verbose` shows debug messages of the named logger, or of all packages."""
    argv = [f"{key}={value}" for key, value in {**SMALL, **SHORT_PPO, "total_steps": 32}.items()]
    command = [sys.executable, "-m", "maze_train", *argv, "env=CartPole-v1"]
    command.append("hydra.verbose=maze_train.envs")
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(re.findall(r"\[maze_train\.(\w+)\]\[DEBUG\]", output.stderr)) == {"envs"}


def test_stored_config_repeats_the_run(
    maze_run: CommandLine, capfd: pytest.CaptureFixture[str]
) -> None:
    """A saved configuration is a primary config: values can be overridden, choices cannot."""
    assert maze_run(*PPO, "seed=3", "algorithm.lr={start: 1e-5, end: 0}") == 0
    text = OmegaConf.to_yaml(OmegaConf.create(config_to_dict(maze_run.configs[0])))
    maze_run.write("run/config.yaml", text)
    again = ("--config-dir", "run", "-cn", "config")
    assert maze_run(*again) == 0
    assert maze_run.configs[1] == maze_run.configs[0]
    assert maze_run(*again, "seed=4") == 0
    assert maze_run.configs[2].seed == 4
    assert maze_run(*again, "runner=local") == 2
    assert "runner: not a group of the primary config (-cn)" in capfd.readouterr().err
    assert maze_run.files() == ["run", "run/config.yaml"]


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("maze-run env=CartP", "env=CartPole-v0 env=CartPole-v1"),
        ("maze-run experiment=ppo/CartPole", "experiment=ppo/CartPole-v1"),
        ("maze-run algorithm=ppo algorithm.gae_", "algorithm.gae_lambda="),
        ("maze-run runner=lo", "runner=local"),
        ("maze-run -cn se", "search"),
        ("maze-run rollout n_epi", "n_episodes="),
        ("maze-run algorithm=ppo polic", "policies= policies_to_train="),
        ("maze-run --ver", "--version"),
        ("maze-run resume=ol", "resume=older/"),
        ("maze-run algorithm=pppo runner.", ""),
    ],
)
def test_shell_completion_lists_options_and_keys(
    maze_run: CommandLine,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    completed: str,
) -> None:
    """The completion function receives the matching words, and nothing else is printed."""
    monkeypatch.setenv("COMP_LINE", line)
    maze_run.write("older/config.yaml", "")
    assert maze_run("-sc", "query=bash") == 0
    output = capfd.readouterr()
    words = output.out.split()
    assert output.err == ""
    assert set(completed.split()) <= set(words) if completed else not words
    assert all(word.startswith(line.split(" ")[-1]) for word in words)


def test_completion_script_and_cfg_print_without_running(
    maze_run: CommandLine, capfd: pytest.CaptureFixture[str]
) -> None:
    """`-sc` prints the completion script and `--cfg` the settings; `--cfg` requires a value."""
    assert maze_run("-sc", "install=bash") == 0
    assert capfd.readouterr().out.strip().endswith("-F hydra_bash_completion maze-run")
    assert maze_run("--cfg", "hydra", "--resolve", *PPO) == 0
    assert maze_run("--cfg", "all", "--resolve", *PPO) == 0
    assert "subdir:" in capfd.readouterr().out
    assert maze_run("--cfg", "job", *PPO) == 0
    assert "gae_lambda: 0.95" in capfd.readouterr().out
    assert maze_run("-m", "--cfg", "job", "-p", "algorithm", *PPO[1:], "algorithm=ppo,a2c") == 0
    assert capfd.readouterr().out.count("# @package algorithm") == 2
    assert maze_run("--cfg", "job", *PPO, "seeed=1") == 2
    output = capfd.readouterr()
    assert "gae_lambda: 0.95" in output.out
    assert "seeed = 1: unknown" in output.err
    assert maze_run("--cfg") == 2
    assert "maze-run: error: " in capfd.readouterr().err
    assert maze_run.configs == []


def test_removed_working_directory_is_one_error(
    maze_run: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    """One message and exit code 2."""
    maze_run.folder.rmdir()
    assert maze_run(*PPO) == 2
    message = "working directory: does not exist; change to an existing directory (cd)"
    assert capsys.readouterr() == ("", f"maze-run: error: {message}\n")
