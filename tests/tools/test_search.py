"""Searches: study, trials and results, with runs that do not train."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from cases import everyday
from command_lines import CommandLine, maze_run

from maze_train.core.report import save_picture
from maze_train.tools.compare import compare_runs
from maze_train.tools.search import open_journal, open_study, search

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from matplotlib.figure import Figure

    from maze_train.config.train_config import TrainConfig

pytest.importorskip("optuna", reason="needs the extra optuna")

__all__ = ["maze_run"]

RETURN = "eval/episode_return_mean"
EPOCHS = 4
GAMMA = "{low: 0.5, high: 0.9}"
SEARCH = ("-cn", "search", "algorithm=ppo", "env=CartPole-v1", "study=s")
ONE = (*SEARCH, f"search.algorithm.gamma={GAMMA}")
FORK = multiprocessing.get_context("fork")
PATIENCE_S = 60.0


def gamma_of(config: TrainConfig) -> float:
    """Return the value of a run, which is its `gamma`."""
    return float(vars(config.algorithm)["gamma"])


class Runs:
    """Substitute for `TrainingRunner` with runs of four epochs that do not train."""

    def __init__(self) -> None:
        self.metric = RETURN
        self.value: Callable[[TrainConfig], float] = gamma_of
        self.after_epoch: Callable[[TrainConfig, int], None] = lambda config, epoch: None
        self.tests: dict[str, Any] = {}
        self.pictures: dict[str, Figure] = {}

    def save_picture(self, figure: Figure, path: Path, dpi: int) -> None:
        """Keep the figure instead of saving it, which is slow."""
        self.pictures[path.name] = figure

    def runner_of(self, config: TrainConfig, callbacks: list[Any]) -> SimpleNamespace:
        """Return a substitute for a runner."""
        summary = SimpleNamespace(as_dict=lambda: {"final_test": self.tests})
        return SimpleNamespace(
            run=lambda: SimpleNamespace(
                history=list(self._rows(config, callbacks)), summary=summary
            )
        )

    def _rows(self, config: TrainConfig, callbacks: list[Any]) -> Iterator[dict[str, float]]:
        """Yield the metrics of a run, whose value grows over the epochs."""
        assert config.run_dir is not None
        Path(config.run_dir).mkdir(parents=True, exist_ok=True)
        with (Path(config.run_dir) / "calls").open("a") as file:
            file.write(f"{config.seed} {config.resume}\n")
        print(f"seed {config.seed}")
        run = SimpleNamespace(stop_reason="", progress=SimpleNamespace(fraction=0.0))
        run.stop = lambda reason: setattr(run, "stop_reason", reason)
        for callback in callbacks:
            callback.on_run_start(run)
        for epoch in range(1, EPOCHS + 1):
            run.metrics = {self.metric: self.value(config) * epoch / EPOCHS}
            run.progress.fraction = epoch / EPOCHS
            for callback in callbacks:
                callback.on_epoch_end(run)
            yield {"epoch": float(epoch), **run.metrics}
            self.after_epoch(config, epoch)
            if run.stop_reason:
                return


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Replace `TrainingRunner` by runs that do not train."""
    found = Runs()
    monkeypatch.setattr("maze_train.tools.search.TrainingRunner", found.runner_of)
    monkeypatch.setattr("maze_train.core.report.save_picture", found.save_picture)
    return found


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Return the rows of trials.csv."""
    with (folder / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def column(folder: Path, name: str) -> list[str]:
    """Return one column of trials.csv."""
    return [row[name] for row in rows_of(folder)]


def test_search_prints_and_saves_the_best_settings(
    maze_run: CommandLine, runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    """The best settings are printed as a command and saved; output of trials goes to their logs."""
    given = ("total_steps=1000", "n_trials=4", "n_jobs=2", "algorithm.gamma=0.7")
    assert maze_run(*ONE, *given) == 0
    output = capfd.readouterr()
    study = maze_run.folder / "s"
    values = [float(text) for text in column(study, "value")]
    assert column(study, "state") == ["complete"] * 4
    assert column(study, "algorithm.gamma") == [repr(value) for value in values]
    assert values[0] == 0.7  # the configured settings
    assert 0.5 <= min(values) < max(values) <= 0.9
    best = yaml.safe_load((study / "best.yaml").read_text())
    assert best == {"algorithm.gamma": max(values)}
    line = "maze-run algorithm=ppo env=CartPole-v1 total_steps=1000 "
    assert f"\n{line}algorithm.gamma={max(values)}\n\nresults: {study}\n" in output.out
    assert line in (study / "trials.md").read_text()
    number = values.index(max(values))
    assert f"4 trials (4 complete); best: trial {number}, {RETURN}" in output.out
    assert "maze-run: trial 0: algorithm.gamma=0.7\n" in output.out
    save_picture(runs.pictures["search.png"], study / "x.png")
    assert (study / "x.png").read_bytes().startswith(b"\x89PNG")
    assert (study / "0/job.log").is_file()


def test_search_continues_if_tables_cannot_be_written(
    maze_run: CommandLine, runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    """The search continues with a warning; a later search writes the tables from the journal."""
    table = maze_run.folder / "s/trials.csv"
    table.mkdir(parents=True)
    assert maze_run(*ONE, "n_trials=3", "n_jobs=1") == 2
    error = capfd.readouterr().err
    assert error.count("the search continues") == 3
    assert "maze-run: error: study = " in error
    table.rmdir()
    assert maze_run(*ONE, "n_trials=4", "n_jobs=1") == 0
    assert column(maze_run.folder / "s", "state") == ["complete"] * 4


@pytest.mark.exhaustive
def test_same_command_continues_a_study(
    maze_run: CommandLine, runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    """Sequential trials continue as if never stopped; changed settings raise an error."""
    sampler = "sampler={name: tpe, n_startup_trials: 2}"
    for study, n_trials in (("whole", 6), ("s", 3), ("s", 6), ("s", 6)):
        assert maze_run(*ONE, sampler, f"study={study}", f"n_trials={n_trials}") == 0
    capfd.readouterr()
    names = ("value", "state", "algorithm.gamma")
    folders = [maze_run.folder / name for name in ("s", "whole")]
    first, second = ([column(folder, name) for name in names] for folder in folders)
    assert first == second
    assert len(set(first[2])) == 6
    calls = [folder / f"{i}/calls" for folder in folders for i in range(6)]
    assert {path.read_text() for path in calls} == {"0 auto\n"}
    for change, message in (
        (("total_steps=7",), "total_steps = 7: the study in "),
        (("search.algorithm.gamma.low=0.1",), "search.algorithm.gamma.low = 0.1: the study in"),
        (("search.algorithm.lr=[1e-3]",), "search.algorithm.lr.log = False: the study in"),
        (("n_seeds=2",), "n_seeds = 2: the study in"),
        (("value=final",), "value = 'final': the study in"),
        (("mode=min",), "mode = 'min': the study in"),
    ):
        assert maze_run(*ONE, *change) == 2
        assert f"maze-run: error: {message}" in capfd.readouterr().err
    assert maze_run(*ONE, "tracking.csv=false", "checkpoint.interval=3", "n_trials=6") == 0
    told = capfd.readouterr().err
    assert "note: trials always write metrics.csv, since" in told
    assert "has 6 trials, and is complete; increase n_trials" in told


def test_trial_below_the_median_is_pruned(
    maze_run: CommandLine, runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    """A trial below the median of others at the same progress is pruned, counted and displayed."""
    pruner = "pruner={name: median, n_startup_trials: 2, n_warmup_steps: 0}"
    runs.value = lambda config: 1.0 if gamma_of(config) == 0.99 else -gamma_of(config)
    grid = "search.algorithm.gamma=[0.99,0.5]"
    assert maze_run(*SEARCH, grid, pruner, "sampler=random", "n_trials=12") == 0
    output = capfd.readouterr().out
    rows = rows_of(maze_run.folder / "s")
    pruned = [row for row in rows if row["state"] == "pruned"]
    assert {row["algorithm.gamma"] for row in pruned} == {"0.5"}
    assert {(row["done_percent"], row["value"]) for row in pruned} == {("25", "-0.125")}
    assert f"trial {pruned[0]['trial']}: pruned at 25 % after" in output
    assert f"({12 - len(pruned)} complete, {len(pruned)} pruned)" in output


@pytest.mark.parametrize("everything", everyday(1, [False, True]))
def test_failed_trial_does_not_stop_the_search(
    maze_run: CommandLine, runs: Runs, capfd: pytest.CaptureFixture[str], everything: bool
) -> None:
    """A failed trial is reported and does not stop the search, unless all trials fail."""

    def value(config: TrainConfig) -> float:
        if everything or gamma_of(config) == 0.5:
            raise ValueError("a bug")
        return float("nan") if gamma_of(config) == 0.6 else 1.0

    runs.value = value
    command = (*SEARCH, "search.algorithm.gamma=[0.5,0.6,0.99]", "sampler=random", "n_trials=8")
    assert maze_run(*command) == int(everything)
    output = capfd.readouterr()
    rows = rows_of(maze_run.folder / "s")
    errors = {row["algorithm.gamma"]: row["error"] for row in rows}
    if everything:
        assert {row["state"] for row in rows} == {"failed"}
        assert output.err.endswith("error: all 8 trials failed; last error: ValueError: a bug\n")
        return
    assert errors == {
        "0.5": "ValueError: a bug",
        "0.6": f"no finite {RETURN}; metrics.csv has epoch, {RETURN}",
        "0.99": "",
    }
    number = [row["algorithm.gamma"] for row in rows].index("0.5")
    assert f"error: trial {number} (algorithm.gamma=0.5): ValueError: a bug\n" in output.err
    assert "in value\n" in (maze_run.folder / f"s/{number}/job.log").read_text()
    assert "best: trial 0" in output.out


def test_interrupted_search_continues_its_trials(
    maze_run: CommandLine, runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same trials resume from their checkpoints, in the same directories."""
    both = FORK.Barrier(2)

    def after_epoch(config: TrainConfig, epoch: int) -> None:
        if epoch == 2 and not (maze_run.folder / "again").exists():
            if both.wait(PATIENCE_S) == 0:
                os.kill(os.getppid(), signal.SIGINT)
            while True:
                time.sleep(0.02)  # idle until the signal

    runs.after_epoch = after_epoch
    command = (*ONE, "n_trials=3", "n_jobs=2")
    assert maze_run(*command) == 130
    study = maze_run.folder / "s"
    assert "run the same command again to resume the study in" in capfd.readouterr().err
    assert column(study, "state") == ["interrupted"] * 2
    gammas = column(study, "algorithm.gamma")
    seconds = [float(text) for text in column(study, "seconds")]
    maze_run.write("again", "")
    time.sleep(1.0)
    began = time.monotonic()
    assert maze_run(*command) == 0
    took = time.monotonic() - began
    pairs = zip(seconds, map(float, column(study, "seconds")), strict=False)
    assert all(0.0 < before < after < before + took for before, after in pairs)
    assert column(study, "state") == ["complete"] * 3
    assert column(study, "algorithm.gamma")[:2] == gammas
    assert (study / "0/job.log").read_text().count("seed 0\n") == 2
    calls = [(study / f"{i}/calls").read_text().count("0 auto\n") for i in range(3)]
    assert calls == [2, 2, 1]


def test_killed_trials_count_as_failed(maze_run: CommandLine, runs: Runs) -> None:
    """Trials of a killed worker, and a trial without sampled settings, count as failed."""

    def after_epoch(config: TrainConfig, epoch: int) -> None:
        if config.run_dir == str(maze_run.folder / "s/1"):
            os.kill(os.getpid(), signal.SIGKILL)

    runs.after_epoch = after_epoch
    (maze_run.folder / "s").mkdir()
    open_study(open_journal(maze_run.folder / "s"), "max").ask()
    assert maze_run(*ONE, "n_trials=3") == 0
    errors = ["the settings were not sampled", "ended by SIGKILL", ""]
    assert column(maze_run.folder / "s", "error") == errors


@pytest.mark.exhaustive
def test_first_trial_uses_the_configured_settings(
    maze_run: CommandLine, runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first trial uses the configured settings if enabled and if they lie in the ranges."""
    told = "note: no trial uses the configured settings: algorithm.gamma = 0.99: outside"
    for study, settings, is_told in (
        ("a", ("algorithm.gamma=0.7",), False),
        ("b", ("algorithm.gamma=0.7", "begin_with_given=false"), False),
        ("c", (), True),
    ):
        assert maze_run(*ONE, *settings, f"study={study}", "n_trials=1") == 0
        assert (column(maze_run.folder / study, "algorithm.gamma") == ["0.7"]) is (study == "a")
        assert (told in capfd.readouterr().err) is is_told


def test_search_minimizes_validation_losses(maze_run: CommandLine, runs: Runs) -> None:
    """Behavioral cloning without an environment minimises the validation loss."""
    runs.metric = "validation/loss"
    runs.value = lambda config: float(vars(config.algorithm)["lr"])
    cloning = ("algorithm=bc", "runner.dataset=recorded", "study=s", "value=final", "pruner=nop")
    lr = "search.algorithm.lr={low: 0.1, high: 0.3}"
    assert maze_run("-cn", "search", *cloning, lr, "n_trials=3") == 0
    values = [float(text) for text in column(maze_run.folder / "s", "value")]
    assert len(set(values)) == 3
    found = yaml.safe_load((maze_run.folder / "s/best.yaml").read_text())
    assert found == {"algorithm.lr": min(values)}


def test_trial_value_is_the_test_of_the_best_policy(maze_run: CommandLine, runs: Runs) -> None:
    """Runs are tested in episodes that selection did not use; a search sets their number."""
    runs.tests = {"best": {"episode_return_mean": 3.0}, "last": {"episode_return_mean": 9.0}}
    runs.after_epoch = lambda config, epoch: print(f"{config.evaluation.final_episodes} tests")
    ranges = {"algorithm.gamma": [0.9, 0.99]}
    result = search("CartPole-v1", "ppo", ranges, n_trials=1, total_steps=100, study="s")
    assert result.best_value == 3.0
    assert "20 tests\n" in (maze_run.folder / "s/0/job.log").read_text()


def test_trial_value_is_the_mean_over_seeds(maze_run: CommandLine, runs: Runs) -> None:
    """Each seed is a run below the directory of the trial; the value is their mean."""
    runs.value = lambda config: float(config.seed or 0)
    assert maze_run(*ONE, "n_trials=2", "n_seeds=3", "seed=4") == 0
    study = maze_run.folder / "s"
    assert column(study, "value") == ["5.0", "5.0"]
    for trial, seed in ((0, 4), (0, 5), (1, 6)):
        assert (study / f"{trial}/seed_{seed}/calls").read_text() == f"{seed} auto\n"


@pytest.mark.parametrize(
    ("settings", "best", "value"),
    everyday(
        2,
        [
            ((), "0.9", 0.9),
            (("mode=min", "value=final"), "0.5", 0.5),
            (("mode=min", "value=best"), "0.5", 0.125),
            (("evaluation.mode=min", "value=best"), "0.5", 0.125),
            ((f"metric={RETURN}", "evaluation.mode=min"), "0.9", 0.9),
            (("metric=epoch", "value=final"), "0.9", 4.0),
        ],
        are_rows=True,
    ),
)
def test_search_mode_and_value_select_the_best_trial(
    maze_run: CommandLine, runs: Runs, settings: tuple[str, ...], best: str, value: float
) -> None:
    """The default metric selects the policies; the value of a trial is the test, best or final."""
    ranges = ("search.algorithm.gamma=[0.5,0.9]", "sampler=random", "n_trials=6", "pruner=nop")
    assert maze_run(*SEARCH, *ranges, *settings) == 0
    study = maze_run.folder / "s"
    found = yaml.safe_load((study / "best.yaml").read_text())
    number = (study / "best.yaml").read_text().split()[2]
    assert float(column(study, "value")[int(number)]) == value
    if "metric=epoch" not in settings:
        assert found == {"algorithm.gamma": float(best)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("sampler=tp", "sampler = 'tp': unknown; did you mean tpe? allowed: bruteforce, cmaes"),
        ("sampler={name: tpe, seeds: 1}", "sampler = {'name': 'tpe', 'seeds': 1}: "),
        ("pruner=medin", "pruner = 'medin': unknown; did you mean median?"),
        ("pruner={name: threshold}", "pruner = {'name': 'threshold'}: "),
        ("algorithm.lr=x", "algorithm.lr = 'x': "),
    ],
)
def test_invalid_search_settings_raise_before_the_first_trial(
    maze_run: CommandLine, capfd: pytest.CaptureFixture[str], wrong: str, message: str
) -> None:
    """One message, exit code 2, and no files."""
    assert maze_run(*ONE, wrong) == 2
    assert f"maze-run: error: {message}" in capfd.readouterr().err
    assert maze_run.files() == []


def test_single_ranges_of_a_file_can_be_overridden(maze_run: CommandLine, runs: Runs) -> None:
    """`search=<name>` selects ranges, also from a user's folder; single ranges can be overridden.

    The printed command with the best settings omits the search.
    """
    ranges = "algorithm: {gamma: [0.9], lr: [0.1], max_grad_norm: [1]}\n"
    maze_run.write("own/search/mine.yaml", ranges)
    own = ("--config-dir", "own", "search=mine")
    changes = ("search.algorithm.lr=null", "search.model.hidden_sizes=[[8,8]]")
    assert maze_run(*SEARCH, *own, *changes, "n_trials=1", "value=final") == 0
    text = (maze_run.folder / "s/best.yaml").read_text()
    gamma, norm = ("algorithm.gamma", 0.9), ("algorithm.max_grad_norm", 1)
    assert yaml.safe_load(text) == dict([gamma, norm, ("model.hidden_sizes", [8, 8])])
    settings = "algorithm.gamma=0.9 algorithm.max_grad_norm=1 'model.hidden_sizes=[8, 8]'"
    command = text.splitlines()[1].removeprefix("# maze-run algorithm=ppo env=CartPole-v1 ")
    assert command == settings


def test_search_from_python_runs_the_same_study(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`search` runs the same study; its directory is named after environment and algorithm."""
    monkeypatch.chdir(tmp_path)
    ranges = {"algorithm.gamma": {"low": 0.5, "high": 0.9}}
    result = search("CartPole-v1", "ppo", ranges, n_trials=3, **{"algorithm.gamma": 0.9})
    assert result.study == tmp_path / "outputs/studies/CartPole-v1-ppo"
    assert result.best == {"algorithm.gamma": 0.9}
    assert (result.best_trial, result.best_value) == (0, 0.9)
    assert [row["state"] for row in result.rows] == ["complete"] * 3
    assert "best: trial 0" in str(result)
    assert result.line == "maze-run env=CartPole-v1 algorithm=ppo algorithm.gamma=0.9"


def test_search_of_zero_sum_games_uses_the_selection_metric(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials of zero-sum games are compared by the metric that selects their policies."""
    monkeypatch.chdir(tmp_path)
    runs.metric = "eval/vs_random/return_mean"
    ranges = {"algorithm.gamma": {"low": 0.5, "high": 0.9}}
    foes = {"evaluation.opponents": {"random": "random"}}
    game = {"_target_": "agent_envs.Rochambeau"}
    result = search(game, "ppo", ranges, n_trials=1, study="s", **foes)
    assert (result.metric, result.rows[0]["state"]) == (runs.metric, "complete")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_parallel_trials_equal_sequential_trials(
    tmp_path: Path,
) -> None:
    """Values do not depend on `n_jobs`; pruned trials are ordinary runs that can be compared."""
    ranges = {"algorithm.lr": {"low": 1e-4, "high": 1e-1, "log": True}}
    settings: dict[str, Any] = {
        "env": "CartPole-v1",
        "ranges": ranges,
        "n_trials": 4,
        "sampler": "random",
        "pruner": {"name": "threshold", "lower": 1e6, "n_warmup_steps": 50},
        "begin_with_given": False,
        "total_steps": 1000,
        "evaluation": {"n_episodes": 2, "concurrency": 1},
        "algorithm.n_rollout_steps": 32,
        "algorithm.epoch_length": 1,
    }
    found = [search(**settings, study=str(tmp_path / f"{n}"), n_jobs=n) for n in (1, 2)]
    names = ("trial", "state", "value", "algorithm.lr", "done_percent")
    first, second = ([[row[name] for name in names] for row in each.rows] for each in found)
    assert first == second
    assert {row["state"] for row in found[0].rows} == {"pruned"}
    summary = json.loads((tmp_path / "2/0/summary.json").read_text())
    assert summary["stop_reason"] == "pruned at 50 %"
    comparison = compare_runs(tmp_path / "2", tmp_path / "c")
    assert comparison.settings == ["algorithm.lr"]
    assert len(comparison.rows) == 4
    assert comparison.left_out == []
