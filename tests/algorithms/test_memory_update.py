"""Updates of policies with a memory, against episodes that are cut out and played again."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from maze_train import A2CAlgorithmConfig, PPOAlgorithmConfig, SequentialVectorEnv, Statistics
from maze_train.algorithms.a2c.learner import A2CLearner
from maze_train.algorithms.actor_critic.batch import evaluate_rollout
from maze_train.algorithms.ppo.learner import PPOLearner
from maze_train.learner.config import Progress
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import MemoryConfig, ModelConfig
from maze_train.rollout.collector import RolloutCollector
from maze_train.types import tree_map

sys.path.append(str(Path(__file__).parents[1] / "rollout"))
from scripted_envs import ScriptedEnv

T, B = 12, 3


def collected(cell="lstm", rollouts=2, **env_settings):
    """A model with a memory that matters, and its last of some rollouts."""
    env = SequentialVectorEnv([partial(ScriptedEnv, **env_settings)] * B)
    config = ModelConfig(hidden_sizes=[8], memory=MemoryConfig(cell=cell, size=6))
    model = build_actor_critic(
        config, env.single_observation_space, env.single_action_space, seed=3
    )
    with torch.no_grad():
        for param in model.policy.parameters():
            param.mul_(50.0)
        for param in model.memory.parameters():
            param.mul_(2.0)
    collector = RolloutCollector(env, T, env_seed=1, action_seed=2)
    for _ in range(rollouts):
        rollout, _ = collector.collect(model)
    return model, rollout


def slow_steps(model, rollout):
    """Params, values and memory of each row, one environment and one step at a time.

    Where an episode ended, the memory begins anew; the first one is what the rollout says.
    """
    outputs, memories_after = {}, {}
    for b in range(B):
        state = rollout.hidden_states[0, b : b + 1]
        for t in range(T + 1):
            obs = tree_map(lambda x, t=t, b=b: x[t, b : b + 1], rollout.obs)
            params, value, state = model.evaluate(obs, state)
            outputs[t, b], memories_after[t, b] = (params, value), state
            if t < T and bool(rollout.ended[t, b]):
                state = torch.zeros_like(state)
    return outputs, memories_after


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("dict_obs", [False, True])
@torch.no_grad()
def test_what_was_remembered_is_stored(cell, dict_obs):
    """Rows know the memory before them: what a step-by-step replay has there, zero after an end."""
    model, rollout = collected(cell, dict_obs=dict_obs)
    assert rollout.hidden_states.shape == (T + 1, B, model.state_size)
    assert rollout.hidden_states[0].abs().sum() > 0
    _, after = slow_steps(model, rollout)
    for t in range(T):
        for b in range(B):
            expected = torch.zeros(1) if rollout.ended[t, b] else after[t, b][0]
            torch.testing.assert_close(
                rollout.hidden_states[t + 1, b],
                expected.expand(model.state_size),
                atol=1e-6,
                rtol=1e-5,
            )


@torch.no_grad()
def test_values_of_a_rollout_remember():
    """Values, also those of true last observations, know what came before in their episode."""
    model, rollout = collected()
    assert len(rollout.final_positions) > 0
    outputs, after = slow_steps(model, rollout)
    evaluated = evaluate_rollout(model, rollout, True)
    for t in range(T):
        for b in range(B):
            params, value = outputs[t, b]
            torch.testing.assert_close(evaluated.values[t, b], value[0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(evaluated.params[t * B + b], params[0], atol=1e-4, rtol=1e-4)
            next_value = outputs[t + 1, b][1]
            if rollout.truncated[t, b] and not rollout.terminated[t, b]:
                k = rollout.final_positions.tolist().index(t * B + b)
                final = tree_map(lambda x, k=k: x[k : k + 1], rollout.final_obs)
                next_value = model.values(final, after[t, b])
            torch.testing.assert_close(
                evaluated.next_values[t, b], next_value[0], atol=1e-5, rtol=1e-4
            )


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_the_first_ratios_are_one(cell, length):
    """Before the first step, sequences give the log-probabilities that the actions had."""
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


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("length", [0, 3])
def test_gradients_flow_through_time_within_sequences(cell, length):
    """One A2C update moves the weights as a loss over single steps, chained by hand, does."""
    model, rollout = collected(cell)
    config = A2CAlgorithmConfig(
        n_rollout_steps=T,
        sequence_length=length,
        max_grad_norm=0.0,
        entropy_coef=0.125,
        lr=1.0,
        optimizer={"_target_": "torch.optim.SGD"},
    )
    learner = A2CLearner(model, config)
    prepared = learner.preprocess("default", rollout, Statistics())
    advantages, targets = prepared.columns[0].view(T, B), prepared.columns[1].view(T, B)
    loss = torch.zeros(())
    for b in range(B):
        for t in range(T):
            if t % (length or T) == 0:
                state = rollout.hidden_states[t, b : b + 1]
            elif rollout.ended[t - 1, b]:
                state = torch.zeros_like(state)
            features, state = model.memory.step(model.trunk(rollout.obs[t, b : b + 1]), state)
            params, value = model.policy(features), model.critic(features)[0, 0]
            log_prob, entropy = model.distribution.log_prob_and_entropy(
                params, rollout.actions[t, b : b + 1]
            )
            loss = loss - log_prob[0] * advantages[t, b] - 0.125 * entropy[0]
            loss = loss + config.value_loss_coef * (value - targets[t, b]) ** 2
    gradients = torch.autograd.grad(loss / (T * B), list(model.parameters()))
    before = [param.detach().clone() for param in model.parameters()]
    learner.update(rollout, Progress())
    for old, new, gradient in zip(before, model.parameters(), gradients, strict=True):
        torch.testing.assert_close(old - new, gradient, atol=3e-5, rtol=1e-3)


@torch.no_grad()
def test_recomputed_values_remember_with_the_new_weights():
    """Before another pass, values are those of the model as it is now from the first row on."""
    model, rollout = collected()
    learner = PPOLearner(model, PPOAlgorithmConfig(n_rollout_steps=T, batch_size=8))
    prepared = learner.preprocess("default", rollout, Statistics())
    for param in model.memory.parameters():
        param.mul_(0.7)
    renewed = learner.with_new_advantages("default", prepared)
    outputs, _ = slow_steps(model, rollout)
    expected = torch.stack([outputs[t, b][1][0] for t in range(T) for b in range(B)])
    torch.testing.assert_close(renewed.columns[2], expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(renewed.columns[3], prepared.columns[3])
