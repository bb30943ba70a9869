"""Output and imports of `maze-run --help` and similar options."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from maze_train.cli import main


def test_help_lists_choices_and_examples(capfd: pytest.CaptureFixture[str]) -> None:
    """The help lists algorithms, groups with their options, keys, examples and exit codes."""
    assert main(["--help"]) == 0
    text = capfd.readouterr().out
    for part in (
        "algorithm=ppo",
        "runner=dev|local",
        "total_steps=",
        "maze-run rollout",
        "Exit codes",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 100
    assert main(["--version"]) == 0
    assert re.fullmatch(r"maze-run \d+\.\d+\.\d+\S*\n", capfd.readouterr().out)


@pytest.mark.slow
def test_help_into_a_closed_pipe_prints_no_traceback() -> None:
    """`maze-run --help | head` prints no traceback."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "maze_train", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=True, timeout=60)
    os.close(write)
    assert done.stderr == b""


WRONG = (
    ("algorithm=ppo", "env=CartPole-v1", "algorithm.lrr=1"),
    ("algorithm=ppo", "env=CratPole-v1"),
    ("algorithm=ppo", "env._target_=my.Env", "seed=x"),
    ("-cn", "rollout", "policy=random", "env=CartPole-v1", "n_episode=3"),
)


@pytest.mark.slow
def test_heavy_packages_are_imported_late() -> None:
    """Help and configuration errors are printed quickly because few packages are imported."""
    code = (
        "import sys\nfrom maze_train.cli import main\n"
        "assert main(['--help']) == 0\nprint('loaded:', *sys.modules)\n"
        f"assert [main(argv) for argv in {WRONG!r}] == [2, 2, 2, 2]\nprint('loaded:', *sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    helped, refused = (set(text.split()) for text in result.stdout.split("loaded:")[1:])
    assert "sys" in helped
    assert helped & {"torch", "hydra", "omegaconf", "gymnasium", "numpy"} == set()
    assert "hydra" in refused
    assert refused & {"torch", "matplotlib", "rich", "tensorboard"} == set()
