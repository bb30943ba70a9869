from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from gymnasium import spaces
from practice_learner import LineLearner, LineSettings, make_data, make_module
from torch import nn

from maze_train import ConfigError, Progress, get_flat_parameters
from maze_train.learner.apis import HasPolicy, HasTargets, missing_names
from maze_train.learner.config import Schedule
from maze_train.learner.events import LearnerEvents
from maze_train.nets.config import ModelConfig
from maze_train.nets.policy_model import build_policy


def train(learner, *modules, first=0, count=3):
    """Update the modules several times; data depends on the number of the update."""
    for k in range(first, first + count):
        learner.update({key: make_data(k) for key in modules}, Progress(updates=k))


def weights(learner, module_id):
    """Return the weights of a module as one vector."""
    return get_flat_parameters(learner.modules[module_id]).detach()


def alone(first=0, count=3, start=None):
    """Return the weights of a module trained in a separate learner."""
    learner = LineLearner(make_module(1) if start is None else start, batch_size=10)
    train(learner, "default", first=first, count=count)
    return weights(learner, "default")


def test_modules_can_be_added_and_removed_during_training():
    """Each module learns as if alone; a module that is added again has a new optimizer state."""
    learner = LineLearner({"a": make_module(0)}, batch_size=10)
    train(learner, "a")
    module = learner.add_module("b", make_module(1))
    assert module is learner.modules["b"]
    train(learner, "a", "b", first=3)
    torch.testing.assert_close(weights(learner, "b"), alone(first=3))
    before = weights(learner, "b").clone()
    assert learner.remove_module("b") is module
    assert list(learner.modules) == ["a"]
    assert list(learner.optimizers) == [("a", "default")]
    train(learner, "a", first=6)
    assert torch.equal(get_flat_parameters(module), before)
    learner.add_module("b", module)
    train(learner, "a", "b", first=9)
    twin = make_module()
    nn.utils.vector_to_parameters(before, twin.parameters())
    torch.testing.assert_close(weights(learner, "b"), alone(first=9, start=twin))
    only = LineLearner({"a": make_module(0)}, batch_size=10)
    train(only, "a", count=12)
    torch.testing.assert_close(weights(learner, "a"), weights(only, "a"), rtol=1e-5, atol=1e-6)


def test_modules_are_added_from_functions_or_weights():
    """Weights are loaded into a copy of another module, which is unchanged."""
    learner = LineLearner({"a": make_module(0)})
    made = learner.add_module("made", lambda: make_module(1))
    assert torch.equal(made.weight, make_module(1).weight)
    kept = weights(learner, "a").clone()
    copied = learner.add_module("copy", make_module(2).state_dict(), like="a")
    assert torch.equal(copied.weight, make_module(2).weight)
    assert torch.equal(weights(learner, "a"), kept)
    train(learner, "copy", count=1)
    assert not torch.equal(copied.weight, make_module(2).weight)
    assert torch.equal(weights(learner, "a"), kept)
    learner.add_module("old", make_module(3), frozen=True)
    of_frozen = learner.add_module("new", make_module(3).state_dict(), like="old")
    train(learner, "new", count=1)
    assert not torch.equal(of_frozen.weight, make_module(3).weight)


def test_frozen_modules_need_no_attributes():
    """Frozen modules need no attributes, have no optimizer and are not trained."""

    class Asks(LineLearner):
        required_apis = (HasPolicy,)

    learner = Asks({})
    opponent = learner.add_module("opponent", make_module(1), frozen=True)
    assert learner.optimizers == {}
    train(learner, "opponent")
    assert torch.equal(opponent.weight, make_module(1).weight)
    assert learner.weights_seq_no == 3
    assert not any("loss" in call for call in learner.calls)
    learner.remove_module("opponent")
    message = r"module = 'opponent': Asks only trains .* HasPolicy, .* Linear has no policy and no "
    with pytest.raises(ConfigError, match=message):
        learner.add_module("opponent", opponent)
    assert learner.modules == {}


@pytest.mark.parametrize("name", ["policy", "distribution", "update_targets", None])
def test_module_without_required_attributes_raises(name):
    """The error names missing attributes and methods."""

    class Asks(LineLearner):
        required_apis = (HasPolicy, HasTargets)

    module = make_module()
    for other in {"policy", "distribution", "update_targets"} - {name}:
        setattr(module, other, None)
    if name is None:
        assert list(Asks(module).modules) == ["default"]
        return
    with pytest.raises(ConfigError, match=rf"Linear has no {name};"):
        Asks(module)


def test_policy_is_found_among_submodules():
    """The policy is found among submodules, and its free parameters are limited."""
    settings = ModelConfig(
        hidden_sizes=[4],
        distributions={"Box": {"_target_": "maze_train.DiagonalGaussian", "log_std_max": 0.0}},
    )
    space = spaces.Box(-1.0, 1.0, (2,))
    model = build_policy(settings, space, space, seed=0)
    learner = LineLearner(model)
    assert learner.modules.policies == {"default": model.policy}
    model.policy.free_params.data.fill_(1.0)
    learner.modules.limit_free_params()
    assert model.policy.free_params.tolist() == [0.0, 0.0]
    module = make_module()
    module.register_buffer("distribution", torch.zeros(1))
    assert missing_names(HasPolicy, module) == ["policy"]


@pytest.mark.parametrize(
    "chosen",
    [["a"], {"a"}, lambda module_id, experience: len(experience) > 6],
    ids=["list", "set", "function"],
)
def test_policies_to_train_selects_modules(chosen):
    """`policies_to_train` is a collection, a function of the experience, or None for all."""
    learner = LineLearner({"a": make_module(0), "b": make_module(1)})
    learner.policies_to_train = chosen
    before = {key: weights(learner, key).clone() for key in "ab"}
    learner.update({"a": make_data(), "b": make_data(size=5)}, Progress())
    assert not torch.equal(weights(learner, "a"), before["a"])
    assert torch.equal(weights(learner, "b"), before["b"])
    row = learner.update({"b": make_data(size=5)}, Progress()).reduce()
    assert "train/gradient_steps" not in row
    assert learner.weights_seq_no == 2
    learner.policies_to_train = None
    learner.update({"b": make_data(size=5)}, Progress())
    assert not torch.equal(weights(learner, "b"), before["b"])


def test_invalid_module_changes_nothing():
    """Invalid ids, weights and optimizers raise an error without changes."""
    learner = LineLearner({"a": make_module(0)})
    shared = nn.Sequential(learner.modules["a"])
    cases = [
        ("a", make_module(), r"module_id = 'a': this ID is already in use"),
        ("x/y", make_module(), r"module_id = 'x/y': expected a name without /"),
        ("b", shared, r"optimizer: 'default' of module 'b' shares parameters"),
        ("b", {"weight": torch.zeros(1, 2)}, r"module: weights do not fit 'a': .*bias"),
    ]
    for module_id, module, message in cases:
        with pytest.raises(ConfigError, match=message):
            learner.add_module(module_id, module, like="a", overrides={"lr": 0.5})
        assert list(learner.modules) == ["a"]
        assert list(learner.optimizers) == [("a", "default")]
        assert learner.modules.overrides == {}
    with pytest.raises(ConfigError, match=r"module_id = 'b': no such module; available: a"):
        learner.remove_module("b")


@dataclass(kw_only=True)
class Weighted(LineSettings):
    """Settings with a loss weight."""

    module_settings: ClassVar[tuple[str, ...]] = ("weight",)
    weight: float | Schedule = 1.0


def test_removed_module_leaves_no_settings():
    """Schedules of a removed module are freed; a new module starts with default settings."""

    class Scheduled(LineLearner):
        settings_class = Weighted
        scheduled_settings: ClassVar[Any] = {"weight": LearnerEvents.learning_rate}

    learner = Scheduled({"a": make_module(0)})
    learner.add_module("b", make_module(1), overrides={"weight": "linear_0.5"})
    assert float(learner.config_of("b").weight) == 0.5
    value = weakref.ref(learner.config_of("b").weight)
    learner.remove_module("b")
    assert value() is None
    assert learner.config_of("b") is learner.config_of("c")


def test_overrides_apply_to_a_module_added_again():
    """Before and after a change of settings; overrides of `add_module` are added to them."""

    class WithWeight(LineLearner):
        settings_class = Weighted

    overrides = {"b": {"lr": 0.5}}
    learner = WithWeight({"a": make_module(0), "b": make_module(1)}, overrides=overrides)
    for given, weight in (({"weight": 2.0}, 2.0), (None, 1.0)):
        learner.remove_module("b")
        learner.add_module("b", make_module(1), overrides=given)
        for _ in range(2):
            assert vars(learner.config_of("b")).items() >= {"lr": 0.5, "weight": weight}.items()
            learner.modules.change_settings(learner.config)


def test_state_of_other_modules_raises():
    """The error explains which modules to add or remove before loading."""
    learner = LineLearner({"a": make_module(0)})
    learner.add_module("b", make_module(1))
    with pytest.raises(ConfigError, match=r"module_id = 'a, b': .* other modules than a: call"):
        LineLearner({"a": make_module(2)}).load_state_dict(learner.state_dict())


def test_unknown_optimizer_raises():
    """An unknown optimizer is named in the error."""
    learner = LineLearner({"default": make_module(0), "b": make_module(1)})
    found = learner.get_optimizer("b")
    assert found is learner.optimizers["b", "default"]
    assert learner.get_optimizers_for_module("b") == [("default", found)]
    assert learner.get_optimizer() is learner.optimizers["default", "default"]
    with pytest.raises(ConfigError, match=r"'b/x': no such optimizer; .* default/default, b/defau"):
        learner.get_optimizer("b", "x")
