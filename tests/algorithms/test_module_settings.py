"""Settings of individual modules, for each setting and algorithm."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from cases import everyday
from gymnasium import spaces
from torch import nn
from update_problems import BOX, SEED, B, T, make_config, make_problem, make_transitions, normal
from update_problems import perturbed as moved

from maze_train.algorithms.a2c.learner import A2CLearner
from maze_train.algorithms.dqn.config import DQNAlgorithmConfig
from maze_train.algorithms.dqn.learner import DQNLearner
from maze_train.algorithms.dqn.model import build_dqn
from maze_train.algorithms.impala.learner import ImpalaLearner
from maze_train.algorithms.ppo.learner import PPOLearner
from maze_train.algorithms.sac.config import SACAlgorithmConfig
from maze_train.algorithms.sac.learner import SACLearner
from maze_train.algorithms.sac.model import build_soft_actor_critic
from maze_train.algorithms.td3.config import TD3AlgorithmConfig
from maze_train.algorithms.td3.learner import TD3Learner
from maze_train.algorithms.td3.model import build_td3
from maze_train.core.errors import ConfigError
from maze_train.learner.config import Progress
from maze_train.learner.flat_parameters import get_flat_parameters
from maze_train.nets.config import ModelConfig

pytestmark = pytest.mark.usefixtures("float64")

SMALL = ModelConfig(hidden_sizes=[6, 5], branch_size=3)
SCHEDULER = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 1, "gamma": 0.5}

# By setting: another value, and the other settings needed for an effect.
GRADIENTS = {
    "lr": ([[0, 0.01], [100, 0.001]], {}),
    "lr_scheduler": (SCHEDULER, {"lr": 0.01}),
    "optimizer": ({"_target_": "torch.optim.SGD"}, {}),
    "max_grad_norm": (0.001, {}),
    "grad_clip_by": ("value", {"max_grad_norm": 0.001}),
}
ACTOR_CRITIC = {
    **GRADIENTS,
    "gamma": (0.5, {}),
    "gae_lambda": (0.5, {}),
    "policy_loss_coef": (2.0, {}),
    "value_loss_coef": (2.0, {}),
    "entropy_coef": ({"start": 0.5, "end": 0.0}, {}),
}
REWARDS = {
    "reward_scaling": (True, {}),
    "scaled_reward_clip": (0.5, {"reward_scaling": True}),
}
OFF_POLICY = {**GRADIENTS, "tau": (0.5, {"lr": 0.05})}
SETTINGS = {
    A2CLearner: {**ACTOR_CRITIC, **REWARDS},
    PPOLearner: {
        **ACTOR_CRITIC,
        **REWARDS,
        "clip_range": (0.001, {}),
        "value_clip_range": (0.01, {}),
    },
    ImpalaLearner: {
        **ACTOR_CRITIC,
        "vtrace_clip_rho_threshold": (0.1, {}),
        "vtrace_clip_pg_rho_threshold": (0.1, {}),
        "loss_reduction": ("sum", {}),
    },
    DQNLearner: {
        **OFF_POLICY,
        "tau": (0.5, {"lr": 0.05, "target_update_interval": 1}),
        "double_q": (False, {"lr": 0.05}),
        "loss": ("squared", {}),
    },
    TD3Learner: {
        **OFF_POLICY,
        "critic_lr": (0.01, {}),
        "target_noise_stddev": (1.0, {}),
        "target_noise_clip": (0.01, {}),
    },
    SACLearner: {
        **OFF_POLICY,
        "critic_lr": (0.01, {}),
        "entropy_coef": (0.1, {}),
        "entropy_coef_lr": (0.1, {}),
        "entropy_tuning": (False, {}),
        "target_entropy_multiplier": (3.0, {}),
    },
}
ON_POLICY = {A2CLearner: "a2c", PPOLearner: "ppo", ImpalaLearner: "impala"}
REPLAY = {
    DQNLearner: (DQNAlgorithmConfig, build_dqn, spaces.Discrete(3)),
    TD3Learner: (TD3AlgorithmConfig, build_td3, spaces.Box(-1.0, 1.0, (2,))),
    SACLearner: (SACAlgorithmConfig, build_soft_actor_critic, spaces.Box(-1.0, 1.0, (2,))),
}


def problem(learner_class, **settings):
    """Return settings of an algorithm, a model and experience."""
    if learner_class in ON_POLICY:
        model, rollout, _ = make_problem()
        rollout = replace(rollout, log_probs=normal(T, B) - 1.0)
        return make_config(ON_POLICY[learner_class], **settings), model, rollout
    config_class, build, action_space = REPLAY[learner_class]
    model = moved(build(SMALL, BOX, action_space, 1, 2 if build is not build_dqn else True))
    config = config_class(**{"lr": 0.003, **settings})
    return config, model.double(), make_transitions(BOX, action_space)


def learned(learner, module_id, experience):
    """Return the parameters of a module after updates with the given experience."""
    for k in range(4):
        learner.update({module_id: experience}, Progress(k * 20, k, 0, k / 4))
    return get_flat_parameters(learner.modules[module_id]).detach().clone()


@pytest.mark.parametrize(
    ("learner_class", "key", "how"),
    everyday(
        25,
        [
            *(
                (learner, key, "at once")
                for learner, settings in SETTINGS.items()
                for key in settings
            ),
            *((PPOLearner, "value_clip_range", "added"), (SACLearner, "critic_lr", "added")),
        ],
        are_rows=True,
    ),
)
def test_module_settings_equal_a_separate_learner(learner_class, key, how):
    """The update is identical to that of a separate learner, and other modules are not affected."""
    value, others = SETTINGS[learner_class][key]
    config, model, experience = problem(learner_class, **others)

    def make(config, *module_ids):
        return learner_class({key: copy.deepcopy(model) for key in module_ids}, config, seed=SEED)

    def both():
        if how == "at once":
            return make(replace(config, overrides={"own": {key: value}}), "all", "own")
        learner = make(config, "all")
        learner.add_module("own", copy.deepcopy(model), overrides={key: value})
        return learner

    found = learned(both(), "own", experience)
    assert torch.equal(
        found, learned(make(config.for_module("x", {key: value}), "own"), "own", experience)
    )
    without = learned(make(config, "all"), "all", experience)
    assert torch.equal(learned(both(), "all", experience), without)
    assert not torch.equal(found, without)


@pytest.mark.parametrize("learner_class", SETTINGS)
def test_frozen_modules_of_any_type_do_not_change(learner_class):
    """Frozen modules of any type keep weights and targets and do not affect other modules."""
    burn_in = {"critic_burn_in_epochs": 1, "epoch_length": 2}
    config, model, experience = problem(
        learner_class, **(burn_in if learner_class in ON_POLICY else {"target_update_interval": 1})
    )
    alone = learner_class(copy.deepcopy(model), config, seed=SEED)
    learner = learner_class(copy.deepcopy(model), config, seed=SEED)
    learner.add_module("other", nn.Linear(2, 2), frozen=True)
    required = learner_class.required_apis[0].__name__
    with pytest.raises(ConfigError, match=f"interface {required}, but Linear is not derived from"):
        learner.add_module("trained", nn.Linear(2, 2))
    old = learner.add_module("old", copy.deepcopy(model), frozen=True)
    for own in (alone, learner):
        learned(own, "default", experience)
    for found, expected in ((learner.module, alone.module), (old, model)):
        torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0.0, atol=0.0)


def test_table_covers_every_module_setting():
    """The table contains every setting that can be set per module."""
    for learner_class, settings in SETTINGS.items():
        bases = type(problem(learner_class)[0]).__mro__
        declared = [name for base in bases for name in vars(base).get("module_settings", ())]
        refused = REWARDS if learner_class is ImpalaLearner else {}
        assert sorted(declared) == sorted({**settings, **refused})


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"gama": 0.5}, r"overrides.x.gama = 0.5: unknown; did you mean overrides.x.gamma\? allow"),
        ({"gamma": 2.0}, r"overrides.x.gamma = 2.0: expected a number in \[0, 1\]"),
        ({"gamma": "a"}, r"overrides.x.gamma = 'a': expected a number"),
        ({"batch_size": 8}, r"overrides.x.batch_size = 8: cannot be set per module; these"),
    ],
)
def test_invalid_module_settings_raise(own, message):
    """The error contains the key and what is expected, and the module is not added."""
    config, model, _ = problem(PPOLearner)
    with pytest.raises(ConfigError, match=message):
        make_config("ppo", overrides={"x": own})
    learner = PPOLearner(model, config)
    with pytest.raises(ConfigError, match=message):
        learner.add_module("x", copy.deepcopy(model), overrides=own)
    assert list(learner.modules) == ["default"]


def test_settings_of_unknown_modules_raise():
    """The error suggests a similar id."""
    config, model, _ = problem(PPOLearner)
    message = r"algorithm.overrides = 'oponent': no such module; similar ids: opponent"
    with pytest.raises(ConfigError, match=message):
        PPOLearner({"opponent": model}, replace(config, overrides={"oponent": {"gamma": 0.5}}))


def test_scheduled_settings_are_reported_by_module():
    """Metrics of `default` have no module name; those of other modules do."""
    shared = {"lr": 0.25, "entropy_coef": 0.5, "clip_range": 0.125}
    own = {key: value / 2 for key, value in shared.items()}
    config, model, experience = problem(PPOLearner, **shared)
    learner = PPOLearner(model, config, seed=SEED)
    learner.add_module("own", copy.deepcopy(model), overrides=own)
    row = learner.update({key: experience for key in learner.modules}, Progress()).reduce()
    for key, value in shared.items():
        name = "learning_rate" if key == "lr" else key
        assert (row[f"train/{name}"], row[f"train/own/{name}"]) == (value, value / 2)


def test_freeze_accepts_plain_names():
    """`freeze` accepts plain names in settings that were not loaded from a configuration."""
    config, model, experience = problem(A2CLearner, freeze=["critic"])
    before = copy.deepcopy(model.critic.state_dict())
    learned(A2CLearner(model, config, seed=SEED), "default", experience)
    torch.testing.assert_close(model.critic.state_dict(), before, rtol=0.0, atol=0.0)
