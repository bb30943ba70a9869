"""TD3: updates match a slow reference in float64; exploration; errors."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import everyday
from gymnasium import spaces
from reference_sac import move, of_critics, row_of, step_each, tagged
from update_problems import BOX, PARTS, SMALL, make_transitions, perturbed

from maze_train import load_policy, train
from maze_train.algorithms.td3.config import TD3AlgorithmConfig
from maze_train.algorithms.td3.learner import TD3Learner
from maze_train.algorithms.td3.model import NoisyActions, build_td3
from maze_train.core.errors import SpaceError
from maze_train.core.types import tree_map
from maze_train.learner.config import Progress, Schedule
from maze_train.nets.config import ModelConfig

N, SEED = 7, 3
REACH = spaces.Box(np.array([-3.0, 0.0]), np.array([1.0, 100.0]), (2,), np.float64)
ARM = spaces.Tuple((REACH, spaces.Dict({"turn": spaces.Box(-1.0, 1.0, (1, 2), np.float64)})))
SETTINGS: dict[str, Any] = {
    "lr": 0.02,
    "critic_lr": 0.03,
    "tau": 0.1,
    "target_noise_stddev": 0.4,  # some of it is clipped
    "target_noise_clip": 0.25,
}
DDPG: dict[str, Any] = {
    "num_critics": 1,
    "policy_update_interval": 1,
    "target_noise_stddev": 0.0,
}


def make_batch(observation_space, action_space, seed, weighted):
    """Return transitions whose actions lie within the bounds."""
    batch = make_transitions(observation_space, action_space, seed, weighted)
    return replace(batch, actions=tree_map(torch.tanh, batch.actions))


class SlowTD3:
    """Algorithm 1 of the paper, computed sample by sample with plain optimizers."""

    def __init__(self, model, config):
        self.online, self.config, self.t = copy.deepcopy(model), config, 0
        # A copy of the model with the target weights.
        self.frozen = copy.deepcopy(model)
        self.frozen.policy.load_state_dict(model.target_policy.state_dict())
        self.frozen.critics.load_state_dict(model.target_critics.state_dict())
        adam = {"eps": config.optimizer["eps"]}
        self.actor = torch.optim.Adam(self.online.policy.parameters(), config.lr, **adam)
        self.critic = torch.optim.Adam(self.online.critics.parameters(), config.critic_lr, **adam)

    def target(self, batch, next_obs, noise, i):
        """Return the target value of sample i."""
        config = self.config
        with torch.no_grad():
            action = torch.tanh(self.frozen.policy(next_obs))
            for j in range(action.shape[1] if config.target_noise_stddev else 0):
                e = float(noise[i, j] * config.target_noise_stddev)  # rounded like noise
                e = max(-config.target_noise_clip, min(config.target_noise_clip, e))
                action[0, j] = max(-1.0, min(1.0, float(action[0, j]) + e))
            lowest = min(float(q) for q in self.frozen.critics(next_obs, action).flatten())
        return float(batch.rewards[i]) + float(batch.discounts[i]) * lowest

    def step(self, batch, noise):
        """Update the critics, then the policy; return the statistics by tag."""
        critic_loss, taken, stored = 0.0, [], batch.actions
        if isinstance(stored, dict):
            stored = torch.cat([part.flatten(1) for part in stored.values()], 1)
        rows = [(row_of(batch.obs, i), row_of(batch.next_obs, i)) for i in range(N)]
        for i, (obs, next_obs) in enumerate(rows):
            y = self.target(batch, next_obs, noise, i)
            weight = 1.0 if batch.weights is None else float(batch.weights[i])
            taken.append(self.online.critics(obs, stored[i : i + 1]).flatten())
            for q in taken[-1]:
                critic_loss = critic_loss + weight * 0.5 * (q - y) ** 2 / N
        self.t += 1
        found = {"critic_loss": critic_loss, **of_critics([own.tolist() for own in taken])}
        found["learning_rate"] = self.config.lr
        before = copy.deepcopy(self.online.critics)
        norms = [step_each([(self.critic, critic_loss)])]
        if self.t % self.config.policy_update_interval == 0:
            is_joint = self.config.update_order == "joint"
            critics = before if is_joint else self.online.critics
            actions = [torch.tanh(self.online.policy(obs)) for obs, _ in rows]
            pairs = zip(rows, actions, strict=True)
            values = [critics(obs, action)[0, 0, 0] for (obs, _), action in pairs]
            found["policy_loss"] = -sum(values) / N
            found["saturation"] = float((torch.cat(actions).abs() > 0.99).double().mean())
            norms.append(step_each([(self.actor, found["policy_loss"])]))
            norms = [math.hypot(*norms)] if is_joint else norms
        interval = self.config.policy_update_interval * self.config.target_update_interval
        if self.t % interval == 0:
            for name in ("policy", "critics"):
                move(getattr(self.frozen, name), getattr(self.online, name), self.config.tau)
        return tagged({**found, "gradient_steps": 1.0, "grad_norm": np.mean(norms)})


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("spaces_of", "settings", "weights"),
    [
        ((BOX, REACH), {}, False),
        ((PARTS, ARM), {"target_update_interval": 2}, True),
        ((BOX, REACH), {"num_critics": 3, "policy_update_interval": 3}, False),
        ((BOX, REACH), DDPG, False),
        ((BOX, REACH), {**DDPG, "update_order": "joint"}, True),
        ((BOX, REACH), {"policy_update_interval": 2, "update_order": "joint"}, False),
        ((BOX, REACH), {"policy_update_interval": 3, "update_order": "joint"}, False),
    ],
    ids=["td3", "several parts", "three critics", "ddpg", "joint 1", "joint 2", "joint 3"],
)
def test_td3_updates_match_the_paper(spaces_of, settings, weights):
    """Statistics, parameters and targets match after each of five gradient steps."""
    config = TD3AlgorithmConfig(**{**SETTINGS, **settings})
    sizes = ModelConfig(hidden_sizes=[6, 5], branch_size=3)
    model = perturbed(build_td3(sizes, *spaces_of, 1, config.num_critics).double())
    for policy in (model.policy, model.target_policy):  # some actions are saturated
        [*policy.parameters()][-1].data[0] += 2.6
    reference, learner = SlowTD3(model, config), TD3Learner(model, config, seed=SEED)
    generator = torch.Generator().manual_seed(SEED)
    for step in range(5):
        batch = make_batch(*spaces_of, step, weights)
        noise = torch.zeros(0)
        if config.target_noise_stddev:
            noise = model.distribution.draw_noise((N,), generator)
        update = learner.update_from_batch if step % 2 else learner.update
        result = update(batch, Progress())
        row = result.reduce()
        assert row == pytest.approx(reference.step(batch, noise), rel=1e-7, abs=1e-12)
        pairs = [
            (model.policy, reference.online.policy),
            (model.critics, reference.online.critics),
            (model.target_policy, reference.frozen.policy),
            (model.target_critics, reference.frozen.critics),
        ]
        for ours, theirs in pairs:
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-8, atol=1e-9)
        assert ("td_errors" in result.kept) == weights


# -- exploration ---------------------------------------------------------------------------------


def test_exploration_noise_has_the_configured_std():
    """Actions have the configured std and stay within bounds; a std of 0 gives the mode."""
    space = spaces.Box(np.array([-3.0, 0.0], np.float32), np.array([1.0, 9.0], np.float32))
    family = NoisyActions(space, 0.3)
    params = torch.tensor([0.0, 30.0]).expand(20_000, 2)
    noise = family.draw_noise((20_000,), torch.Generator().manual_seed(0))
    actions = family.sample(params, noise)
    assert float(actions[:, 0].std()) == pytest.approx(0.3, rel=0.03)
    assert float((actions[:, 1] == 1.0).float().mean()) == pytest.approx(0.5, abs=0.02)
    env = family.to_env(actions)
    assert float(env[:, 0].mean()) == pytest.approx(-1.0, abs=0.02)
    assert all(space.contains(action) for action in env[:100].numpy())
    torch.testing.assert_close(family.from_env(env), actions, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(family.mode(params[:1]), torch.tensor([[0.0, 1.0]]))
    assert torch.equal(NoisyActions(space, 0.0).sample(params, noise), family.mode(params))


def test_noise_densities_ignore_clipping():
    """Densities match torch.distributions; a deterministic policy has no density."""
    space = spaces.Box(-2.0, 6.0, (2,), np.float64)
    family = NoisyActions(space, 0.3)
    u, other = torch.randn(2, 4, 2, generator=torch.Generator().manual_seed(0)).unbind()
    actions = family.sample(u, torch.full((4, 2), 0.2))
    normal, wide = (torch.distributions.Normal(x.tanh(), 0.3) for x in (u, other))
    scale = 2 * math.log(4.0)
    torch.testing.assert_close(
        family.log_prob(u, actions), normal.log_prob(actions).sum(-1) - scale
    )
    torch.testing.assert_close(family.entropy(u), normal.entropy().sum(-1) + scale)
    distance = torch.distributions.kl_divergence(normal, wide).sum(-1)
    torch.testing.assert_close(family.kl(u, other), distance)
    with pytest.raises(SpaceError, match="no density: set a noise_stddev above 0"):
        NoisyActions(space, 0.0).log_prob(u, actions)


FALLING = {"points": [[0, 0.4], [48, 0.0]], "by": "env_steps"}


@pytest.mark.parametrize(
    ("setting", "at_last"),
    everyday(
        1, [(0.0, 0.0), (0.5, 0.5), ([[0, 0.4], [1_000, 0.2]], None), (FALLING, 0)], are_rows=True
    ),
)
def test_evaluations_act_without_noise(tmp_path, setting, at_last):
    """Deterministic actions have no noise; a saved policy keeps its exploration noise."""
    run_dir = tmp_path / "run"
    noise = {"algorithm.exploration_noise_stddev": setting}
    result = train("Pendulum-v1", "td3", run_dir=run_dir, **SMALL, **noise)
    assert all(math.isfinite(value) for row in result.history for value in row.values())
    policy, obs = load_policy(f"{run_dir}@final"), np.array([1.0, 0.0, 0.0], np.float32)
    model: Any = policy.model
    with torch.no_grad():
        mean = 2.0 * model.policy(torch.tensor(obs)[None]).tanh()[0].numpy()
    np.testing.assert_allclose(policy.act(obs), mean, rtol=1e-5)
    stddev = float(model.exploration_noise_stddev)
    assert result.history[-1]["train/exploration_noise_stddev"] == pytest.approx(stddev)
    if at_last is None:
        assert 0.3 < stddev < 0.4
    else:
        assert stddev == pytest.approx(at_last)
    assert bool((policy.act(obs, False) == policy.act(obs)).all()) == (stddev == 0.0)


def test_constant_noise_is_not_stored():
    """Constant noise is not stored, so checkpoints of constant noise contain networks only."""
    constant, changing = (
        build_td3(ModelConfig(), BOX, REACH, 1, noise_stddev=noise).state_dict().keys()
        for noise in (0.3, Schedule(start=0.3, end=0.1))
    )
    assert changing - constant == {"exploration_noise_stddev"}
    rooms = {key.partition(".")[0] for key in constant}
    assert rooms == {"policy", "critics", "target_policy", "target_critics"}
