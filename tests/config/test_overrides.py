"""Arguments reach Hydra in the form that it accepts."""

from __future__ import annotations

import pytest

from maze_train.config.overrides import (
    config_folders,
    normalise,
    normalise_completion,
    overrides_of,
)

GROUPS = ("algorithm", "env", "model", "runner", "experiment", "evaluation", "tracking")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("algorithm=ppo", "algorithm=ppo"),
        ("+algorithm=ppo", "algorithm=ppo"),
        ("++algorithm=ppo", "algorithm=ppo"),
        ("+algorithm=a2c,ppo", "algorithm=a2c,ppo"),
        ("+env=ALE/Pong-v5", "env=ALE/Pong-v5"),
        ("env=my_module:My-v0", "env=my_module:My-v0"),
        ("+experiment=ppo/CartPole-v1", "experiment=ppo/CartPole-v1"),
        ("algorithm={lr: 1}", "++algorithm={lr: 1}"),
        ("algorithm.lr=1", "++algorithm.lr=1"),
        ("+algorithm.lr=1", "++algorithm.lr=1"),
        ("++algorithm.lr=1", "++algorithm.lr=1"),
        ("env.kwargs.path=a/b=c", "++env.kwargs.path=a/b=c"),
        ("env._target_=my.Env", "++env._target_=my.Env"),
        ("seed=0,1,2", "++seed=0,1,2"),
        ("run_dir=outputs/x", "++run_dir=outputs/x"),
        ("algoritm=ppo", "++algoritm=ppo"),
        ("own=x", "own=x"),
        ("+own=x", "+own=x"),
        ("hydra.sweep.dir=x", "hydra.sweep.dir=x"),
        ("hydra/launcher=joblib", "hydra/launcher=joblib"),
        ("+hydra.searchpath=[x]", "+hydra.searchpath=[x]"),
        ("~algorithm.lr", "~algorithm.lr"),
        ("~env=x", "~env=x"),
        ("+env@eval_env=CartPole-v1", "+env@eval_env=CartPole-v1"),
        ("algorithm/sub=x", "algorithm/sub=x"),
        ("-m", "-m"),
        ("--config-dir=a", "--config-dir=a"),
        ("word", "word"),
    ],
)
def test_each_kind_of_argument_is_brought_into_form(given: str, expected: str) -> None:
    """Choices lose their plus, values get two, everything else stays."""
    assert normalise([given], GROUPS, own_groups=("own",)) == [expected]


def test_values_of_options_are_left_alone() -> None:
    """A folder whose name looks like an override is none."""
    argv = ["--config-dir", "a.b=c", "seed=1", "-cn", "config", "--info", "defaults", "-m"]
    expected = ["--config-dir", "a.b=c", "++seed=1", "-cn", "config", "--info", "defaults", "-m"]
    assert normalise(argv, GROUPS) == expected
    assert overrides_of(argv) == ["seed=1"]


def test_commands_of_the_shell_completion_are_left_alone() -> None:
    """`install=bash` is no setting."""
    assert normalise(["-sc", "install=bash"], GROUPS) == ["-sc", "install=bash"]


def test_a_line_to_complete_keeps_its_last_word() -> None:
    """Words before the cursor are brought into form; the word at the cursor is what is typed."""
    line = "maze-run +algorithm=ppo seed=1 +env=Cart"
    assert normalise_completion(line, GROUPS) == "maze-run algorithm=ppo ++seed=1 +env=Cart"
    assert normalise_completion("maze-run ", GROUPS) == "maze-run "
    assert normalise_completion("maze-run", GROUPS) == "maze-run"


@pytest.mark.parametrize(
    ("argv", "folders"),
    [
        ([], []),
        (["--config-dir", "a", "seed=1"], ["a"]),
        (["-cd", "a"], ["a"]),
        (["--config-dir=a"], ["a"]),
        (["--config-dir"], []),
        (["hydra.searchpath=[file://a, b, pkg://c]"], ["a", "b"]),
    ],
)
def test_folders_of_the_user_are_found(argv: list[str], folders: list[str]) -> None:
    """They are needed to list their options before Hydra is imported."""
    assert config_folders(argv) == folders
