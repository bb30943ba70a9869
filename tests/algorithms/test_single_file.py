"""The teaching example `examples/ppo_single_file.py` computes the losses of `PPOLearner`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from maze_train import ModelConfig, PPOAlgorithmConfig, PPOLearner, Rollout, build_actor_critic
from maze_train.core.step_end import StepEnd
from maze_train.learner.config import Progress

EXAMPLE = Path(__file__).parents[2] / "examples" / "ppo_single_file.py"


@pytest.fixture
def example(monkeypatch):
    """Return the example as a module; dataclasses require it in `sys.modules`."""
    spec = importlib.util.spec_from_file_location("ppo_single_file", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def copied(agent, source, target):
    """Copy the linear layers of an example network into a network of the model."""
    layers = [[x for x in net.modules() if isinstance(x, nn.Linear)] for net in (source, target)]
    for ours, theirs in zip(*layers, strict=True):
        theirs.load_state_dict(ours.state_dict())


def as_product(rollout, obs):
    """Convert a rollout of the example to one of the package."""
    end = torch.full(rollout.rewards.shape, int(StepEnd.RUNNING), dtype=torch.uint8)
    end[rollout.truncated] = int(StepEnd.TRUNCATED)
    end[rollout.terminated] = int(StepEnd.TERMINATED)
    positions = (end.flatten() == int(StepEnd.TRUNCATED)).nonzero().squeeze(1)
    return Rollout(
        obs=torch.cat([rollout.obs, torch.as_tensor(obs)[None]]),
        actions=rollout.actions,
        rewards=rollout.rewards,
        end=end,
        final_obs=rollout.next_obs.flatten(0, 1)[positions],
        final_positions=positions,
    )


def test_single_file_losses_and_weights_equal_the_learner(example):
    """Losses and weights match after four epochs with termination, truncation and clipping."""
    args = example.Args(num_envs=4, num_steps=64, num_epochs=4, batch_size=256, entropy_coef=0.01)
    torch.manual_seed(0)
    env = example.make_env("CartPole-v1", args.num_envs, max_episode_steps=12)
    agent = example.Agent(4, 2)
    spaces = env.single_observation_space, env.single_action_space
    model = build_actor_critic(ModelConfig(hidden_sizes=[64, 64]), *spaces, seed=1)
    copied(agent, agent.actor, model.policy)
    copied(agent, agent.critic, model.critic)
    rollout, obs = example.collect(env, agent, env.reset(seed=2)[0], args.num_steps)
    env.close()
    assert rollout.terminated.any()
    assert rollout.truncated.any()
    config = PPOAlgorithmConfig(
        lr=1e-2, n_rollout_steps=64, batch_size=256, n_optimization_epochs=4, entropy_coef=0.01
    )
    learner = PPOLearner(model, config, seed=3)
    found = learner.update(as_product(rollout, obs), Progress()).reduce()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2, eps=1e-5)
    terms = example.update(agent, optimizer, rollout, args)
    assert found["train/clip_fraction"] > 0
    for name, value in terms.items():
        assert found[f"train/{name}"] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    obs = torch.randn(8, 4)
    torch.testing.assert_close(
        model.policy_params(obs).detach(), agent.actor(obs).detach(), rtol=1e-3, atol=1e-4
    )
    torch.testing.assert_close(
        model.values(obs).detach(), agent.value(obs).detach(), rtol=1e-3, atol=1e-4
    )


def test_single_file_example_trains(example, capsys):
    """Two updates print one line each and return the mean return of ended episodes."""
    agent, curve = example.train(example.Args(total_steps=512, num_envs=4, num_steps=64))
    assert isinstance(agent, example.Agent)
    assert len(curve) == 2
    assert 8 < np.nanmax(curve) < 100
    assert capsys.readouterr().out.count("policy_loss") == 2


def test_single_file_example_is_short():
    """The example has at most 250 lines and does not import this package."""
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 250
    assert "import maze_train" not in text
    assert "from maze_train" not in text
