"""Console output of a run."""

from __future__ import annotations

import math
import re
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from maze_train import ConfigError, ConsoleWriter, RunInfo

RUN = RunInfo(title="PPO on [CartPole]", total_env_steps=100_000, n_epochs=50)


class Clock:
    """Clock that is advanced by the test."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def make_row(epoch: int, **returns: float) -> dict[str, float]:
    """Return a row of metrics with 2,000 environment steps per epoch."""
    row: dict[str, float] = {"epoch": epoch, "updates": epoch, "env_steps": 2000 * epoch}
    return {**row, **{f"{name}/episode_return_mean": value for name, value in returns.items()}}


def make_console(*, is_terminal: bool = False, width: int = 80) -> Console:
    """Return a console that writes to a buffer."""
    return Console(file=StringIO(), force_terminal=is_terminal, width=width, legacy_windows=False)


def started(
    run: RunInfo = RUN,
    mode: Any = "auto",
    *,
    is_terminal: bool = False,
    width: int = 80,
    **more: Any,
) -> tuple[ConsoleWriter, Clock, Console]:
    """Return a started writer, with its clock and console."""
    clock, console = Clock(), make_console(is_terminal=is_terminal, width=width)
    writer = ConsoleWriter(mode, console=console, clock=clock, **more)
    writer.start(run)
    return writer, clock, console


def output(console: Console) -> str:
    """Return the printed text."""
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_console_prints_one_line_per_interval_and_at_the_end() -> None:
    """At most one line per second, always the last epoch, and the best evaluation so far."""
    writer, clock, console = started()
    for epoch in range(1, 6):
        clock.now += 0.4
        writer.write(make_row(epoch, train=10.0 * epoch, eval=100.0 - epoch))
    writer.close()
    assert output(console).splitlines() == [
        "PPO on [CartPole]",
        "epoch  1/50     2k/100k steps     5k/s  eta 0:00:20  train 10.00  eval 99.00  best 99.00",
        "epoch  4/50     8k/100k steps     5k/s  eta 0:00:18  train 40.00  eval 96.00  best 99.00",
        "epoch  5/50    10k/100k steps     5k/s  eta 0:00:18  train 50.00  eval 95.00  best 99.00",
    ]


def test_lines_continue_within_a_long_epoch() -> None:
    """Without a terminal, a line is printed every 30 seconds, also before the first epoch ends."""
    writer, clock, console = started()
    for update in range(1, 11):
        clock.now += 7
        writer.advance(update / 20, 100 * update)
    lines = output(console).splitlines()[1:]
    assert [line.split()[:3] for line in lines] == [
        ["epoch", "0/50", "500/100k"],
        ["epoch", "0/50", "1k/100k"],
    ]


def test_terminal_prints_one_evaluation_per_second() -> None:
    """A terminal shows at most one evaluation per second."""
    writer, clock, console = started(is_terminal=True)
    for epoch in range(1, 5):
        clock.now += 0.6
        writer.write(make_row(epoch, train=10.0, **({"eval": 90.0} if epoch != 2 else {})))
    writer.close()
    pieces = re.split(r"\n|\r|\x1b\[\d*[A-Z]", output(console))
    lines = [piece for piece in pieces if piece.startswith("epoch") and "best" in piece]
    assert [line[6:10] for line in lines] == [" 1/5", " 3/5"]
    assert lines[0].endswith("eta 0:00:29  train 10.00  eval 90.00  best 90.00")


def test_outcome_explains_an_exceeded_limit() -> None:
    """An exceeded limit is explained; a run that failed immediately has no outcome."""
    writer, _, console = started()
    writer.finish({"stop_reason": "error", "epochs": 0, "env_steps": 0})
    assert output(console) == "PPO on [CartPole]\n"
    writer, _, console = started(RunInfo(total_env_steps=3_000))
    writer.write(make_row(2))
    writer.finish({"stop_reason": "total_steps"})
    assert "epoch   2     4k steps (past 3k)      -/s" in output(console)
    assert "environment steps  4,000 (the last update exceeded 3,000)" in output(console)


def test_console_without_limit_shows_no_eta() -> None:
    """A run without limits shows no time remaining; NaN returns are omitted."""
    writer, clock, console = started(RunInfo(), line_interval_s=0)
    clock.now += 1
    writer.write(make_row(3, train=math.nan))
    writer.close()
    assert output(console) == "epoch   3     6k steps     6k/s\n"


def test_eta_of_a_resumed_run_ignores_earlier_steps() -> None:
    """Steps before the checkpoint count neither for speed nor for remaining time."""
    past = tuple(make_row(epoch, eval=float(epoch)) for epoch in range(1, 26))
    writer, clock, console = started(RunInfo(total_env_steps=100_000, past_rows=past))
    clock.now += 10
    writer.write(make_row(26))
    assert "200/s  eta 0:04:00  eval 25.00  best 25.00" in output(console)


def test_eta_considers_the_wall_time_limit() -> None:
    """The wall time before resuming counts towards the limit."""
    for before, expected in ((0.0, "0:01:15"), (50.0, "0:00:25")):
        past = ({**make_row(1), "time/total_s": before},)
        run = RunInfo(max_wall_time_s=100.0, total_env_steps=10**9, past_rows=past)
        writer, clock, console = started(run)
        clock.now += 25
        writer.write(make_row(2))
        assert f"eta {expected}" in output(console)


def test_progress_modes_select_the_console_output(capsys: pytest.CaptureFixture[str]) -> None:
    """`quiet` prints nothing, `auto` prints lines without a terminal; other modes are errors."""
    lines = "PPO on [CartPole]\nepoch  1/50     2k/100k steps"
    for mode, start in (("quiet", ""), ("auto", lines)):
        writer = ConsoleWriter(mode)  # type: ignore[arg-type]
        writer.start(RUN)
        writer.advance(0.5, 10)
        writer.write(make_row(1, train=5.0))
        writer.finish({"stop_reason": "done"})
        printed = capsys.readouterr().out
        assert printed.startswith(start)
        assert bool(printed) == bool(start)
        assert "\x1b" not in printed
    with pytest.raises(ConfigError, match="'quiet'"):
        ConsoleWriter("quit")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({}, ""),
        ({"epoch": 10, "collect": 6, "env": 4.5, "update": 3, "evaluate": 0.6, "checkpoint": 0.2},
         "environment 45 %, policy 15 %, update 30 %, evaluation 6 %, writing 2 %, other 2 %"),
        ({"epoch": 10, "collect": 6, "update": 4}, "experience 60 %, update 40 %"),
    ],
)  # fmt: skip
def test_outcome_shows_time_fractions(seconds: dict[str, float], expected: str) -> None:
    """Percentages cover all epochs, including those before resuming."""
    halves = {f"time/{name}_s": value / 2 for name, value in seconds.items()}
    past = RunInfo(past_rows=({**make_row(1), **halves},))
    writer, _, console = started(past, width=120)
    writer.write({**make_row(2), **halves})
    writer.finish({})
    found = re.findall(r"^  time +(.*)$", output(console), re.MULTILINE)
    assert found == ([expected] if expected else [])


def test_outcome_prefers_values_of_the_summary() -> None:
    """Values of the summary take precedence over those of the rows and the clock."""
    writer, clock, console = started(RunInfo(run_dir=Path("runs/" + "x" * 100)), line_interval_s=0)
    clock.now += 65
    writer.write({**make_row(49, eval=480.0), "eval/episode_return_std": 12.3})
    writer.write({**make_row(50, eval=470.0), "eval/episode_return_std": 9.0})
    test = {"epoch": 50, "episode_return_mean": 468.0, "episode_return_std": 11.5, "episodes": 100}
    tests = {"last": test, "best": {**test, "episode_return_mean": 475.25}}
    end = {"stop_reason": "total_steps reached", "best_epoch": 50}  # an epoch with an equal result
    writer.finish({**end, "final_test": tests})
    found = dict(re.findall(r"^  ([a-z ,]+?)  +(.*)$", output(console), re.MULTILINE))
    assert found == {
        "stopped": "total_steps reached",
        "epochs": "50",
        "environment steps": "100,000",
        "wall time": "0:01:05",
        "speed": "1.5k steps/s",
        "best return": "480.0 at epoch 50",
        "final evaluation": "470.0 ± 9.00",
        "test, last policy": "468.0 ± 11.50 (100 episodes)",
        "test, best policy": "475.2 ± 11.50 (100 episodes)",
        "run directory": "runs/" + "x" * 100,
    }


def test_closing_the_console_restores_the_terminal() -> None:
    """After `close` the cursor is visible and standard output is restored, also after errors."""
    original = sys.stdout
    writer, _, console = started(mode="bar", is_terminal=True)
    assert sys.stdout is not original
    writer.close()
    writer.close()
    text = output(console)
    assert sys.stdout is original
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
