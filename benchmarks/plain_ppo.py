"""PPO on EnvPool's CartPole as a minimal hand-written PyTorch loop, as a baseline."""

from __future__ import annotations

import time

import envpool
import numpy as np
import torch
from torch import Tensor, nn


def network(outputs: int) -> nn.Module:
    """Return a network with two hidden layers of 64 units."""
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(64, outputs))


def advantages_of(rewards: Tensor, values: Tensor, ended: Tensor) -> Tensor:
    """Compute GAE with gamma 0.99 and lambda 0.95; `values` has one additional row."""
    found, later = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        goes_on = 1.0 - ended[t]
        later = rewards[t] + 0.99 * goes_on * (values[t + 1] + 0.95 * later) - values[t]
        found[t] = later
    return found


def steps_per_second(
    num_envs: int, num_steps: int, epochs: int, minibatch: int, seconds: float
) -> float:
    """Return steps per second of collecting and updating, after two warm-up updates."""
    env = envpool.make_gymnasium("CartPole-v1", num_envs=num_envs, seed=0)
    policy, critic = network(2), network(1)
    parameters = [*policy.parameters(), *critic.parameters()]
    adam = torch.optim.Adam(parameters, lr=2.5e-4)
    obs = torch.zeros(num_steps + 1, num_envs, 4)
    actions = torch.zeros(num_steps, num_envs, dtype=torch.int64)
    log_probs, rewards, ended = (torch.zeros(num_steps, num_envs) for _ in range(3))
    values = torch.zeros(num_steps + 1, num_envs)
    obs[0] = torch.from_numpy(env.reset()[0])
    updates, began = 0, 0.0
    while not began or time.perf_counter() - began < seconds:
        if updates == 2:
            began = time.perf_counter()
        with torch.no_grad():
            for t in range(num_steps):
                choice = torch.distributions.Categorical(logits=policy(obs[t]))
                actions[t] = choice.sample()
                log_probs[t], values[t] = choice.log_prob(actions[t]), critic(obs[t])[:, 0]
                seen, reward, terminated, truncated, _ = env.step(actions[t].numpy())
                obs[t + 1] = torch.from_numpy(seen)
                rewards[t] = torch.from_numpy(reward)
                ended[t] = torch.from_numpy((terminated | truncated).astype(np.float32))
            values[-1] = critic(obs[-1])[:, 0]
            advantages = advantages_of(rewards, values, ended)
            returns = (advantages + values[:-1]).flatten()
        flat = [x.flatten(0, 1) for x in (obs[:-1], actions, log_probs, advantages)]
        for _ in range(epochs):
            for rows in torch.randperm(num_steps * num_envs).split(minibatch):
                seen, taken, before, gain = (x[rows] for x in flat)
                choice = torch.distributions.Categorical(logits=policy(seen))
                ratio = (choice.log_prob(taken) - before).exp()
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                reached = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                error = (critic(seen)[:, 0] - returns[rows]).square().mean()
                loss = 0.5 * error - reached - 0.01 * choice.entropy().mean()
                adam.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                adam.step()
        obs[0], updates = obs[-1].clone(), updates + 1
    return (updates - 2) * num_steps * num_envs / (time.perf_counter() - began)
