from __future__ import annotations

import pytest
import torch
from gymnasium import spaces
from practice_learner import ADAM, LineLearner, make_data, make_module
from update_problems import (
    BOX,
    PROBLEMS,
    make_learner,
    make_model,
    make_rollout,
    make_transitions,
    perturbed,
)

from maze_train.algorithms.sac.config import SACAlgorithmConfig
from maze_train.algorithms.sac.learner import SACLearner
from maze_train.algorithms.sac.model import build_soft_actor_critic
from maze_train.core.errors import ConfigError
from maze_train.learner.config import Freeze, Progress, Schedule
from maze_train.learner.flat_parameters import get_flat_parameters
from maze_train.nets.config import ModelConfig, ObservationNormalizationConfig

DECAY = Schedule(start=0.1, end=0.0)
ONE_CYCLE = {
    "_target_": "torch.optim.lr_scheduler.OneCycleLR",
    "max_lr": 0.2,
    "total_steps": 11,
}


class TwoOptimizers(LineLearner):
    """Learner with separate optimizers for weight and bias; the latter is a PyTorch object."""

    def configure_optimizers_for_module(self, module_id):
        module, rate = self.modules[module_id], self.config.lr
        for name, optimizer in (("weight", ADAM), ("bias", torch.optim.Rprop([module.bias]))):
            params = [getattr(module, name)]
            self.register_optimizer(
                module_id, name, optimizer=optimizer, params=params, lr_or_lr_schedule=rate
            )


def line(seed, learner_class=LineLearner, **settings):
    """Return a learner with shuffled minibatches."""
    settings = {"lr": DECAY, "max_grad_norm": 0.5, **settings}
    return learner_class(make_module(seed), seed=seed + 5, **settings)


def modules(seed):
    """Return a learner of modules: with other settings, not trained, and frozen."""
    overrides = {"default": {"lr": [[0, 0.1], [70, 0.01]], "optimizer": {**ADAM, "amsgrad": True}}}
    learner = line(seed, overrides=overrides)
    for number, module_id in enumerate(("waits", "frozen", "opponent"), start=1):
        learner.add_module(module_id, make_module(seed + number), frozen=module_id == "opponent")
    if seed == 0:
        learner.policies_to_train = ["default", "frozen"]
        learner.update({"default": make_data(), "frozen": make_data()}, Progress())
        learner.freeze_module("frozen")
    return learner


def sac(seed):
    """Return a learner with target networks, three optimizers and random losses."""
    hand = spaces.Box(-1.0, 1.0, (2,))
    model = perturbed(build_soft_actor_critic(ModelConfig(hidden_sizes=[6]), BOX, hand, seed))
    freeze = [Freeze(params=["policy"], period=3, stop=1)]
    intervals = {"policy_update_interval": 2, "target_update_interval": 3}
    config = SACAlgorithmConfig(lr=0.01, critic_lr=DECAY, freeze=freeze, **intervals)
    return SACLearner(model, config, seed=seed)


def ppo(seed, **settings):
    """Return a learner with scaled rewards, running statistics and scheduled losses."""
    normalization = ObservationNormalizationConfig(mode="running")
    model = perturbed(make_model(*PROBLEMS["discrete"], normalization=normalization), seed).float()
    schedules = {"clip_range": Schedule(start=0.3, end=0.1), "entropy_coef": DECAY}
    learner = make_learner(
        "ppo", model, reward_scaling=True, gradient_accumulation=2, **schedules, **settings
    )
    learner.generator.manual_seed(seed)
    return learner


LEARNERS = {
    **{
        name: lambda seed, name=name: line(seed, optimizer={"_target_": f"torch.optim.{name}"})
        for name in ("Adam", "RMSprop", "Rprop", "NAdam")
    },
    "factors and windows": lambda seed: line(
        seed, lr_factors={"bias": 3.0}, freeze=[Freeze(params=["weight"], period=4, stop=2)]
    ),
    "scheduler of torch": lambda seed: line(seed, lr=0.1, lr_scheduler=ONE_CYCLE),
    "scaled losses, gathered": lambda seed: line(seed, autocast="float16", gradient_accumulation=2),
    "two optimizers": lambda seed: line(seed, TwoOptimizers),
    "modules": modules,
    "sac": sac,
    "ppo": ppo,
    "ppo, adaptive rate": lambda seed: ppo(seed, lr={"adaptive_kl": 0.02, "start": 0.001}),
}
EXPERIENCE = {
    "sac": lambda k: make_transitions(BOX, spaces.Box(-1.0, 1.0, (2,)), k),
    "ppo": lambda k: make_rollout(*PROBLEMS["discrete"], k),
    "ppo, adaptive rate": lambda k: make_rollout(*PROBLEMS["discrete"], k),
    "modules": lambda k: {key: make_data(k) for key in ("default", "waits", "frozen")},
}


def train(learner, experience, first, last):
    """Run updates `first` to `last - 1` of 10; return their statistics."""
    return [
        learner.update(experience(k), Progress(10 * k, k, fraction=k / 10)).reduce()
        for k in range(first, last)
    ]


@pytest.mark.parametrize("name", LEARNERS)
def test_restored_learner_continues_bit_for_bit(name, tmp_path):
    """Five updates, a file, and five updates of another learner equal ten updates."""
    make, experience = LEARNERS[name], EXPERIENCE.get(name, make_data)
    straight, first, second = make(0), make(0), make(1)
    rows = train(straight, experience, 0, 10)
    assert train(first, experience, 0, 5) == rows[:5]
    first.save_to_path(tmp_path / "state")
    train(first, experience, 5, 6)  # The saved state must not change with the learner.
    second.restore_from_path(tmp_path / "state")
    assert train(second, experience, 5, 10) == rows[5:]
    assert second.weights_seq_no == straight.weights_seq_no
    for key, module in straight.modules.items():
        for ours, theirs in zip(
            module.state_dict().values(), second.modules[key].state_dict().values(), strict=True
        ):
            assert torch.equal(ours, theirs)


def test_frozen_and_selected_modules_are_restored():
    """Frozen and selected modules are restored, including the optimizer state of frozen modules."""
    source, target = modules(0), modules(1)
    data = EXPERIENCE["modules"]
    train(source, data, 0, 2)
    target.load_state_dict(source.state_dict())
    assert target.policies_to_train == ["default", "frozen"]
    assert target.modules.frozen == {"frozen", "opponent"}
    for learner in (source, target):
        learner.policies_to_train = None
        learner.freeze_module("frozen", frozen=False)
        learner.freeze_module("frozen", frozen=False)
        train(learner, data, 2, 4)
    for key in source.modules:
        ours, theirs = (get_flat_parameters(learner.modules[key]) for learner in (source, target))
        assert torch.equal(ours, theirs)
    source.freeze_module("opponent", frozen=False)
    before = get_flat_parameters(source.modules["opponent"]).detach()
    train(source, lambda k: {"opponent": make_data(k)}, 4, 5)
    assert not torch.equal(get_flat_parameters(source.modules["opponent"]), before)
    frozen = modules(1)
    frozen.load_state_dict(source.state_dict())
    assert frozen.modules.frozen == set()
    assert frozen.get_optimizer("opponent").optimizer.state


def test_policies_to_train_function_is_not_saved():
    """A function `policies_to_train` must be set before the state is loaded."""
    source, target = line(0), line(1)
    source.policies_to_train = lambda module_id, experience: True
    with pytest.raises(ConfigError, match=r"policies_to_train = None: was a func"):
        target.load_state_dict(source.state_dict())
    target.policies_to_train = source.policies_to_train
    target.load_state_dict(source.state_dict())
    assert target.policies_to_train is source.policies_to_train


def test_get_weights_copies_and_set_weights_writes_in_place():
    """Returned weights are copies; `set_weights` keeps the tensors of the module."""
    learner = line(0)
    weights = learner.get_weights()
    kept = weights["default"]["weight"].clone()
    place = learner.module.weight.data_ptr()
    train(learner, make_data, 0, 2)
    assert torch.equal(weights["default"]["weight"], kept)
    assert not torch.equal(learner.module.weight, kept)
    learner.set_weights(weights)
    assert torch.equal(learner.module.weight.detach(), kept)
    assert learner.module.weight.data_ptr() == place
    weights["default"]["weight"].zero_()
    assert torch.equal(learner.module.weight.detach(), kept)
