"""Comparison of runs, with run directories created by the tests."""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from typing import TYPE_CHECKING, Any

import matplotlib.image
import pytest
import yaml
from run_files import RETURN, write_run

from maze_train import Comparison, ConfigError, RunDirectoryError, compare_runs
from maze_train.core.report import markdown_table, save_picture
from maze_train.tools.compare import N_POINTS, draw_comparison
from maze_train.tools.runs import algorithm_name, read_run, task_name
from maze_train.workers.job_pool import JobRecord, read_jobs, write_jobs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.figure import Figure


@pytest.fixture(autouse=True)
def pictures(monkeypatch: pytest.MonkeyPatch) -> dict[Path, Figure]:
    """Return the drawn figures by path; nothing is saved, since saving is slow."""
    found: dict[Path, Figure] = {}

    def keep(figure: Figure, path: Path, dpi: int) -> None:
        found[path] = figure

    monkeypatch.setattr("maze_train.core.report.save_picture", keep)
    return found


def compared(folder: Path, *names: str, **settings: Any) -> Comparison:
    """Compare the runs in directories below a folder, with few bootstrap samples."""
    runs = [str(folder / name) for name in names or [""]]
    return compare_runs(runs, folder / "out", n_resamples=100, **settings)


def write_runs(folder: Path, *curves: Sequence[float], **settings: Any) -> None:
    """Write runs with the seeds 0, 1, ..."""
    for seed, values in enumerate(curves):
        write_run(folder / str(seed), values, seed=seed, **settings)


def figure_of(folder: Path, **labels: str) -> Figure:
    """Return the figure of a comparison, with labels by algorithm."""
    drawn = {(name,): label for name, label in (labels or {"ppo": "PPO"}).items()}
    return draw_comparison(compared(folder).groups, drawn, RETURN, "steps")


def table(folder: Path) -> list[dict[str, str]]:
    """Return the rows of the CSV file."""
    lines = (folder / "out/comparison.csv").read_text().splitlines()
    return list(csv.DictReader(lines))


def test_group_row_has_final_best_and_threshold_values(tmp_path: Path) -> None:
    """Final and best values over seeds, and steps and time until a threshold is reached."""
    write_runs(tmp_path, (1, 5, 3), (2, 4, 4), (0, 1, 2))
    (row,) = compared(tmp_path, threshold=4).rows
    expected = {"environment": "CartPole-v1", "algorithm": "ppo", "runs": 3, "seeds": "0 1 2"}
    expected |= {"env_steps": 3e3, "wall_time_s": 30, "final_mean": 3.0, "final_iqm": 3.0}
    expected |= {"final_low": 2.0, "final_high": 4.0, "best_mean": pytest.approx(11 / 3)}
    expected |= {"reached": 2, "steps_to_threshold": 2e3, "seconds_to_threshold": 20}
    assert {key: row[key] for key in expected} == expected
    (row,) = compared(tmp_path, threshold=1, mode="min").rows
    assert row["best_mean"] == pytest.approx(1.0)
    assert (row["reached"], row["steps_to_threshold"]) == (2, 1e3)


def cut(run: Path, first: int = 1, column: str = "") -> None:
    """Remove the rows before `first`, and the values of a column."""
    head, *rows = (run / "metrics.csv").read_text().splitlines()
    number = head.split(",").index(column) if column else -1
    kept = [row.split(",") for row in rows[first - 1 :]]
    lines = [",".join("" if i == number else x for i, x in enumerate(row)) for row in kept]
    (run / "metrics.csv").write_text("\n".join([head, *lines, ""]))


def test_runs_of_different_lengths_are_compared(tmp_path: Path) -> None:
    """Medians of two runs lie between them; non-finite values are ignored."""
    write_runs(tmp_path, [9.0], [math.nan, 1.0, 9.0, math.nan])
    (row,) = compared(tmp_path, threshold=5).rows
    assert (row["env_steps"], row["wall_time_s"]) == (2e3, 20)
    assert (row["steps_to_threshold"], row["seconds_to_threshold"]) == (2e3, 20)
    assert (row["final_mean"], row["best_mean"]) == (9.0, 9.0)


def test_threshold_missed_by_half_of_the_runs_has_no_median(tmp_path: Path) -> None:
    """The median is NaN, and the number of runs that reached the threshold is reported."""
    write_runs(tmp_path, [1.0], [9.0])
    comparison = compared(tmp_path, threshold=5)
    assert comparison.rows[0]["reached"] == 1
    assert math.isnan(comparison.rows[0]["steps_to_threshold"])
    (shown,) = comparison.sections()["CartPole-v1"]
    assert [shown[name] for name in ("reached 5", "at step", "after")] == ["1 of 2", "-", "-"]
    (line,) = table(tmp_path)
    assert line["steps_to_threshold"] == "NaN"


def test_differing_settings_are_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings that differ within an algorithm are columns, except seeds and settings of output."""
    for i, lr in enumerate((0.0123456, 0.001, 0.0123456)):
        written = {"tracking__plot": i == 0, "checkpoint__interval": i}
        write_run(tmp_path / f"a{i}", [i], seed=i, algorithm__lr=lr, **written)
    write_run(tmp_path / "b", [5], algorithm="a2c", total_steps=7)
    comparison = compared(tmp_path)
    assert comparison.settings == ["algorithm.lr"]
    found = [(row["algorithm"], row["algorithm.lr"], row["runs"]) for row in comparison.rows]
    assert found == [("a2c", "0.0007", 1), ("ppo", "0.001", 1), ("ppo", "0.0123456", 2)]
    assert "  ppo             0.01235     2" in str(comparison)
    assert len(compared(tmp_path, ignore=["algorithm"]).groups) == 2
    capsys.readouterr()
    assert len(compared(tmp_path, ignore=["algorithm.l", "env"]).groups) == 3
    text = "warning: ignore: no run has a setting 'algorithm.l'; did you mean algorithm.lr?\n"
    assert capsys.readouterr().err == text
    rows = compared(tmp_path, bounds={"CartPole-v1": [0, 1]}).rows
    assert [row["algorithm.lr"] for row in rows[3:]] == ["0.0007", "0.001", "0.0123456"]
    assert markdown_table([{"a": "x|y"}])[-1] == "| x\\|y |"


@pytest.mark.exhaustive
def test_bounds_add_a_table_over_all_environments(tmp_path: Path) -> None:
    """One table per environment, and with bounds one for algorithms that ran in all of them."""
    write_runs(tmp_path / "c", [100], [200])
    write_runs(tmp_path / "p", [-100], [-200], env="Pendulum-v1")
    write_run(tmp_path / "a", [1.0], algorithm="a2c")
    bounds = {"CartPole-v1": [0, 200], "Pendulum-v1": [-400, 0]}
    comparison = compared(tmp_path, bounds=bounds)
    head = [(row["environment"], row["algorithm"]) for row in comparison.rows]
    in_one = [("CartPole-v1", "a2c"), ("CartPole-v1", "ppo"), ("Pendulum-v1", "ppo")]
    assert head == [*in_one, ("all environments", "ppo")]
    row = comparison.rows[-1]
    assert (row["runs"], row["final_mean"]) == (4, (0.5 + 1.0 + 0.75 + 0.5) / 4)
    assert list(comparison.sections()) == ["CartPole-v1", "Pendulum-v1", "all environments"]
    reached = [row.get("reached") for row in compared(tmp_path, threshold={"CartPole-v1": 50}).rows]
    assert reached == [0, 2, None]
    compared(tmp_path, threshold={"Pendulum-v1": -150})
    assert [row["reached"] for row in table(tmp_path)] == ["", "", "1"]
    for wrong in ({"bounds": {"X": [0, 1]}}, {"threshold": {"X": 1}}):
        with pytest.raises(ConfigError, match=r" = 'X': no run has this environment; "):
            compared(tmp_path, **wrong)


def test_bounds_of_a_loss_normalize_the_smallest_value(tmp_path: Path) -> None:
    """If smaller is better, the best value is the smallest, which normalizes closest to 1."""
    write_run(tmp_path / "a", [4.0, 1.0, 2.0])
    (_, row) = compared(tmp_path, mode="min", bounds={"CartPole-v1": [5, 0]}).rows
    assert (row["best_mean"], row["final_mean"]) == (0.8, 0.6)


def test_excluded_runs_are_listed_with_reason(tmp_path: Path) -> None:
    """Each excluded run is listed with its reason; `unfinished=true` includes runs with metrics."""
    write_run(tmp_path / "good", [1.0])
    write_run(tmp_path / "failed", [2.0], stop_reason="error", seed=1)
    write_run(tmp_path / "stopped", [3.0], stop_reason="interrupted", seed=2)
    write_run(tmp_path / "running", [4.0], stop_reason=None, seed=3)
    write_run(tmp_path / "longer", [1.0, 3.0], updates=1, seed=4)
    write_run(tmp_path / "empty", [])
    write_run(tmp_path / "other", [1.0], metric="train/loss")
    (write_run(tmp_path / "damaged", [1.0]) / "metrics.csv").write_text("epoch,env_steps\n1,x\n")
    (write_run(tmp_path / "strange", [1.0]) / "config.yaml").write_text("seed: 1\n")
    comparison = compared(tmp_path)
    reasons = {left.name.rpartition("/")[2]: left.reason for left in comparison.left_out}
    assert reasons.pop("damaged").endswith("could not convert string to float: 'x'")
    assert reasons == {
        "failed": "failed (stop_reason error)",
        "stopped": "was interrupted",
        "running": "has not ended, or was killed (no summary.json)",
        "longer": "was resumed, and is still running or was killed",
        "empty": "metrics.csv is missing",
        "other": "metrics.csv has no eval/episode_return_mean",
        "strange": "config.yaml is not the configuration of a run: 'algorithm'",
    }
    for text in (str(comparison), comparison.markdown()):
        assert all(reason in text for reason in reasons.values())
    assert [row["runs"] for row in comparison.rows] == [1]
    assert [row["seeds"] for row in compared(tmp_path, unfinished=True).rows] == ["0 1 4 3 2"]
    message = r"none of these runs can be compared:\n.* is missing"
    for unfinished, remedy in ((False, r"\nset unfinished=true .*"), (True, "")):
        with pytest.raises(RunDirectoryError, match=f"{message}{remedy}$"):
            compared(tmp_path, "empty", unfinished=unfinished)


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("summary.json", "[" * 100_000, "summary.json is damaged: "),
        ("summary.json", "[]", "summary.json is damaged: "),
        (
            "config.yaml",
            "evaluation: {metric: [1]}",
            "config.yaml is not the configuration of a run: ",
        ),
        ("metrics.csv", f"epoch,{RETURN}\n1,1\n", "metrics.csv is damaged: a row has no env_steps"),
        ("metrics.csv", f"env_steps,{RETURN}\nnan,1\n", "metrics.csv is damaged: a row has no"),
        ("metrics.csv", f"env_steps,{RETURN}\n1,{'1' * 400}\n", f"metrics.csv has no {RETURN}"),
    ],
)
def test_damaged_run_is_excluded_with_reason(
    tmp_path: Path, file: str, text: str, reason: str
) -> None:
    """A damaged run is listed with the reason, and the others are compared."""
    write_run(tmp_path / "good", [1.0])
    bad = write_run(tmp_path / "bad", [1.0], seed=1)
    before = (bad / file).read_text() if file == "config.yaml" else ""
    if before:
        sections = yaml.safe_load(before) | yaml.safe_load(text)
        text = yaml.safe_dump(sections)
    (bad / file).write_text(text)
    comparison = compared(tmp_path)
    assert [row["seeds"] for row in comparison.rows] == ["0"]
    (left,) = comparison.left_out
    assert left.name == str(bad)
    assert left.reason.removeprefix(f"{bad}/").startswith(reason)


def write_starts(folder: Path, *starts: object) -> None:
    """Write runs, and the recorded start of each."""
    write_runs(folder, *[[float(seed)] for seed in range(len(starts))])
    for seed, start in enumerate(starts):
        content = json.dumps({"starts": [{}, start]})
        (folder / str(seed) / "environment.json").write_text(content)


def code(diff: object, directory: object = "/code/agent", commit: object = "a1" * 20) -> Any:
    """Return a recorded start with one repository."""
    found = {"directory": directory, "commit": commit, "diff": diff}
    return {"python": "3.11.7", "packages": {"torch": "2.6"}, "repositories": [found]}


def test_differing_versions_and_commits_are_listed(tmp_path: Path) -> None:
    """Differing versions and commits are listed; `+` marks uncommitted changes, `?` unknown."""
    newer = {**code(""), "packages": {"torch": "2.7"}}
    write_starts(tmp_path, code(""), newer, code("-old"), code("-new"), code(None))
    text = str(compared(tmp_path))
    same = re.escape("commit of agent: a1a1a1a1a1 (runs: 2), ")
    assert re.search(rf"\n{same}(a1a1a1a1a1\+[0-9a-f]{{6}} \(runs: 1\), ){{2}}a1a1a1a1a1\?", text)
    assert "torch: 2.6 (runs: 4), 2.7 (runs: 1)" in text
    assert "python" not in text


@pytest.mark.parametrize(
    "start",
    [
        None, [], "text", *({**code(3), key: value} for key, value in [
            ("python", [3]), ("packages", ["torch"]), ("packages", {"torch": {}}),
            ("repositories", {"a": 1}), ("repositories", [3, {}, []]),
        ]), code(3), code("", 3), code("", "/agent", 3), code("", "/agent", None), code({"-": "+"}),
    ],
)  # fmt: skip
def test_invalid_recorded_code_is_ignored(start: object, tmp_path: Path) -> None:
    """Values of other types are ignored, and the other values are still compared."""
    write_starts(tmp_path, start, code(""), {**code("-old"), "python": "3.12.1"})
    (write_run(tmp_path / "damaged", [9.0], seed=9) / "environment.json").write_text("{")
    text = str(compared(tmp_path))
    assert "commit of agent: a1a1a1a1a1 (runs: 1), a1a1a1a1a1+" in text
    assert "\npython: 3.1" in text


def test_comparison_escapes_unprintable_names(tmp_path: Path) -> None:
    """Unprintable characters are escaped, and `$` does not start a formula."""
    write_run(tmp_path / "a", [1.0], env="\x1b[2J$x_{$-v0")
    assert "\\x1b[2J$x_{$-v0\n" in str(compared(tmp_path))


def test_run_without_summary_setting_is_included(tmp_path: Path) -> None:
    """A run that writes no summary by its settings is included."""
    write_run(tmp_path / "a", [1.0], stop_reason=None, tracking__summary=False)
    assert compared(tmp_path).left_out == []


@pytest.mark.parametrize(
    ("target", "algorithm"),
    [("maze_train.algorithms.ppo.config.PPO", "ppo"), ("my_package.mine.Own", "Own")],
)
@pytest.mark.parametrize(
    ("env", "dataset", "task"),
    [
        ({"id": "CartPole-v1"}, "data/x", "CartPole-v1"),
        ({"_target_": "my_envs.Maze"}, None, "Maze"),
        ({"id": None}, "data/x", "data/x"),
        ({"id": None}, {"_target_": "my_data.recorded", "key": 1}, "my_data.recorded"),
    ],
)
def test_run_names_come_from_algorithm_and_task(
    target: str, algorithm: str, env: Any, dataset: Any, task: str
) -> None:
    """Names of the algorithm, and of the environment or dataset."""
    assert algorithm_name({"_target_": target}) == algorithm
    assert task_name({"env": env, "runner": {"dataset": dataset}}) == task


def test_runs_are_found_by_directory_parent_or_pattern(tmp_path: Path) -> None:
    """Paths may be runs, their parent folders or patterns; each run counts once."""
    for seed, name in enumerate(("s/0", "s/1", "s/10", "t/u/2")):
        write_run(tmp_path / name, [1.0], seed=seed)
    write_run(tmp_path / "s/0/best", [1.0], seed=9)

    def seeds(*names: str) -> str:
        return compared(tmp_path, *names).rows[0]["seeds"]

    assert seeds("s") == "0 1 2"
    assert seeds("s/10", "s", "s/*") == "2 0 1"
    assert seeds("t", "s/1*") == "3 1 2"
    assert compare_runs(tmp_path / "t", tmp_path / "out").rows[0]["seeds"] == "3"
    for name in ("nowhere", "s/3*", "s/0/metrics.csv"):
        with pytest.raises(ConfigError, match="no run found; expected a directory with config"):
            compared(tmp_path, "s", name)


def test_jobs_of_a_sweep_are_compared(tmp_path: Path) -> None:
    """Failed jobs and runs elsewhere are found; a job whose run has since completed is included."""
    sweep = tmp_path / "a sweep"
    write_run(sweep / "0", [1.0])
    write_run(sweep / "2", [1.0], stop_reason="error", seed=2)
    write_run(sweep / "4", [1.0], stop_reason=None, seed=4)
    write_run(sweep / "5", [1.0], seed=5)
    elsewhere = write_run(tmp_path / "elsewhere", [3.0], seed=1)
    failed = [str(sweep / name) for name in "2345"]
    records = [
        JobRecord(2, "seed=2", str(sweep / "2"), error="the disk, it is full"),
        JobRecord(3, "seed=x", str(sweep / "3"), error="seed = 'x': expected an integer"),
        JobRecord(0, "seed=0", str(sweep / "0"), objective=1.0),
        JobRecord(4, "seed=4", str(sweep / "4"), error="ended by SIGKILL"),
        JobRecord(5, "seed=5", str(sweep / "5"), error="ended by SIGINT"),
        JobRecord(1, "seed=1", str(elsewhere), objective=0.1 + 0.2),
    ]
    write_jobs(sweep, records)
    jobs = read_jobs(sweep)
    assert [job.run_dir for job in jobs] == [str(sweep / "0"), str(elsewhere), *failed]
    assert [job.objective for job in jobs[:2]] == [1.0, 0.1 + 0.2]
    assert "\n2,seed=2,2,NaN," in (sweep / "jobs.csv").read_text()
    comparison = compared(tmp_path, "a sweep", "elsewhere", "a *")  # overlapping patterns
    assert comparison.rows[0]["seeds"] == "1 0 5"
    assert [(left.name, left.reason) for left in comparison.left_out] == [
        ("a sweep: job 3 (seed=x)", "seed = 'x': expected an integer"),
        (str(sweep / "2"), "the disk, it is full"),
        (str(sweep / "4"), "ended by SIGKILL"),
    ]
    (sweep / "jobs.csv").write_text(f"job\n6,seed=6,{'x' * 10_000},,\n")
    (left,) = compared(tmp_path, "a sweep").left_out[:1]
    assert (left.name, left.reason) == ("a sweep: job 6 (seed=6)", "run_dir: File name too long")
    (sweep / "jobs.csv").write_text("job\n1,2\n")
    with pytest.raises(RunDirectoryError, match=r"jobs.csv is damaged"):
        compared(tmp_path, "a sweep")


def test_compared_metric_defaults_to_returns(tmp_path: Path) -> None:
    """Evaluation returns by default, else training returns; losses are minimised."""
    write_run(tmp_path / "a", [3.0, 1.0, 2.0], metric="train/episode_return_mean")
    comparison = compared(tmp_path)
    assert comparison.metric == "train/episode_return_mean"
    assert comparison.rows[0]["best_mean"] == 3.0
    write_run(tmp_path / "c", [3.0], seed=2)
    assert compared(tmp_path).metric == RETURN
    write_run(tmp_path / "b", [3.0, 1.0, 2.0], metric="train/value_loss", seed=1)
    assert compared(tmp_path, "b", metric="train/value_loss").rows[0]["best_mean"] == 1.0
    with pytest.raises(ConfigError, match=r"no run has this metric; did you mean train/value_loss"):
        compared(tmp_path, "b", metric="train/value_los")


def test_compared_metric_of_runs_without_episodes_is_a_loss(tmp_path: Path) -> None:
    """Runs without episodes are compared by their validation loss, else by their training loss."""
    cloned: dict[str, Any] = {"algorithm": "bc", "runner__dataset": "data"}
    write_run(tmp_path / "a", [3.0, 1.0], metric="validation/loss", env=None, **cloned)
    write_run(
        tmp_path / "b", [3.0, 2.0], metric="train/policy_loss", evaluation__n_episodes=0, **cloned
    )
    for name, best in (("a", 1.0), ("b", 2.0)):
        assert compared(tmp_path, name).rows[0]["best_mean"] == best
    played = write_run(tmp_path / "c", [3.0], metric="validation/loss", **cloned)
    assert read_run(played).evaluation.selection_metric == RETURN


def test_compared_metric_is_the_selection_metric(tmp_path: Path) -> None:
    """The metric and mode that selected the best policies are used, if all runs agree."""
    own = {"metric": "eval/episode_length_mean", "mode": "min"}
    write_run(tmp_path / "a", [3.0, 1.0, 2.0], metric="eval/episode_length_mean", evaluation=own)
    assert compared(tmp_path).metric == "eval/episode_length_mean"
    assert compared(tmp_path).rows[0]["best_mean"] == 1.0
    assert compared(tmp_path, mode="max").rows[0]["best_mean"] == 3.0
    write_run(tmp_path / "returns/a", [3.0, 1.0, 2.0], evaluation=own)
    assert compared(tmp_path, "returns", metric=RETURN).rows[0]["best_mean"] == 3.0
    trained = write_run(tmp_path / "trained/a", [1.0], evaluation={"n_episodes": 0})
    assert read_run(trained).evaluation.selection_metric == "train/episode_return_mean"
    opponents = {"opponents": {"random": "random"}}
    won = "eval/vs_random/return_mean"
    write_run(tmp_path / "b", [0.5], metric=won, seed=1, evaluation=opponents)
    assert compared(tmp_path, "b").metric == won
    write_run(tmp_path / "c", [7.0], seed=2)
    assert compared(tmp_path, "a", "b", "c").metric == RETURN


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"runs": []}, r"runs = \[\]: expected directories of runs, such as runs="),
        ({"n_resamples": 5}, "n_resamples = 5: expected a number >= 100"),
        ({"bounds": {"X": [1, 1]}}, r"bounds.X = \[1.0, 1.0\]: expected two different values"),
        ({"threshold": math.nan}, "threshold = nan: expected a finite number"),
        ({"output": ""}, "output = '': expected a path"),
    ],
)
def test_invalid_compare_settings_raise(settings: dict[str, Any], message: str) -> None:
    """One message contains key, value and what is expected."""
    with pytest.raises(ConfigError, match=message):
        compare_runs(**{"runs": ["a"], **settings})


def test_repeated_seeds_are_reported(tmp_path: Path) -> None:
    """Repeated seeds are reported, since repeating a run adds no sample."""
    write_runs(tmp_path, [1.0], [1.0])
    write_run(tmp_path / "again", [1.0], seed=1)
    assert "ppo on CartPole-v1: several runs have seed 1" in str(compared(tmp_path))


def test_comparison_files_have_full_precision(tmp_path: Path, pictures: dict[Path, Figure]) -> None:
    """The CSV has full precision; Markdown and picture are written; all files are replaced."""
    write_runs(tmp_path, [1.0, 1 / 3], [1.0, 4 / 3])
    comparison = compared(tmp_path)
    (line,) = table(tmp_path)
    assert float(line["final_mean"]) == comparison.rows[0]["final_mean"]
    text = (tmp_path / "out/comparison.md").read_text()
    assert "| ppo | 2 | 2k | 0:00:20 | 0.8333 | 0.8333 range [0.3333, 1.33] |" in text
    assert f"  - seed 1: `{tmp_path / '1'}`" in text
    save_picture(pictures[tmp_path / "out/comparison.png"], tmp_path / "x.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "x.png").shape
    assert width > height > 200
    assert compared(tmp_path, "1").rows[0]["runs"] == 1
    assert "1.3333333333333333" in (tmp_path / "out/comparison.csv").read_text()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output = '.*file/x': cannot be written"):
        compare_runs(tmp_path / "1", tmp_path / "file/x")


def test_comparison_picture_shows_runs_mean_and_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single runs, their mean and its band up to the shortest run, by steps and by time."""
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # imported by another test
    write_runs(tmp_path, [0.0, 2.0, 4.0], [2.0, 4.0])
    write_run(tmp_path / "2", [7.0], algorithm="a2c")
    figure = figure_of(tmp_path, ppo="PPO", a2c="A2C")
    by_steps, by_time = figure.axes
    single, first, second, mean = by_steps.lines
    assert single.get_xydata().tolist() == [[1000.0, 7.0]]
    assert (list(first.get_xdata()), list(second.get_ydata())) == ([1e3, 2e3, 3e3], [2.0, 4.0])
    assert mean.get_xydata().tolist() == [[1e3, 1.0], [2e3, 3.0]]
    assert by_time.lines[3].get_xdata()[-1] == 20.0
    assert by_time.get_xlabel() == "wall time (s)"
    edges = by_steps.collections[0].get_paths()[0].vertices[:, 1]
    assert (edges.min(), edges.max()) == (0.0, 4.0)
    assert (len(by_steps.collections), by_steps.get_title(loc="left")) == (1, "CartPole-v1")
    assert by_time.get_title(loc="right") == "band: range of fewer than 4 runs"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["A2C", "PPO"]
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize(
    ("first", "length", "expected"),
    [(2, 4, (2e3, 4e3, 3)), (3, 2, None), (1, 205, (1e3, 205e3, N_POINTS))],
)
def test_mean_curve_covers_common_steps(
    tmp_path: Path, first: int, length: int, expected: tuple[float, ...] | None
) -> None:
    """The mean covers the steps that all runs have in common, at a limited number of points."""
    write_runs(tmp_path, [1.0] * length, [2.0] * max(length, 5))
    cut(tmp_path / "1", first)
    by_steps = figure_of(tmp_path).axes[0]
    if expected is None:  # the runs have no step in common
        assert (len(by_steps.lines), len(by_steps.collections)) == (2, 0)
        return
    steps = by_steps.lines[2].get_xdata()
    assert (steps[0], steps[-1], len(steps)) == expected


def test_runs_csv_has_one_row_per_run(tmp_path: Path) -> None:
    """`runs.csv` has one row per run, with its final, best and test result."""
    write_runs(tmp_path / "a", (1, 5, 3), (2, 4, 4), algorithm__lr=0.001)
    other = write_run(tmp_path / "b", [7], algorithm__lr=0.002)
    tests = {"best": {"episode_return_mean": 6.5, "epoch": 1}}
    summary = {"stop_reason": "total_steps", "updates": 1, "final_test": tests}
    (other / "summary.json").write_text(json.dumps(summary))
    compared(tmp_path)
    rows = list(csv.DictReader((tmp_path / "out/runs.csv").read_text().splitlines()))
    assert [row["seed"] for row in rows] == ["0", "1", "0"]
    expected = {"group": "ppo algorithm.lr=0.001", "algorithm": "ppo", "algorithm.lr": "0.001"}
    expected |= {"environment": "CartPole-v1", "env_steps": "3000", "final": "3.0", "best": "5.0"}
    expected |= {"tested": "", "directory": str(tmp_path / "a/0")}
    assert {key: rows[0][key] for key in expected} == expected
    assert (rows[2]["final"], rows[2]["tested"]) == ("7.0", "6.5")
    assert compared(tmp_path, mode="min").run_rows[0]["best"] == 1.0
