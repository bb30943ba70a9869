"""One update of A2C or PPO, written from the papers: loops over episodes and over samples.

Nothing of the package is called but the networks: log-probabilities, entropies, advantages, losses
and the decoding of the critic are formulas for one sample. Gradients are those of autograd,
clipping and steps those of torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from gymnasium import spaces

from maze_train.spaces.describe import flat_spaces

if TYPE_CHECKING:
    from maze_train.algorithms.actor_critic.config import ActorCriticConfig
    from maze_train.data.rollout import Rollout


@dataclass
class Critic:
    """What the critic's output means: a number, h of Pohlen et al., categories of MuZero."""

    epsilon: float | None = None
    support: tuple[int, int] | None = None

    def h(self, x):
        """The transform as the paper prints it."""
        if self.epsilon is None:
            return x
        return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + self.epsilon * x

    def h_inverse(self, y):
        """Its inverse as the paper prints it."""
        e = self.epsilon
        if e is None:
            return y
        root = (math.sqrt(1 + 4 * e * (abs(y) + 1 + e)) - 1) / (2 * e)
        return math.copysign(root**2 - 1, y)

    def predict(self, raw):
        """The prediction on the transformed scale, with gradient."""
        if self.support is None:
            return raw[0]
        total = sum(x.exp() for x in raw)
        return sum((self.support[0] + k) * x.exp() / total for k, x in enumerate(raw))

    def value(self, raw):
        """The state value, a number."""
        return self.h_inverse(self.predict(raw).item())

    def loss(self, raw, target, old, clip):
        """Loss of one sample; target and old value are on the transformed scale."""
        if self.support is not None:
            low, high = self.support
            inside = min(max(target, low), high)
            below = min(math.floor(inside), high - 1)
            log_total = sum(x.exp() for x in raw).log()
            upper = inside - below
            log_p = [raw[k - low] - log_total for k in (below, below + 1)]
            return -((1 - upper) * log_p[0] + upper * log_p[1])
        error = (raw[0] - target) ** 2
        if clip > 0:
            moved = min(max(raw[0].item() - old, -clip), clip)
            inside = abs(raw[0].item() - old) <= clip
            clipped = raw[0] if inside else torch.tensor(old + moved)
            other = (clipped - target) ** 2
            error = other if other.item() > error.item() else error
        return error


def slow_log_prob_and_entropy(space, params, action):
    """Joint log-probability of one action and entropy, from the definitions.

    Params of a joint distribution: those of the network part by part, then the free ones.
    """
    parts = flat_spaces(space)
    actions = action if isinstance(action, dict) else {"": action}
    position, free_position = 0, sum(net_size(part) for part in parts.values())
    log_prob, entropy = torch.zeros(()), torch.zeros(())
    for key, part in parts.items():
        size = net_size(part)
        own = params[position : position + size]
        position += size
        if isinstance(part, spaces.Box):
            log_std = params[free_position : free_position + size]
            free_position += size
            for mean, s, a in zip(own, log_std, actions[key].flatten(), strict=True):
                variance = (2 * s).exp()
                density = -((a - mean) ** 2) / (2 * variance) - s - 0.5 * math.log(2 * math.pi)
                log_prob = log_prob + density
                entropy = entropy + s + 0.5 * math.log(2 * math.pi * math.e)
            continue
        counts = [part.n] if isinstance(part, spaces.Discrete) else part.nvec.flatten()
        start = 0
        for n, a in zip(counts, actions[key].reshape(-1).tolist(), strict=True):
            weights = own[start : start + n].exp()
            start += n
            probabilities = weights / weights.sum()
            log_prob = log_prob + probabilities[a].log()
            entropy = entropy - sum(p * p.log() for p in probabilities)
    return log_prob, entropy


def net_size(space):
    """How many numbers the network computes for one part of the action."""
    if isinstance(space, spaces.Box):
        return math.prod(space.shape)
    return int(space.n) if isinstance(space, spaces.Discrete) else int(space.nvec.sum())


def at(tree, *index):
    """One element of a tensor or of every tensor of a mapping, as a batch of one."""
    if isinstance(tree, dict):
        return {key: x[index].unsqueeze(0) for key, x in tree.items()}
    return tree[index].unsqueeze(0)


def element(tree, *index):
    """One action."""
    return {k: x[index] for k, x in tree.items()} if isinstance(tree, dict) else tree[index]


def slow_targets(model, rollout, config, critic):
    """Advantage, target and old value (on the scale of the critic) of sample t * B + b.

    Each episode is cut out and its advantages are sums over its remaining steps.
    """
    steps, num_envs = rollout.rewards.shape
    with torch.no_grad():
        value = [
            [critic.value(model(at(rollout.obs, t, b))[1][0]) for b in range(num_envs)]
            for t in range(steps + 1)
        ]
        final = {
            int(place): critic.value(model(at(rollout.final_obs, k))[1][0])
            for k, place in enumerate(rollout.final_positions)
        }
    result = {}
    for b in range(num_envs):
        start = 0
        while start < steps:
            end = start
            while end < steps - 1 and not (rollout.terminated[end, b] | rollout.truncated[end, b]):
                end += 1
            deltas = []
            for t in range(start, end + 1):
                following = value[t + 1][b]
                if rollout.terminated[t, b]:
                    following = 0.0
                elif rollout.truncated[t, b]:
                    following = final[t * num_envs + b]
                deltas.append(float(rollout.rewards[t, b]) + config.gamma * following - value[t][b])
            for t in range(start, end + 1):
                rate = config.gamma * config.gae_lambda
                advantage = sum(rate**k * d for k, d in enumerate(deltas[t - start :]))
                target = critic.h(advantage + value[t][b])
                result[t * num_envs + b] = (advantage, target, critic.h(value[t][b]))
            start = end + 1
    return [result[i] for i in range(steps * num_envs)]


def normalized(advantages):
    """Mean 0 and sample standard deviation 1; a single advantage stays."""
    n = len(advantages)
    if n < 2:
        return advantages
    mean = sum(advantages) / n
    std = math.sqrt(sum((a - mean) ** 2 for a in advantages) / (n - 1))
    return [(a - mean) / (std + 1e-8) for a in advantages]


@dataclass
class Coefficients:
    """What schedules may change, and the clip range of PPO (None: the loss of A2C)."""

    lr: float
    entropy: float
    clip: float | None = None


def make_optimizer(model, config, lr):
    """The optimizer of torch that the settings name, with the epsilon of the field."""
    settings = {k: v for k, v in config.optimizer.items() if k != "_target_"}
    optimizer_class = getattr(torch.optim, config.optimizer["_target_"].rsplit(".", 1)[1])
    if optimizer_class is not torch.optim.SGD:
        settings = {"eps": 1e-5, **settings}
    return optimizer_class(model.parameters(), lr=lr, **settings)


@dataclass
class Sums:
    """Sums over the samples of one minibatch."""

    policy_loss: torch.Tensor | float = 0.0
    value_loss: torch.Tensor | float = 0.0
    entropy: torch.Tensor | float = 0.0
    kl: float = 0.0

    def add_policy(self, log_prob, old_log_prob, advantage, clip):
        """Take in the policy loss of one sample: that of A2C without a clip range, else of PPO."""
        if clip is None:
            self.policy_loss = self.policy_loss - log_prob * advantage
            return
        log_ratio = log_prob - old_log_prob
        ratio = log_ratio.exp()
        terms = [ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage]
        self.policy_loss = self.policy_loss - min(terms, key=lambda x: x.item())
        self.kl += ratio.item() - 1 - log_ratio.item()


@dataclass
class SlowUpdate:
    """One update; `run` changes the weights of the model.

    Args:
        model: Any actor-critic network.
        rollout: T steps of B environments.
        action_space: The action space.
        config: Settings of the algorithm; of these lr, entropy_coef and clip_range are not read.
        now: Current values of the settings that may be scheduled.
        critic: Meaning of the critic's output.
        critic_only: Whether the policy burns in.
    """

    model: torch.nn.Module
    rollout: Rollout
    action_space: spaces.Space
    config: ActorCriticConfig
    now: Coefficients
    critic: Critic
    critic_only: bool

    def run(self, orders):
        """Take steps until a minibatch moves too far; returns how many."""
        target_kl = getattr(self.config, "target_kl", 0.0)
        optimizer = make_optimizer(self.model, self.config, self.now.lr)
        self.samples = slow_targets(self.model, self.rollout, self.config, self.critic)
        with torch.no_grad():
            self.old_log_probs = [self.evaluate(i)[0].item() for i in range(len(self.samples))]
        taken = 0
        for number, minibatches in enumerate(orders):
            if number and getattr(self.config, "recompute_advantages", False):
                self.samples = slow_targets(self.model, self.rollout, self.config, self.critic)
            for minibatch in minibatches:
                sums = self.sums_over(minibatch)
                if 0 < target_kl < sums.kl / len(minibatch):
                    return taken
                self.step(optimizer, sums, len(minibatch))
                taken += 1
        return taken

    def evaluate(self, i):
        """Log-probability, entropy and raw value of sample i under the current weights."""
        t, b = divmod(i, self.rollout.rewards.shape[1])
        params, raw = self.model(at(self.rollout.obs, t, b))
        action = element(self.rollout.actions, t, b)
        return (*slow_log_prob_and_entropy(self.action_space, params[0], action), raw[0])

    def sums_over(self, minibatch):
        """The losses of the samples of one minibatch, summed up."""
        sums, advantages = Sums(), [self.samples[i][0] for i in minibatch]
        value_clip = getattr(self.config, "value_clip_range", 0.0)
        if self.config.normalize_advantage:
            advantages = normalized(advantages)
        for i, advantage in zip(minibatch, advantages, strict=True):
            log_prob, entropy, raw = self.evaluate(i)
            _, target, old_value = self.samples[i]
            sums.add_policy(log_prob, self.old_log_probs[i], advantage, self.now.clip)
            sums.value_loss = sums.value_loss + self.critic.loss(raw, target, old_value, value_clip)
            sums.entropy = sums.entropy + entropy
        return sums

    def step(self, optimizer, sums, n):
        """One step on the weighted means."""
        config = self.config
        loss = config.value_loss_coef * sums.value_loss / n
        if not self.critic_only:
            loss = loss + config.policy_loss_coef * sums.policy_loss / n
            loss = loss - self.now.entropy * sums.entropy / n
        optimizer.zero_grad()
        loss.backward()
        if config.max_grad_norm > 0:
            params = [p for p in self.model.parameters() if p.grad is not None]
            torch.nn.utils.clip_grad_norm_(params, config.max_grad_norm)
        optimizer.step()


def slow_update(model, rollout, action_space, config, orders, now, critic=None, critic_only=False):
    """Change the weights of `model` as one update should; returns the number of gradient steps.

    `orders` holds, for each pass, its minibatches as lists of sample indices; see `SlowUpdate`.
    """
    update = SlowUpdate(model, rollout, action_space, config, now, critic or Critic(), critic_only)
    return update.run(orders)
