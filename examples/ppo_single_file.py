"""PPO in a single file, for teaching: plain PyTorch and Gymnasium.

Supports Discrete actions and vector observations:

    python examples/ppo_single_file.py --env_id CartPole-v1 --total_steps 100000

The losses equal `maze-run algorithm=ppo`, which adds other spaces, recurrent policies, workers,
evaluation and exact resume. `tests/algorithms/test_single_file.py` compares both on a rollout.

Sources: Schulman et al. (2017), "Proximal policy optimization algorithms", arXiv:1707.06347;
Schulman et al. (2016), "High-dimensional continuous control using generalized advantage
estimation", arXiv:1506.02438.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import dataclass, fields

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical


@dataclass
class Args:
    """Hyperparameters; T is `num_steps` and B is `num_envs`."""

    env_id: str = "CartPole-v1"
    seed: int = 0
    total_steps: int = 100_000
    """Environment steps to train for."""
    num_envs: int = 8
    num_steps: int = 128
    """Steps of each environment per rollout."""
    num_epochs: int = 10
    """Passes over each rollout."""
    batch_size: int = 256
    """Samples per minibatch."""
    lr: float = 1e-3
    """Initial learning rate; it decays linearly to 0."""
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_range: float = 0.2
    value_loss_coef: float = 0.5
    entropy_coef: float = 0.0
    max_grad_norm: float = 0.5


def linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """Return a linear layer with orthogonal weights and zero biases."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Return a network with two hidden layers of 64 units; `gain` is for the output layer."""
    first, second = linear(inputs, 64, 2**0.5), linear(64, 64, 2**0.5)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), linear(64, outputs, gain))


class Agent(nn.Module):
    """Separate networks for the policy and the state value."""

    def __init__(self, obs_size: int, num_actions: int) -> None:
        super().__init__()
        # The small gain makes the initial policy almost uniform.
        self.actor = mlp(obs_size, num_actions, gain=0.01)
        self.critic = mlp(obs_size, 1, gain=1.0)

    def policy(self, obs: Tensor) -> Categorical:
        """Return the action distribution for observations, `[..., obs_size]`."""
        return Categorical(logits=self.actor(obs))

    def value(self, obs: Tensor) -> Tensor:
        """Return the state values of observations, `[...]`."""
        return self.critic(obs).squeeze(-1)


@dataclass
class Rollout:
    """T steps of B environments."""

    obs: Tensor
    """Observations before each action, `[T, B, obs_size]`."""
    actions: Tensor
    """`[T, B]` int64."""
    log_probs: Tensor
    """Log-probabilities of the actions when they were taken, `[T, B]`."""
    rewards: Tensor
    """`[T, B]`."""
    next_obs: Tensor
    """Observations after each action, `[T, B, obs_size]`: at the end of an episode its final
    observation, not the first one of the next episode."""
    terminated: Tensor
    """Whether the step led to a terminal state, `[T, B]` bool."""
    truncated: Tensor
    """Whether a time limit ended the episode, `[T, B]` bool."""


@torch.no_grad()
def collect(env: SyncVectorEnv, agent: Agent, obs: np.ndarray, num_steps: int):
    """Step the environments with the current policy.

    Returns: The rollout, and the observations to continue from, `[B, obs_size]`.
    """
    rows = []
    for _ in range(num_steps):
        inputs = torch.as_tensor(obs, dtype=torch.float32)
        policy = agent.policy(inputs)
        actions = policy.sample()
        obs, rewards, terminated, truncated, infos = env.step(actions.numpy())
        next_obs = obs.copy()
        for i in np.flatnonzero(terminated | truncated):
            next_obs[i] = infos["final_obs"][i]
        row = (inputs, actions, policy.log_prob(actions), rewards, next_obs, terminated, truncated)
        rows.append([torch.as_tensor(x) for x in row])
    columns = [torch.stack(column) for column in zip(*rows, strict=True)]
    columns[3:5] = columns[3].float(), columns[4].float()
    return Rollout(*columns), obs


@torch.no_grad()
def advantages_and_returns(agent: Agent, rollout: Rollout, args: Args) -> tuple[Tensor, Tensor]:
    """Compute generalized advantage estimates and value targets, `[T, B]` each.

    delta_t = r_t + gamma * V(s_{t+1}) - V(s_t)
    A_t = delta_t + gamma * lambda * A_{t+1}

    V(s_{t+1}) is 0 after termination. After truncation it is the value of the final observation, so
    a time limit does not look like a terminal state. The sum over later steps stops at the end of
    an episode in both cases.
    """
    values, next_values = agent.value(rollout.obs), agent.value(rollout.next_obs)
    discounts = args.gamma * (~rollout.terminated).float()
    decays = args.gamma * args.gae_lambda * (~(rollout.terminated | rollout.truncated)).float()
    deltas = rollout.rewards + discounts * next_values - values
    advantages, last = torch.zeros_like(deltas), torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = last = deltas[t] + decays[t] * last
    return advantages, advantages + values


def losses(agent: Agent, batch: dict[str, Tensor], args: Args) -> dict[str, Tensor]:
    """Compute the three terms of the loss on a minibatch of n samples, 0-d each.

    policy_loss = -mean(min(ratio * A, clip(ratio, 1 - c, 1 + c) * A))
    value_loss = mean((V - R)^2)
    """
    policy = agent.policy(batch["obs"])
    ratio = (policy.log_prob(batch["actions"]) - batch["log_probs"]).exp()
    advantages = batch["advantages"]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped = ratio.clamp(1 - args.clip_range, 1 + args.clip_range)
    return {
        "policy_loss": -torch.min(ratio * advantages, clipped * advantages).mean(),
        "value_loss": (agent.value(batch["obs"]) - batch["returns"]).square().mean(),
        "policy_entropy": policy.entropy().mean(),
    }


def update(
    agent: Agent, optimizer: torch.optim.Optimizer, rollout: Rollout, args: Args
) -> dict[str, float]:
    """Take gradient steps on shuffled minibatches; return the mean of each loss term."""
    advantages, returns = advantages_and_returns(agent, rollout, args)
    data = {
        "obs": rollout.obs.flatten(0, 1),
        "actions": rollout.actions.flatten(),
        "log_probs": rollout.log_probs.flatten(),
        "advantages": advantages.flatten(),
        "returns": returns.flatten(),
    }
    terms: dict[str, list[float]] = {}
    for _ in range(args.num_epochs):
        for rows in torch.randperm(len(data["actions"])).split(args.batch_size):
            found = losses(agent, {name: column[rows] for name, column in data.items()}, args)
            loss = (
                found["policy_loss"]
                + args.value_loss_coef * found["value_loss"]
                - args.entropy_coef * found["policy_entropy"]
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
            for name, value in found.items():
                terms.setdefault(name, []).append(value.item())
    return {name: float(np.mean(values)) for name, values in terms.items()}


def make_env(env_id: str, num_envs: int, **kwargs: object) -> SyncVectorEnv:
    """Return B environments that reset themselves in the step that ends an episode."""
    makers = [lambda: gymnasium.make(env_id, **kwargs)] * num_envs
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


def train(args: Args) -> tuple[Agent, list[float]]:
    """Train an agent; return it with the mean of the last 100 returns after each update."""
    torch.manual_seed(args.seed)
    env = make_env(args.env_id, args.num_envs)
    obs_size = int(np.prod(env.single_observation_space.shape))
    agent = Agent(obs_size, env.single_action_space.n)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.lr, eps=1e-5)
    obs, _ = env.reset(seed=args.seed)
    running, ended, curve = torch.zeros(args.num_envs), deque(maxlen=100), []
    steps_per_update = args.num_steps * args.num_envs
    for steps in range(0, args.total_steps, steps_per_update):
        optimizer.param_groups[0]["lr"] = args.lr * (1 - steps / args.total_steps)
        rollout, obs = collect(env, agent, obs, args.num_steps)
        for rewards, ends in zip(
            rollout.rewards, rollout.terminated | rollout.truncated, strict=True
        ):
            running += rewards
            ended.extend(running[ends].tolist())
            running[ends] = 0
        metrics = update(agent, optimizer, rollout, args)
        curve.append(float(np.mean(ended)) if ended else float("nan"))
        terms = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        print(f"steps {steps + steps_per_update:,}  return {curve[-1]:.1f}  {terms}")
    env.close()
    return agent, curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for field in fields(Args):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    train(Args(**vars(parser.parse_args())))
