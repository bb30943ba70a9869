"""Curricula: start of stages, changes of environments, and resuming."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from called_envs import LevelEnv
from short_runs import rows, short_run

from maze_train import ConfigError, train
from maze_train.core.errors import CallbackError
from maze_train.envs.calls import EnvCall, EnvCalls
from maze_train.training.config import CurriculumConfig
from maze_train.training.curriculum import Curriculum

LEVELS: dict[str, Any] = {"env": {"_target_": "called_envs.LevelEnv"}}


def by_level(*conditions: dict[str, Any]) -> list[dict[str, Any]]:
    """Return stages that each set a level; the first one has no condition."""
    return [
        {**condition, "attributes": {"level": float(i)}}
        for i, condition in enumerate([{}, *conditions])
    ]


class Play:
    """Curriculum without a run that receives steps and metrics and records its calls."""

    def __init__(self, **settings: Any) -> None:
        self.calls = EnvCalls()
        self.calls.in_training_envs.append(lambda: None)
        self.metrics: dict[str, float] = {}
        self.stages: list[float] = []
        self.progress = SimpleNamespace(env_steps=0)
        self.model = None
        self.curriculum = Curriculum(CurriculumConfig(**settings))
        self.curriculum.on_run_start(self)  # type: ignore[arg-type]

    @property
    def made(self) -> list[EnvCall]:
        """Return all calls so far."""
        self.calls.make()
        return self.calls.training

    def add_call(self, call: EnvCall, *, evaluate: bool) -> None:
        self.calls.add(call, evaluate=evaluate)

    def record_event(self, event: Any, value: float) -> None:
        assert event.tag == "curriculum/stage"
        self.stages.append(value)

    def epoch(self, **metrics: float) -> float:
        """Run an epoch; return the level of the environments afterwards."""
        self.metrics = {"train/episodes": 4.0, **{f"train/{k}": v for k, v in metrics.items()}}
        self.progress.env_steps += 10
        self.curriculum.on_update_end(self)  # type: ignore[arg-type]
        self.curriculum.on_epoch_end(self)  # type: ignore[arg-type]
        env: Any = LevelEnv()
        for call in self.made:
            call.make(env)
        level: float = env.level
        return level


def test_curriculum_stages_begin_by_steps() -> None:
    """Stages begin at the end of the update that reaches their steps."""
    play = Play(stages=by_level({"steps": 15}, {"steps": 20}, {"steps": 45}))
    assert [play.epoch() for _ in range(6)] == [0, 2, 2, 2, 3, 3]
    assert play.stages == [0, 2, 2, 2, 3, 3]


def test_curriculum_stages_begin_by_a_metric() -> None:
    """Stages begin by the mean over a window of epochs within the stage."""
    stages = by_level({"above": 0.5}, {"above": 0.7}, {"steps": 100})
    play = Play(stages=stages, window=2)
    values = [0.4, 0.5, 0.5, 1.0, float("nan"), 0.5, 1.0, 1.0, 1.0]
    given = [{"success_rate": value} for value in values]
    assert [play.epoch(**metrics) for metrics in given] == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert play.stages == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert play.epoch() == 3


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_curriculum_stages_return_with_back(sign: float) -> None:
    """With `back`, stages return in both directions of the metric."""
    key = "above" if sign > 0 else "below"
    stages = by_level(*[{key: sign * 0.8, "back": sign * 0.2}] * 2)
    play = Play(stages=stages, window=1, metric="train/m")
    values = [0.2, 0.8, 0.3, 0.2, 0.1, 0.9, 0.9, 0.9, 0.0, 0.0]
    levels = [play.epoch(m=sign * value) for value in values]
    assert levels == [0, 1, 1, 0, 0, 1, 2, 2, 1, 0]
    play = Play(stages=by_level({key: sign * 0.8}), window=1, metric="train/m")
    assert [play.epoch(m=sign * value) for value in (0.9, 0.0, 0.0)] == [1, 1, 1]


def test_a_success_rate_is_zero_until_an_episode_reports_success() -> None:
    """Stages below a success rate begin before the first success."""
    play = Play(stages=by_level({"below": 0.1}, {"above": 0.5}), window=1)
    assert [play.epoch(episodes=3), play.epoch(episodes=3)] == [1, 1]
    assert play.epoch(episodes=3, success_rate=0.5) == 2


def test_curriculum_calls_accept_all_kinds_of_arguments() -> None:
    """Calls with no, one, several and keyword arguments."""
    made: list[Any] = []
    calls = {"one": 1, "two": [1, 2], "named": {"a": 1}, "none": []}
    play = Play(stages=[{"calls": calls}])
    env: Any = SimpleNamespace(
        **{name: lambda *a, n=name, **kw: made.append((n, a, kw)) for name in calls}
    )
    for call in play.made:
        call.make(env)
    assert made == [
        ("one", (1,), {}),
        ("two", (1, 2), {}),
        ("named", (), {"a": 1}),
        ("none", (), {}),
    ]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"steps": 3}], r"stages\[0\]: has a condition .* required for all but the first"),
        ([{}, {"attributes": {"x": 1}}], r"stages\[1\]: has no condition"),
        ([{}, {"steps": 1, "above": 2}], r"stages\[1\]: set only one of steps, above and below"),
        ([{}, {"steps": 0}], r"stages\[1\].steps = 0: "),
        (by_level({"steps": 5}, {"steps": 5}), r"stages\[2\].steps = 5: expected more than 5"),
        ([{}, {"steps": 5}], r"stages\[1\]: has no effect; set attributes or calls"),
        (by_level({"above": 1, "back": 1}), r"stages\[1\].back = 1.0: expected less than above"),
        (by_level({"below": 1, "back": 0}), r"stages\[1\].back = 0.0: .* or more than below"),
        (by_level({"steps": 1, "back": 0}), r"stages\[1\].back = 0.0: expected less than above"),
        (
            [{}, {"above": 1, "back": 0, "calls": {"x": 1}}],
            r"stages\[1\] = \['x'\]: with .back., all stages must set the same",
        ),
        ([{}, {"step": 1}], r"stages\[1\].step"),
    ],
)
def test_invalid_curriculum_stages_raise(stages: Any, message: str) -> None:
    """Invalid stages raise an error before the run."""
    with pytest.raises(ConfigError, match=f"curriculum.{message}"):
        short_run(**LEVELS, **{"curriculum.stages": stages})


@pytest.mark.usefixtures("empty_directory")
@pytest.mark.parametrize(
    ("stages", "metric", "error", "message"),
    [
        (
            [*by_level({"steps": 9999}), {"steps": 10000, "attributes": {"levels": 1}}],
            "train/success_rate",
            ConfigError,
            r"curriculum.stages\[2\].attributes = 'levels': .*such attribute.*level, .*size",
        ),
        (
            [{}, {"steps": 9999, "calls": {"set_levl": 1}}],
            "train/success_rate",
            ConfigError,
            r"curriculum.stages\[1\].calls = 'set_levl': .*such method.*set_level",
        ),
        (
            by_level({"above": 1}),
            "train/sucess_rate",
            CallbackError,
            "ConfigError: curriculum.metric = 'train/sucess_rate': not reported",
        ),
    ],
)
def test_unknown_names_of_stages_raise_at_the_start(
    stages: Any, metric: str, error: Any, message: str
) -> None:
    """Names of all stages are checked at the start."""
    with pytest.raises(error, match=message):
        short_run(**LEVELS, **{"curriculum.stages": stages, "curriculum.metric": metric})
    assert not Path("run/metrics.csv").exists() or len(rows("run")) == 1


def test_curriculum_of_bc_raises(tmp_path: Path) -> None:
    """Behavioral cloning does not support a curriculum."""
    given = {"curriculum.stages": by_level(), "runner.dataset": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"curriculum.stages = 1: bc does not use environments"):
        train(env="CartPole-v1", algorithm="bc", **given)


@pytest.mark.usefixtures("empty_directory")
def test_console_shows_curriculum_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """The console shows the start of stages and the current stage."""
    stages = by_level({"steps": 64})
    short_run(**LEVELS, **{"curriculum.stages": stages, "tracking.progress": "lines"})
    printed = capsys.readouterr()
    assert "curriculum: stage 1 (last: 1) begins at 64 steps" in printed.err
    assert "  stage 1  " in printed.out
