"""Recurrent states stored by collectors, and sequences in minibatches."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from actor_envs import ActorEnv

from maze_train import PPOAlgorithmConfig, SequentialVectorEnv, Statistics
from maze_train.algorithms.ppo.learner import PPOLearner
from maze_train.collect.collector import RolloutCollector
from maze_train.core.types import tree_map
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import ModelConfig, RecurrentConfig

T, B = 12, 3


def collected(cell="lstm", rollouts=2, **env_settings):
    """Return a recurrent model with large weights, and the last of its rollouts."""
    env = SequentialVectorEnv([partial(ActorEnv, **env_settings)] * B)
    config = ModelConfig(hidden_sizes=[8], rnn=RecurrentConfig(cell=cell, size=6))
    model = build_actor_critic(
        config, env.single_observation_space, env.single_action_space, seed=3
    )
    with torch.no_grad():
        for param in model.policy.parameters():
            param.mul_(50.0)
        for param in model.rnn.parameters():
            param.mul_(2.0)
    collector = RolloutCollector(env, T, env_seed=1, action_seed=2)
    for _ in range(rollouts):
        rollout, _ = collector.collect_steps(model)
    return model, rollout


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("obs", ["box", "dict"])
@torch.no_grad()
def test_stored_hidden_states_match_a_replay(cell, obs):
    """Hidden states match a step-by-step replay and are zero after the end of an episode."""
    model, rollout = collected(cell, obs=obs)
    assert rollout.hidden_states.shape == (T + 1, B, model.state_size)
    assert rollout.hidden_states[0].abs().sum() > 0
    for b in range(B):
        state = rollout.hidden_states[0, b : b + 1]
        for t in range(T):
            obs = tree_map(lambda x, t=t, b=b: x[t, b : b + 1], rollout.obs)
            _, state = model.policy_step(obs, state)
            if bool(rollout.ended[t, b]):
                state = torch.zeros_like(state)
            torch.testing.assert_close(
                rollout.hidden_states[t + 1, b], state[0], atol=1e-6, rtol=1e-5
            )


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_first_ratios_of_sequences_are_one(cell, length):
    """Before the first gradient step, sequences reproduce the log-probabilities of the actions."""
    model, rollout = collected(cell)
    config = PPOAlgorithmConfig(n_rollout_steps=T, batch_size=8, sequence_length=length)
    learner = PPOLearner(model, config)
    prepared = learner.preprocess("default", rollout, Statistics())
    seen = 0
    for minibatches in learner.minibatches({"default": prepared}, Statistics()):
        batch = minibatches["default"]
        params = model(batch.obs, batch.sequences)[0].detach()
        log_probs = model.distribution.log_prob(params, batch.actions)
        torch.testing.assert_close(log_probs, batch.old_log_probs, atol=2e-5, rtol=1e-5)
        seen += batch.size
    assert seen == T * B * config.n_optimization_epochs
