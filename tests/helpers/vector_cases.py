"""Vector environments in every place, and comparisons of their steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from maze_train import SequentialVectorEnv, SubprocVectorEnv
from maze_train.envs.foreign import ForeignVectorEnv

START_METHODS = ["fork", "forkserver", "spawn"]

FORKS = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def here(factories: Any, **settings: Any) -> Any:
    """Environments in this process."""
    return SequentialVectorEnv(factories, **settings)


def workers(factories: Any, **settings: Any) -> Any:
    """Environments in two others, unless `n_workers` says how many."""
    return SubprocVectorEnv(factories, **{"n_workers": 2, "start_method": "fork", **settings})


def restarted(factories: Any, **settings: Any) -> Any:
    """Environments in two others, which are started again when they fail."""
    return workers(factories, on_worker_failure="restart", **settings)


def foreign(factories: Any, mode: Any = AutoresetMode.SAME_STEP) -> Any:
    """A vector environment of gymnasium, presented as ours."""
    return ForeignVectorEnv(SyncVectorEnv(factories, autoreset_mode=mode))


PLACES = [here, pytest.param(workers, marks=pytest.mark.slow)]
ALL = [*PLACES, foreign]
OTHER_MODES = [
    pytest.param(partial(foreign, mode=mode), id=mode.name)
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED)
]


def columns(tree: Any) -> dict[str, Any]:
    """Arrays by key; a lone array has the key ''."""
    return tree if isinstance(tree, dict) else {"": tree}


def actions_for(vector: Any) -> Any:
    """Random actions in the form that the vector environment takes."""
    sample = vector.action_space.sample()
    return {"0": sample[0], "1/force": sample[1]["force"]} if isinstance(sample, tuple) else sample


def play(vector: Any, steps: int) -> None:
    """Random steps."""
    for _ in range(steps):
        vector.step(actions_for(vector))


def state_after(factories: Any, steps: int) -> Any:
    """The state of environments in this process after some random steps."""
    with here(factories) as one:
        one.reset(seed=5)
        play(one, steps)
        return one.state_dict()


def assert_same(one: Any, other: Any) -> None:
    """Equal keys, dtypes and bytes."""
    assert columns(one).keys() == columns(other).keys()
    for key, column in columns(one).items():
        expected = np.asarray(columns(other)[key])
        assert column.dtype == expected.dtype
        assert column.tobytes() == expected.tobytes(), key


def assert_equal_steps(one: Any, other: Any) -> None:
    """Two steps gave the same bytes and the same infos."""
    for a, b in zip(one[:4], other[:4], strict=True):
        assert_same(a, b)
    assert_same_infos(one[4], other[4])


def assert_same_infos(ours: Any, theirs: Any) -> None:
    """Same keys, dtypes and values at every level."""
    assert sorted(ours) == sorted(theirs)
    for key, value in theirs.items():
        if isinstance(value, dict):
            assert_same_infos(ours[key], value)
            continue
        assert ours[key].dtype == value.dtype
        for a, b in zip(ours[key], value, strict=True):
            if isinstance(b, dict):
                assert_same(a, b)
            else:
                np.testing.assert_array_equal(a, b)
