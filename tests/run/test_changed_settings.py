"""Settings that change during a run or when it is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from own_callbacks import Changes
from run_cases import FORK, ONE_EPOCH, assert_same_training, go_on, start
from short_runs import PPO, rows, short_run

from maze_train import Callback, CallbackError, ConfigError, train
from maze_train.algorithms.es.config import ESAlgorithmConfig
from maze_train.algorithms.ppo.config import PPOAlgorithmConfig
from maze_train.algorithms.ppo.learner import PPOLearner
from maze_train.algorithms.sac.config import SACAlgorithmConfig
from maze_train.learner.config import Progress
from maze_train.training.changes import ChangedSettings

OWN = {"trust": ["own_envs", "own_callbacks"]}
CONSTANT = {"algorithm.lr": 1e-3}


@pytest.mark.parametrize(
    ("config", "key", "value", "message"),
    [
        (PPOAlgorithmConfig(), "batch_size", 8, r"batch_size = 8: may not change while a run "),
        (PPOAlgorithmConfig(), "n_epochs", 8, r"may only change on resume; .* lr, "),
        (PPOAlgorithmConfig(), "cliprange", 1, r"did you mean 'clip_range'"),
        (PPOAlgorithmConfig(), "clip_range", -1, r"^algorithm.clip_range = -1.*> 0"),
        (PPOAlgorithmConfig(), "lr", "linear_1", r"the length of the run is unknown"),
        (PPOAlgorithmConfig(lr_scheduler={"_target_": "x"}, lr=1), "lr", 2, "lr_scheduler changes"),
        (PPOAlgorithmConfig(), "overrides.cat.lr", 1, "no such module; .* their policy"),
        (PPOAlgorithmConfig(), "overrides.wolf.optimizer", "x", "may not change while a run"),
        (PPOAlgorithmConfig(), "overrides.wolf.lr", -1, r"^algorithm.overrides.wolf.lr = -1"),
        (PPOAlgorithmConfig(lr=1), "overrides.wolf.lr", "linear_1", "the length of the run is unk"),
        (
            PPOAlgorithmConfig(overrides={"wolf": {"lr_scheduler": {"_target_": "x"}, "lr": 1}}),
            "overrides.wolf.lr",
            2,
            "lr_scheduler changes",
        ),
        (PPOAlgorithmConfig(), "overrides.wolf", {"lr": 1}, "may not change while a run trains"),
        (ESAlgorithmConfig(), "overrides.wolf.lr", 1, "overrides = .*unknown"),
        (SACAlgorithmConfig(), "entropy_coef", 2, "tuned by algorithm.entropy_tuning"),
        (
            SACAlgorithmConfig(entropy_tuning=False),
            "target_entropy_multiplier",
            2,
            "has no effect without algorithm.entropy_tuning",
        ),
    ],
)
def test_unchangeable_settings_raise(config: Any, key: str, value: Any, message: str) -> None:
    """The error states the reason and the settings that may change."""
    settings = ChangedSettings(config)
    with pytest.raises(ConfigError, match=message):
        settings.change(f"algorithm.{key}", value, has_progress=False, module_ids=["wolf"])
    with pytest.raises(ConfigError, match=r"expected one of .*max_grad_norm"):
        settings.change("evaluation.interval", 1, has_progress=True)
    assert settings.current is config
    assert not settings.are_changed


def test_settings_given_on_resume_take_precedence() -> None:
    """Settings passed on resume replace changes in the checkpoint."""
    settings = ChangedSettings(PPOAlgorithmConfig(lr=1.0))
    settings.change("algorithm.lr", "linear_8", has_progress=True)
    settings.change("algorithm.target_kl", 0.3, has_progress=True)
    assert settings.metrics(Progress(fraction=0.25)) == {
        "settings/lr": 6.0,
        "settings/target_kl": 0.3,
    }
    again = ChangedSettings(PPOAlgorithmConfig(lr=1.0))
    assert not again.load_state_dict(settings.state_dict())
    assert again.current == settings.current
    again = ChangedSettings(PPOAlgorithmConfig(lr=3.0))
    assert again.load_state_dict(settings.state_dict())
    assert again.current == PPOAlgorithmConfig(lr=3.0, target_kl=0.3)
    assert list(again.metrics(Progress())) == ["settings/target_kl"]


def test_changed_module_settings_resume() -> None:
    """They replace the shared settings of one module, and resume with the changes."""
    given = PPOAlgorithmConfig(lr=1.0, overrides={"wolf": {"entropy_coef": 0.5}})
    settings, modules = ChangedSettings(given), ["wolf", "sheep"]
    for name, value in (("wolf.lr", 2.0), ("wolf.entropy_coef", 0.1), ("sheep.lr", "linear_8")):
        settings.change(f"algorithm.overrides.{name}", value, True, module_ids=modules)
    wanted = {"wolf": {"entropy_coef": 0.1, "lr": 2.0}, "sheep": {"lr": "linear_8"}}
    assert settings.current == PPOAlgorithmConfig(lr=1.0, overrides=wanted)
    assert settings.metrics(Progress(fraction=0.25)) == {
        "settings/sheep/lr": 6.0,
        "settings/wolf/entropy_coef": 0.1,
        "settings/wolf/lr": 2.0,
    }
    again = ChangedSettings(given)
    assert not again.load_state_dict(settings.state_dict())
    assert again.current == settings.current


TWO_LEARNERS = {**FORK, "learner_group.n_learners": 2, "algorithm.device": "cpu"}


@pytest.mark.parametrize("learners", [{}, TWO_LEARNERS])
def test_learners_repeat_changed_module_settings(learners: dict[str, Any], tmp_path: Path) -> None:
    """Resumed runs and several learners repeat them."""
    start("agents: ppo, changes", tmp_path / "whole", **learners)
    start("agents: ppo, changes", tmp_path / "run", **ONE_EPOCH, **learners)
    go_on(resume=str(tmp_path / "run"), **{"algorithm.n_epochs": 4})
    assert_same_training(tmp_path / "run", tmp_path / "whole")
    last = rows(tmp_path / "whole")[-1]
    assert 1e-4 < float(last["settings/first/lr"]) < 1e-3
    assert last["train/referee/learning_rate"] == "0.0005"
    assert float(last["train/first/learning_rate"]) == pytest.approx(
        float(last["settings/first/lr"]), rel=0.2
    )


@pytest.mark.usefixtures("empty_directory")
def test_resume_may_change_the_changeable_settings() -> None:
    """Changes apply from the next update on."""
    callback = Changes([[1, "entropy_coef", 0.1]])
    first = {"algorithm.n_epochs": 1}
    short_run("run", callbacks=[callback], **CONSTANT, **first)
    given = {"algorithm.lr": 2e-3, "algorithm.clip_range": 0.1, "algorithm.n_epochs": 2}
    train(resume="run", callbacks=[callback], **given, **OWN)
    found = rows("run")
    assert [row["train/learning_rate"] for row in found] == ["0.001", "0.002"]
    assert [row["train/entropy_coef"] for row in found] == ["0.1", "0.1"]
    assert [row["settings/entropy_coef"] for row in found] == ["0.1", "0.1"]
    assert found[1]["train/clip_range"] == "0.1"
    scheduler = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 1}
    with_scheduler = {**PPO, **CONSTANT, **first, "algorithm.lr_scheduler": scheduler}
    short_run("other", **with_scheduler)
    with pytest.raises(ConfigError, match=r"algorithm\.lr = 0\.002: .* affects the results"):
        train(resume="other", **given, **OWN)


@pytest.mark.usefixtures("empty_directory")
def test_fixed_temperature_may_change_on_resume() -> None:
    """The setting replaces the temperature in the checkpoint."""
    fixed = {"algorithm.entropy_tuning": False, "algorithm.entropy_coef": 0.5}
    short_run("run", "sac", **fixed, total_steps=64)
    result = train(resume="run", total_steps=128, **{"algorithm.entropy_coef": 0.25}, **OWN)
    assert result.history[-1]["train/entropy_coef"] == pytest.approx(0.25)


@pytest.mark.usefixtures("empty_directory")
def test_rejected_change_leaves_all_learners_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rejected change leaves all learners unchanged."""
    configure = PPOLearner.configure_optimizers_for_module

    def refuse(self: Any, module_id: str) -> None:
        configure(self, module_id)
        if self.config.lr == 7.0:
            raise ConfigError("lr", "too large", 7.0)

    monkeypatch.setattr(PPOLearner, "configure_optimizers_for_module", refuse)

    class Tries(Callback):
        seen: Any = None

        def on_update_end(self, run: Any) -> None:
            with pytest.raises(ConfigError, match="too large"):
                run.set("algorithm.lr", 7.0)
            rates = run.algorithm.lr, run.learner.config.lr, run.learner.get_optimizer().lr
            self.seen = rates, run.learner.config_of("default").lr

    tries = Tries()
    result = short_run(callbacks=[tries], **CONSTANT)
    assert tries.seen == ((1e-3, 1e-3, 1e-3), 1e-3)
    assert "settings/lr" not in result.history[-1]


@pytest.mark.usefixtures("empty_directory")
def test_callbacks_may_not_change_settings_in_on_checkpoint() -> None:
    """Changes are not allowed in `on_checkpoint` and have no effect at a resumed start."""

    class Halves(Callback):
        def __init__(self, hook: str) -> None:
            self.seen: list[float] = []
            self.hook = hook

        def act(self, run: Any) -> None:
            run.set("algorithm.lr", 0.5 * run.algorithm.lr)
            self.seen.append(run.algorithm.lr)

        def on_run_start(self, run: Any) -> None:
            self.act(run)

        def on_checkpoint(self, run: Any) -> None:
            if self.hook == "on_checkpoint":
                self.act(run)

    for number in (1, 2):
        first = Halves("on_run_start")
        short_run(callbacks=[first], resume="auto", **CONSTANT, **{"algorithm.n_epochs": number})
        assert first.seen == [0.0005]
    with pytest.raises(CallbackError, match="not available in on_checkpoint"):
        short_run("other", callbacks=[Halves("on_checkpoint")], **CONSTANT)


@pytest.mark.usefixtures("empty_directory")
def test_run_value_is_the_current_number_of_a_setting() -> None:
    """Schedules have the value of the current progress; adapted learning rates the current one."""

    class Reads(Callback):
        def __init__(self) -> None:
            self.seen: list[list[float]] = []
            self.rates: list[float | None] = []

        def on_epoch_end(self, run: Any) -> None:
            keys = ("algorithm.lr", "algorithm.entropy_coef", "algorithm.batch_size")
            self.seen.append([run.value(key) for key in keys])
            self.rates.append(run.metrics.get("train/learning_rate"))
            if len(self.seen) == 1:
                for key in ("lr", "algorithm.optimizer", "algorithm.grad_clip_by"):
                    with pytest.raises(ConfigError, match=f"^{key}: not a number of the algorithm"):
                        run.value(key)
                with pytest.raises(ConfigError, match=r"^lr = 1: unknown; did you mean algorithm"):
                    run.set("lr", 1)

    scheduled, adaptive = Reads(), Reads()
    coef = {"start": 0.5, "end": 0.0}
    short_run("scheduled", callbacks=[scheduled], **{**CONSTANT, "algorithm.entropy_coef": coef})
    short_run("adaptive", callbacks=[adaptive], **{**CONSTANT, "algorithm.lr": "adaptive_kl"})
    assert scheduled.seen[0] == pytest.approx([1e-3, 0.5 * 2 / 3, 16.0])
    assert [seen[0] for seen in adaptive.seen] == adaptive.rates
