"""What `maze-run` answers at once, and what it imports for it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from maze_train.cli import main


def fresh(code: str) -> subprocess.CompletedProcess[str]:
    """The result of a program in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )


def test_help_lists_choices_and_examples(capfd: pytest.CaptureFixture[str]) -> None:
    """Algorithms with what they are, groups with their options, keys, examples, exit codes."""
    assert main(["--help"]) == 0
    text = capfd.readouterr().out
    for part in ("algorithm=ppo", "runner=dev|local", "total_steps=", "Examples", "Exit codes"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 130


def test_the_version_is_that_of_the_package(capfd: pytest.CaptureFixture[str]) -> None:
    """`--version` names the program and its version."""
    assert main(["--version"]) == 0
    assert re.fullmatch(r"maze-run \d+\.\d+\.\d+\S*\n", capfd.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "code", "absent"),
    [
        (["--help"], 0, {"torch", "hydra", "omegaconf", "gymnasium", "numpy"}),
        (["algorithm=ppo", "env=CartPole-v1", "algorithm.lrr=1"], 2, {"torch"}),
        (["algorithm=ppo", "env=CratPole-v1"], 2, {"torch"}),
        (["algorithm=ppo", "env._target_=my.Env", "seed=x"], 2, {"torch"}),
    ],
)
def test_heavy_packages_are_imported_late(argv: list[str], code: int, absent: set[str]) -> None:
    """Help and configuration errors come at once because they import little."""
    result = fresh(
        "import sys\nfrom maze_train.cli import main\n"
        f"assert main({argv!r}) == {code}\nprint('loaded:', *sys.modules)"
    )
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.rpartition("loaded:")[2].split())
    assert "sys" in loaded
    assert loaded & absent == set()
