"""Errors in user code are shown with their traceback, in every part of a run."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
import torch
from short_runs import short_run
from toy_envs import CountingEnv

from maze_train import Callback, ConfigError, EnvError, Evaluator
from maze_train.core.errors import MazeTrainError
from maze_train.envs.factory import EnvFactory
from maze_train.hydra_app import report

pytestmark = pytest.mark.usefixtures("empty_directory")


def fails_here() -> Any:
    """Raise an error whose text contains the word "argument"."""
    return int(None)  # type: ignore[call-overload]  # on purpose


class BadConstructor(CountingEnv):
    def __init__(self, size: int = 1) -> None:
        fails_here()


class BadStep(CountingEnv):
    def step(self, action: Any) -> Any:
        return fails_here()


class BadWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: Any) -> None:
        fails_here()


class BadCallback(Callback):
    def on_update_end(self, run: Any) -> None:
        fails_here()


class BadSettings(Callback):
    def __init__(self) -> None:
        fails_here()


class BadEvaluator(Evaluator):
    def evaluate(self, policy: Any) -> dict[str, float]:
        return {"value": fails_here()}


class BadNetwork(torch.nn.Module):
    def __init__(self, observation_space: Any, output_size: int) -> None:
        super().__init__()

    def forward(self, obs: Any) -> Any:
        return fails_here()


PARTS = {
    "environment": {"env": {"_target_": BadConstructor}},
    "step": {"env": {"_target_": BadStep}},
    "wrapper": {"env.wrappers": [{"_target_": BadWrapper}]},
    "callback": {"callbacks": [BadCallback()]},
    "settings of a callback": {"callbacks": [{"_target_": BadSettings}]},
    "evaluator": {"evaluation.evaluators": [BadEvaluator()]},
    "network": {"model.policy": BadNetwork},
}


@pytest.mark.parametrize("part", PARTS)
def test_traceback_leads_to_user_code(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The traceback of user code is followed by the error message."""
    with pytest.raises(MazeTrainError) as caught:
        short_run(**PARTS[part])
    capsys.readouterr()
    report(caught.value)
    text = capsys.readouterr().err
    assert text.count("Traceback") == 1
    assert ", in fails_here" in text
    assert "does not accept these arguments" not in text
    assert "int() argument must be" in text.splitlines()[-1]


def passes_on(**kwargs: Any) -> CountingEnv:
    """Return an environment constructed with the given arguments."""
    return CountingEnv(**kwargs)


@pytest.mark.parametrize("make", [CountingEnv, passes_on, "Acrobot-v1"])
def test_invalid_user_arguments_name_the_call(make: Any) -> None:
    """The error names the call that does not accept the arguments."""
    with pytest.raises(ConfigError, match=r"env.kwargs = .*does not accept these .*'least'"):
        EnvFactory.from_any(make, least=3)()
    with pytest.raises(EnvError, match=r"building .* with {} failed: TypeError: int\(\) arg"):
        EnvFactory.from_any(BadConstructor)()


def test_package_errors_have_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """Invalid settings and invalid values of environments show no traceback."""
    for part in (
        {"callbacks": [{"_target_": BadCallback, "size": 3}]},
        {"model.policy": "own_parts.Missing"},
    ):
        with pytest.raises(MazeTrainError) as caught:
            short_run(**part)
        report(caught.value)
        assert "Traceback" not in capsys.readouterr().err
