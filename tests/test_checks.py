from __future__ import annotations

import math
import pickle

import pytest

from maze_train import errors
from maze_train.checks import check_at_least, check_between, check_one_of, check_positive
from maze_train.errors import ConfigError, MazeTrainError, MissingExtraError, nearest

BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("value", [*BAD, 0, 0.0, -1, -1e-300])
def test_positive_refuses(value):
    """Only finite numbers above 0 are positive."""
    with pytest.raises(ConfigError, match=r"^lr = .*: expected a (number > 0|finite number)$"):
        check_positive("lr", value)


@pytest.mark.parametrize("value", [*BAD, 0, -5, 0.999])
def test_at_least_refuses(value):
    """Numbers below the minimum are refused, and those that are none."""
    with pytest.raises(ConfigError, match=r"^n = .*: expected a (number >= 1|finite number)$"):
        check_at_least("n", value, 1)


@pytest.mark.parametrize("value", [*BAD, -1e-9, 1.0000001])
def test_between_refuses(value):
    """Numbers outside of the closed interval are refused."""
    match = r"^gamma = .*: expected a (number in \[0, 1\]|finite number)$"
    with pytest.raises(ConfigError, match=match):
        check_between("gamma", value, 0.0, 1.0)


def test_bounds_belong_to_the_range():
    """The limits themselves are allowed, and numbers inside."""
    check_positive("x", 5e-324)
    check_at_least("x", 1, 1)
    check_at_least("x", 10**30, 1)
    check_between("x", 0.0, 0.0, 1.0)
    check_between("x", 1.0, 0.0, 1.0)


def test_one_of_names_the_closest():
    """A misspelt choice gets the list and the nearest spelling."""
    check_one_of("activation", "tanh", ("tanh", "relu"))
    message = r"^activation = 'Tan': expected one of tanh, relu; did you mean 'tanh'\?$"
    with pytest.raises(ConfigError, match=message):
        check_one_of("activation", "Tan", ("tanh", "relu"))
    with pytest.raises(ConfigError, match=r"^activation = 7: expected one of tanh, relu$"):
        check_one_of("activation", 7, ("tanh", "relu"))


def test_config_error_says_key_value_and_problem():
    """A value of None is shown; a value that was not passed is not."""
    assert str(ConfigError("a.b", "is wrong", None)) == "a.b = None: is wrong"
    assert str(ConfigError("a.b", "is wrong")) == "a.b: is wrong"


@pytest.mark.parametrize(
    ("prefix", "key", "expected"),
    [("algorithm", "lr", "algorithm.lr"), ("", "lr", "lr"), ("lr", "", "lr"), ("", "", "")],
)
def test_below_joins_keys(prefix, key, expected):
    """The key grows to the left, without dots at empty names."""
    moved = ConfigError(key, "is wrong", 3).below(prefix)
    assert (moved.key, moved.problem, moved.value) == (expected, "is wrong", 3)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("algorithm.lr", "expected a number > 0", -1.0),
        ConfigError("algorithm", "is missing"),
        MissingExtraError("wandb", "wandb", "tracking.wandb"),
        errors.WorkerError("worker 3 died"),
    ],
)
def test_errors_travel_between_processes(error):
    """An exception that was pickled is the same exception."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_all_exceptions_have_one_base():
    """Whoever catches MazeTrainError catches everything that is raised on purpose."""
    classes = [getattr(errors, name) for name in errors.__all__ if name != "nearest"]
    assert all(issubclass(cls, MazeTrainError) for cls in classes)
    assert len(classes) == 10


def test_missing_extra_says_what_to_install():
    """The message holds the command that helps."""
    assert 'pip install "maze-train[atari]"' in str(MissingExtraError("ale-py", "atari", "Pong"))


def test_nearest_ignores_case_and_keeps_spelling():
    """The best match comes first, as it was written; far words give nothing."""
    names = ["CartPole-v1", "CartPole-v0", "Pendulum-v1"]
    assert nearest("cartpole-v1", names)[0] == "CartPole-v1"
    assert nearest("cartpole-v1", names, count=1) == ["CartPole-v1"]
    assert nearest("zzzzzzzz", names) == []
