from __future__ import annotations

import math
import pickle

import pytest

from maze_train.core import errors
from maze_train.core.checks import check_at_least, check_between, check_one_of, check_positive
from maze_train.core.errors import ConfigError, MazeTrainError, MissingExtraError


@pytest.mark.parametrize(
    ("check", "limits", "expected", "values"),
    [
        (check_positive, (), "number > 0", [0, 0.0, -1, -1e-300]),
        (check_at_least, (1,), "number >= 1", [0, -5, 0.999]),
        (check_between, (0.0, 1.0), r"number in \[0, 1\]", [-1e-9, 1.0000001]),
    ],
)
def test_numbers_out_of_range_raise(check, limits, expected, values):
    """Numbers outside the limits and non-finite numbers raise ConfigError."""
    for value in values:
        with pytest.raises(ConfigError, match=rf"^lr = .*: expected a {expected}$"):
            check("lr", value, *limits)
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ConfigError, match=r"^lr = .*: expected a finite number$"):
            check("lr", value, *limits)


def test_bounds_are_allowed():
    """The limits and numbers between them are allowed."""
    check_positive("x", 5e-324)
    for value in (1, 10**30):
        check_at_least("x", value, 1)
    for value in (0.0, 1.0):
        check_between("x", value, 0.0, 1.0)


def test_check_one_of_suggests_the_closest():
    """The error lists the choices and suggests the closest one."""
    check_one_of("activation", "tanh", ("tanh", "relu"))
    message = r"^activation = 'Tan': expected one of tanh, relu; did you mean 'tanh'\?$"
    with pytest.raises(ConfigError, match=message):
        check_one_of("activation", "Tan", ("tanh", "relu"))
    with pytest.raises(ConfigError, match=r"^activation = 7: expected one of tanh, relu$"):
        check_one_of("activation", 7, ("tanh", "relu"))


@pytest.mark.parametrize(
    ("prefix", "key", "expected"),
    [("algorithm", "lr", "algorithm.lr"), ("", "lr", "lr"), ("lr", "", "lr"), ("", "", "")],
)
def test_config_error_below_joins_keys(prefix, key, expected):
    """The prefix is prepended; empty names add no dot."""
    moved = ConfigError(key, "is wrong", 3).below(prefix)
    assert (moved.key, moved.problem, moved.value) == (expected, "is wrong", 3)
    assert str(ConfigError(key, "is wrong", None)) == f"{key} = None: is wrong"
    assert str(ConfigError(key, "is wrong")) == f"{key}: is wrong"


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("algorithm.lr", "expected a number > 0", -1.0),
        ConfigError("algorithm", "is missing"),
        MissingExtraError("wandb", "wandb", "tracking.wandb"),
        errors.WorkerError("worker 3 died"),
    ],
)
def test_errors_survive_pickling(error):
    """An exception is unchanged by pickling."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_exceptions_derive_from_maze_train_error():
    """All exceptions of the package derive from MazeTrainError."""
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    classes = [value for value in found if value.__module__ == errors.__name__]
    assert all(issubclass(cls, MazeTrainError) for cls in classes)
    assert len(classes) == 13
