"""Updates of SAC match a slow reference in float64."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from reference_sac import SlowSAC
from torch import nn
from update_problems import ARM, BOX, PARTS, make_transitions, perturbed

from maze_train import get_flat_parameters
from maze_train.algorithms.sac.config import SACAlgorithmConfig
from maze_train.algorithms.sac.learner import SACLearner
from maze_train.algorithms.sac.model import build_soft_actor_critic
from maze_train.core.errors import ConfigError
from maze_train.learner.config import Progress
from maze_train.nets.config import ModelConfig

pytestmark = pytest.mark.usefixtures("float64")
N, SEED, LR = 7, 3, 0.02
REACH = spaces.Box(np.array([-3.0, 0.0]), np.array([1.0, 100.0]), (2,), np.float64)
IMAGE = spaces.Box(0, 255, (12, 12, 1), np.uint8)
MASKED = spaces.Dict({"x": BOX, "action_mask": spaces.MultiBinary(3)})
MIXED = spaces.Dict(
    {
        "aim": REACH,
        "gear": spaces.Discrete(3),
        "lights": spaces.MultiBinary(2),
        "turn": spaces.Box(-1.0, 1.0, (1,), np.float64),
        "menu": spaces.MultiDiscrete([2, 3]),
    }
)
PROBLEMS = {
    "box": (BOX, REACH),
    "discrete": (BOX, spaces.Discrete(3)),
    "multi_discrete": (BOX, spaces.MultiDiscrete([2, 3])),
    "multi_binary": (BOX, spaces.MultiBinary(3)),
    "tuple": (PARTS, ARM),
    "mixed": (BOX, MIXED),
    "image": (IMAGE, REACH),
    "masked": (MASKED, spaces.Discrete(3)),
}


class OwnPolicy(nn.Module):
    """User-defined policy network."""

    def __init__(self, observation_space, output_size):
        super().__init__()
        self.layer = nn.Linear(observation_space.shape[0], output_size)

    def forward(self, obs):
        return torch.sin(self.layer(obs.to(self.layer.weight.dtype)))


class OwnCritic(nn.Module):
    """User-defined critic."""

    def __init__(self, observation_space, action_size, output_size):
        super().__init__()
        self.layer = nn.Linear(observation_space.shape[0] + action_size, output_size)

    def forward(self, obs, actions):
        x = torch.cat([obs.to(self.layer.weight.dtype), actions.to(self.layer.weight.dtype)], -1)
        return torch.cos(self.layer(x))


class Wrong(nn.Module):
    """Critic with one output too many."""

    def __init__(self, observation_space, action_size, output_size):
        super().__init__()
        self.size = output_size + 1

    def forward(self, obs, actions):
        return obs.new_zeros(len(obs), self.size)


def make_model(observation_space, action_space, num_critics=2, **settings):
    """Return a small perturbed model whose targets differ from the critics."""
    config = ModelConfig(**{"hidden_sizes": [6, 5], "branch_size": 3, **settings})
    torch.set_default_dtype(torch.float32)  # Custom networks are tested on stored observations.
    model = build_soft_actor_critic(config, observation_space, action_space, 1, num_critics)
    model = model.double()
    torch.set_default_dtype(torch.float64)
    # Saturated actions would reduce the precision of the reference.
    return perturbed(model, size=0.02 if observation_space is IMAGE else 0.3)


def make_config(**settings):
    """Return settings with a large learning rate."""
    return SACAlgorithmConfig(
        **{"lr": LR, "tau": 0.1, "entropy_coef": 0.5, "batch_size": N, **settings}
    )


def noises(model, steps, policy_update_interval):
    """Yield the noise of next actions and of policy actions for each gradient step."""
    generator = torch.Generator().manual_seed(SEED)
    draw = model.distribution.draw_noise
    for step in range(steps):
        of_next = draw((N,), generator)
        yield of_next, of_next if step % policy_update_interval else draw((N,), generator)


def compare(name, steps=3, num_critics=2, model_settings=None, weights=False, **settings):
    """Assert that statistics and parameters match; return the names of changed parameters."""
    model = make_model(*PROBLEMS[name], num_critics, **(model_settings or {}))
    config = make_config(**settings)
    reference = SlowSAC(model, PROBLEMS[name][1], config)
    learner = SACLearner(model, config, seed=SEED)
    before = copy.deepcopy(model)
    for step, noise in enumerate(noises(model, steps, config.policy_update_interval)):
        batch = make_transitions(*PROBLEMS[name], seed=step, weighted=weights)
        row = learner.update(batch, Progress()).reduce()
        assert row == pytest.approx(reference.step(batch, *noise), rel=1e-7, abs=1e-9)
    assert_equal(model, reference.model)
    moved = dict(before.named_parameters())
    return {key for key, param in model.named_parameters() if (param != moved[key]).any()}


def assert_equal(model, reference):
    """Assert that all parameters, including those of target networks, match."""
    theirs = dict(reference.named_parameters())
    for key, param in model.named_parameters():
        torch.testing.assert_close(
            param.detach(), theirs[key].detach(), rtol=1e-8, atol=1e-9, msg=lambda m, k=key: k + m
        )


@pytest.mark.parametrize("way", ["update", "update_from_batch"])
@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("order", ["critics_first", "joint"])
def test_update_orders_and_intervals(order, interval, way):
    """Steps match in both orders; a non-finite loss changes the target networks only."""
    config = make_config(update_order=order, policy_update_interval=interval, on_non_finite="skip")
    model = make_model(*PROBLEMS["box"])
    reference = SlowSAC(model, PROBLEMS["box"][1], config)
    learner = SACLearner(model, config, seed=SEED)
    for step, noise in enumerate(noises(model, 7, interval)):
        batch = make_transitions(*PROBLEMS["box"], seed=step)
        if step in (1, 2):
            batch.rewards[0] = torch.inf
        row = getattr(learner, way)(batch, Progress()).reduce()
        if step in (1, 2):
            reference.skip()
            assert (row["train/skipped_steps"], row["train/gradient_steps"]) == (1.0, 0.0)
        else:
            assert row == pytest.approx(reference.step(batch, *noise), rel=1e-7, abs=1e-9)
        assert_equal(model, reference.model)


@pytest.mark.parametrize("step", [0, 1])
def test_a_non_finite_policy_loss_skips_the_critics_too(step):
    """No weight and no optimizer state changes, in the first step or later."""

    class Broken(SACLearner):
        def policy_loss(self, module_id, batch, statistics):
            loss = super().policy_loss(module_id, batch, statistics)
            return loss * float("nan") if self.gradient_steps == step else loss

    config, (space, actions) = make_config(on_non_finite="skip", tau=1e-12), PROBLEMS["box"]
    learner = Broken(make_model(space, actions), config, seed=SEED)
    for number in range(step):
        learner.update(make_transitions(space, actions, seed=number), Progress())
    before = learner.state_dict()
    row = learner.update(make_transitions(space, actions, seed=9), Progress()).reduce()
    assert row["train/skipped_steps"] == 1.0
    after = learner.state_dict()
    torch.testing.assert_close(after["modules"], before["modules"], rtol=0, atol=1e-9)
    torch.testing.assert_close(after["optimizers"], before["optimizers"])


def test_target_networks_follow_without_a_trainable_policy():
    """Target networks are updated although no optimizer follows the policy loss."""
    model = make_model(*PROBLEMS["box"])
    model.policy.requires_grad_(False)
    learner = SACLearner(model, make_config(entropy_tuning=False), seed=SEED)
    before = get_flat_parameters(model.target_critics)
    learner.update(make_transitions(*PROBLEMS["box"]), Progress())
    assert not torch.equal(get_flat_parameters(model.target_critics), before)


@pytest.mark.parametrize("name", PROBLEMS)
def test_sac_update_matches_the_papers(name):
    """Losses and all parameters match after three gradient steps."""
    # Near-zero gradients of convolutions are rounding errors, which would change later steps.
    moved = compare(name, steps=1 if name == "image" else 3)
    assert "log_temperatures" in moved
    for part in ("policy", "critics", "target_critics"):
        assert any(key.startswith(part) for key in moved)


OWN = {role: {"_target_": f"{__name__}.Own{role.title()}"} for role in ("policy", "critic")}
DELAYS = {"policy_update_interval": 2, "target_update_interval": 3}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(("mixed", {"num_critics": n}) for n in (1, 3)),
        *(("box", {"num_critics": n}) for n in (1, 3)),
        ("box", {"critic_lr": 0.03, "entropy_coef_lr": 0.04, "target_entropy_multiplier": 0.5}),
        ("box", {"steps": 5, **DELAYS}),
        ("box", {"entropy_tuning": False}),
        *((name, {"weights": True}) for name in ("box", "discrete")),
        *(("box", {"model_settings": {role: node}}) for role, node in OWN.items()),
    ],
    ids=str,
)
def test_sac_settings_match_the_reference(name, settings):
    """Numbers of critics, learning rates, delays, weights and networks match the reference."""
    moved = compare(name, **settings)
    assert ("log_temperatures" in moved) is settings.get("entropy_tuning", True)


def test_invalid_custom_critic_raises():
    """A wrong output size and a class without an action input raise ConfigError."""
    for name, message in (("Wrong", "output_size"), ("OwnPolicy", "refuse|argument|action_size")):
        node = {"_target_": f"{__name__}.{name}"}
        with pytest.raises(ConfigError, match=message):
            make_model(BOX, REACH, critic=node)


def test_gradients_of_saturated_actions_are_finite():
    """Gradients are finite if stored actions and policy actions lie on the bounds."""
    model = make_model(BOX, REACH)
    with torch.no_grad():
        model.policy.net.layers.layers[-1].bias[:2] = 40.0
    batch = make_transitions(BOX, REACH)
    batch.actions.fill_(20.0)
    SACLearner(model, make_config(), seed=SEED).update(batch, Progress())
    assert all(bool(torch.isfinite(param).all()) for param in model.parameters())
