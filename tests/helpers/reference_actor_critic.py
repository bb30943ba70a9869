"""Reference updates of A2C, PPO and IMPALA, written from the papers with sums over samples.

Apart from the networks, nothing of the package is called, and environments are stepped one by one.
Log-probabilities, entropies, advantages, losses and values are computed by formulas for single
samples. Gradients come from autograd; clipping and most optimizers come from PyTorch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from reference_returns import Steps, slow_vtrace

from maze_train.spaces.describe import flat_spaces


@dataclass
class Critic:
    """Interpretation of the critic output: a value, h of Pohlen et al., or categories of MuZero."""

    epsilon: float | None = None
    support: tuple[int, int] | None = None

    def h(self, x):
        """The transform as printed in the paper."""
        if self.epsilon is None:
            return x
        return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + self.epsilon * x

    def h_inverse(self, y):
        """The inverse transform as printed in the paper."""
        e = self.epsilon
        if e is None:
            return y
        root = (math.sqrt(1 + 4 * e * (abs(y) + 1 + e)) - 1) / (2 * e)
        return math.copysign(root**2 - 1, y)

    def predict(self, raw):
        """Return the prediction on the transformed scale, with gradient."""
        if self.support is None:
            return raw[0]
        total = sum(x.exp() for x in raw)
        return sum((self.support[0] + k) * x.exp() / total for k, x in enumerate(raw))

    def value(self, raw):
        """Return the state value as a float."""
        return self.h_inverse(self.predict(raw).item())

    def loss(self, raw, target, old, clip):
        """Return the loss of one sample; target and old value are on the transformed scale."""
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
    """Return the joint log-probability of one action and the entropy, from the definitions.

    Parameters of a joint distribution: the network outputs by component, then the free parameters.
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
    """Return the number of network outputs for one component of the action."""
    if isinstance(space, spaces.Box):
        return math.prod(space.shape)
    return int(space.n) if isinstance(space, spaces.Discrete) else int(space.nvec.sum())


def at(tree, *index):
    """Return one element of a tensor, or of every tensor of a mapping, as a batch of one."""
    if isinstance(tree, dict):
        return {key: x[index].unsqueeze(0) for key, x in tree.items()}
    return tree[index].unsqueeze(0)


def element(tree, *index):
    """Return one action."""
    return {k: x[index] for k, x in tree.items()} if isinstance(tree, dict) else tree[index]


def normalized(advantages):
    """Scale to mean 0 and sample standard deviation 1; a single advantage is unchanged."""
    n = len(advantages)
    if n < 2:
        return advantages
    mean = sum(advantages) / n
    std = math.sqrt(sum((a - mean) ** 2 for a in advantages) / (n - 1))
    return [(a - mean) / (std + 1e-8) for a in advantages]


def scaled(advantages):
    """Scale to root mean square 1."""
    size = math.sqrt(sum(a * a for a in advantages) / len(advantages))
    return [a / (size + 1e-8) for a in advantages]


class Step(NamedTuple):
    """Network outputs for one step; all but `value` have gradients."""

    log_prob: torch.Tensor
    entropy: torch.Tensor
    raw: torch.Tensor
    value: float


class Sample(NamedTuple):
    """Fixed inputs of the loss; target and old value are on the scale of the critic."""

    advantage: float
    target: float
    old_value: float


class SlowRMSprop:
    """RMSProp of TensorFlow 1: the mean square starts at 1, epsilon is inside the square root."""

    def __init__(self, params, lr, alpha, eps, momentum=0.0):
        self.params, self.eps, self.alpha, self.momentum = list(params), eps, alpha, momentum
        self.param_groups = [{"lr": lr}]
        self.squares = [torch.ones_like(param) for param in self.params]
        self.moves = [torch.zeros_like(param) for param in self.params]

    def zero_grad(self):
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def step(self):
        lr = self.param_groups[0]["lr"]
        for param, square, move in zip(self.params, self.squares, self.moves, strict=True):
            square.copy_(self.alpha * square + (1 - self.alpha) * param.grad**2)
            step = lr * param.grad / (square + self.eps).sqrt()
            move.copy_(self.momentum * move + step)
            param -= move


def make_optimizer(model, config):
    """Return the configured optimizer; the default epsilon is 1e-5."""
    settings = {"lr": 0.0, **config.optimizer}
    name = settings.pop("_target_").rsplit(".", 1)[1]
    if name == "RMSpropTF":
        return SlowRMSprop(model.parameters(), **settings)
    if name != "SGD":
        settings = {"eps": 1e-5, **settings}
    return getattr(torch.optim, name)(model.parameters(), **settings)


class SlowLearner:
    """Reference learner that keeps its optimizer between updates.

    Args:
        model: Any actor-critic network; it is updated in place.
        action_space: The action space.
        config: Settings of the algorithm.
        critic: Interpretation of the critic's output.
    """

    def __init__(self, model, action_space, config, critic=None):
        self.model, self.space, self.config = model, action_space, config
        self.critic = critic or Critic()
        self.updates = 0
        self.optimizer = make_optimizer(model, config)
        # Only IMPALA uses importance ratios; A2C and PPO train the policy that acts.
        self.has_ratios = hasattr(config, "vtrace_clip_rho_threshold")

    # -- networks --------------------------------------------------------------------------------

    def inputs(self, obs, hidden=()):
        """Return the network inputs: normalized, without masks and hidden keys."""
        if isinstance(obs, dict):
            obs = {key: x for key, x in obs.items() if key not in ("action_mask", *hidden)}
        normalizer = self.model.normalizer
        if normalizer is None:
            return obs

        sizes = [math.prod(shape) for shape in normalizer._shapes.values()]
        moments = (torch.split(m, sizes) for m in (normalizer.mean, normalizer.var))
        of_key = dict(zip(normalizer.keys, zip(*moments, strict=True), strict=True))

        def scaled(x, key=""):
            if key not in of_key:
                return x
            x = (x - of_key[key][0]) / (of_key[key][1] + 1e-8).sqrt()
            return x.clamp(-normalizer._clip, normalizer._clip)

        return {k: scaled(x, k) for k, x in obs.items()} if isinstance(obs, dict) else scaled(obs)

    def features(self, obs, state):
        """Return the features of one observation and the recurrent state after it."""
        x = self.inputs(obs, self.model.critic_keys)
        if self.model.trunk is not None:
            x = self.model.trunk(x)
        return (x, None) if self.model.rnn is None else self.model.rnn.step(x, state)

    def raw_value(self, x, obs):
        """Return the critic output; a centralized critic reads all observations, not features."""
        return self.model.critic(self.inputs(obs) if self.model.critic_keys else x)[0]

    def policy_terms(self, params, obs, action):
        """Return log-probability and entropy; with a mask, only legal actions count."""
        if not isinstance(obs, dict) or "action_mask" not in obs:
            return slow_log_prob_and_entropy(self.space, params, action)
        legal = obs["action_mask"][0].bool()
        assert bool(legal[action])
        probabilities = params[legal].exp() / params[legal].exp().sum()
        log_prob = (params[action].exp() / params[legal].exp().sum()).log()
        return log_prob, -(probabilities * probabilities.log()).sum()

    def run(self, rollout, stored):
        """Return steps by position under the current weights; store all values and final values.

        Gradients flow through sequences of `sequence_length` steps. A sequence starts with the
        stored recurrent state, or with the state computed by these networks from the first row on.
        """
        steps, self.values, self.finals = {}, {}, {}
        positions = rollout.final_positions.tolist()
        for b in range(rollout.num_envs):
            state = None if rollout.hidden_states is None else rollout.hidden_states[0, b : b + 1]
            for t in range(rollout.num_steps + 1):
                if state is not None and t % self.length(rollout) == 0:
                    state = rollout.hidden_states[t, b : b + 1] if stored else state.detach()
                obs = at(rollout.obs, t, b)
                x, state = self.features(obs, state)
                raw = self.raw_value(x, obs)
                self.values[t, b] = value = self.critic.value(raw)
                if t == rollout.num_steps:
                    break
                action = element(rollout.actions, t, b)
                terms = self.policy_terms(self.model.policy(x)[0], obs, action)
                steps[t, b] = Step(*terms, raw, value)
                if t * rollout.num_envs + b in positions:
                    k = positions.index(t * rollout.num_envs + b)
                    obs = at(rollout.final_obs, k)
                    last, _ = self.features(obs, state)
                    self.finals[t, b] = self.critic.value(self.raw_value(last, obs))
                if state is not None and begins_after(rollout, t, b):
                    state = torch.zeros_like(state)
        return steps

    def length(self, rollout):
        """Return the number of steps of a sequence."""
        return self.config.sequence_length or rollout.num_steps

    def units(self, rollout):
        """Return the positions of each unit of minibatches: a transition, or a sequence."""
        length = 1 if rollout.hidden_states is None else self.length(rollout)
        return [
            places
            for start in range(0, rollout.num_steps, length)
            for b in range(rollout.num_envs)
            if (places := transitions(rollout, range(start, start + length), [b]))
        ]

    # -- targets ---------------------------------------------------------------------------------

    def samples(self, rollout, ratios):
        """Compute V-trace per episode; with ratios of 1 it equals GAE."""
        config, columns = self.config, np.zeros((6, rollout.num_steps, rollout.num_envs))
        for (t, b), ratio in ratios.items():
            following = self.finals[t, b] if (t, b) in self.finals else self.values[t + 1, b]
            discount = 0.0 if rollout.terminated[t, b] else config.gamma
            trace = 0.0 if is_last(rollout, t, b) else config.gae_lambda
            values = self.values[t, b], following
            columns[:, t, b] = math.log(ratio), discount, rollout.rewards[t, b], *values, trace
        rho_bar = getattr(config, "vtrace_clip_rho_threshold", None)
        pg_rho_bar = getattr(config, "vtrace_clip_pg_rho_threshold", None)
        c_bar = 1.0 if rho_bar is None else min(1.0, rho_bar)
        targets, advantages = slow_vtrace(Steps(*columns), rho_bar, pg_rho_bar, c_bar)
        self.targets = targets
        h = self.critic.h
        return {p: Sample(advantages[p], h(targets[p]), h(self.values[p])) for p in ratios}

    # -- the update ------------------------------------------------------------------------------

    def update(self, rollout, orders, critic_only=False, **changes):
        """Take gradient steps up to the KL limit; return the initial ratios and the step count.

        `orders` has the minibatches of each pass as lists of unit indices; `changes` has the
        current values of scheduled settings.
        """
        now = {**vars(self.config), **changes}
        self.optimizer.param_groups[0]["lr"] = now["lr"]
        steps, units = self.run(rollout, stored=False), self.units(rollout)
        self.old = {place: step.log_prob.item() for place, step in steps.items()}
        ratios = {
            place: math.exp(self.old[place] - rollout.log_probs[place]) if self.has_ratios else 1.0
            for place in transitions(rollout)
        }
        samples, taken = self.samples(rollout, ratios), 0
        self.sums, self.norms = defaultdict(list), []
        self.known = self.statistics(rollout, ratios, now)
        self.updates += 1
        for number, minibatches in enumerate(orders):
            if number and now.get("recompute_advantages"):
                self.run(rollout, stored=False)
                samples = self.samples(rollout, ratios)
            for minibatch in minibatches:
                places = [place for unit in minibatch for place in units[unit]]
                steps = self.run(rollout, stored=not self.has_ratios)
                loss, kl = self.loss({p: (steps[p], samples[p]) for p in places}, now, critic_only)
                if 0 < now.get("target_kl", 0.0) < kl:
                    return ratios, taken
                self.step(loss)
                taken += 1
        return ratios, taken

    def statistics(self, rollout, ratios, now):
        """Return the statistics that are reported before the first step."""
        values = np.array([self.values[place] for place in ratios])
        targets = np.array([float(self.targets[place]) for place in ratios])
        found = {
            "learning_rate": now["lr"],
            "entropy_coef": now["entropy_coef"],
            "values_mean": values.mean(),
            "returns_mean": targets.mean(),
            "explained_variance": 1.0 - (targets - values).var() / targets.var(),
        }
        if "clip_range" in now:
            found["clip_range"] = now["clip_range"]
        if self.has_ratios:
            weights, bound = np.array([*ratios.values()]), now["vtrace_clip_rho_threshold"]
            found["rho_mean"] = weights.mean()
            if bound is not None:
                found["rho_clip_fraction"] = (weights > bound).mean()
        if self.has_ratios and rollout.weights_seq_no is not None:
            new = ... if rollout.replayed is None else ~rollout.replayed
            lags = self.updates - rollout.weights_seq_no[new].double()
            found |= {"policy_lag_mean": float(lags.mean()), "policy_lag_max": float(lags.max())}
        return found

    def reported(self):
        """Return all statistics of the last update by tag."""
        means = {name: sum(values) / len(values) for name, values in self.sums.items()}
        norms = {"gradient_steps": len(self.norms), "grad_norm": np.mean(self.norms)}
        if bound := self.config.max_grad_norm:
            norms["grad_norm_clipped"] = np.mean(
                [norm * min(1.0, bound / (norm + 1e-6)) for norm in self.norms]
            )
        return {f"train/{k}": float(v) for k, v in {**self.known, **means, **norms}.items()}

    def loss(self, batch, now, critic_only):
        """Return the loss of a minibatch and the approximate KL divergence."""
        total, kl, clip = torch.zeros(()), 0.0, now.get("clip_range")
        advantages = [sample.advantage for _, sample in batch.values()]
        if now["normalize_advantage"]:
            advantages = (scaled if self.has_ratios else normalized)(advantages)
        for (place, (step, sample)), advantage in zip(batch.items(), advantages, strict=True):
            value_clip = now.get("value_clip_range", 0.0)
            error = self.critic.loss(step.raw, sample.target, sample.old_value, value_clip)
            total = total + now["value_loss_coef"] * error
            self.sums["value_loss"].append(error.item())
            if critic_only:
                continue
            gain = step.log_prob * advantage
            if clip is not None:
                log_ratio = step.log_prob - self.old[place]
                ratio = log_ratio.exp()
                terms = [ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage]
                gain = min(terms, key=lambda x: x.item())
                divergence = ratio.item() - 1 - log_ratio.item()
                kl += divergence / len(batch)
                self.sums["approximate_kl"].append(divergence)
                self.sums["clip_fraction"].append(abs(ratio.item() - 1) > clip)
            self.sums["policy_loss"].append(-gain.item())
            self.sums["policy_entropy"].append(step.entropy.item())
            total = total - now["policy_loss_coef"] * gain - now["entropy_coef"] * step.entropy
        return total / len(batch) if now.get("loss_reduction", "mean") == "mean" else total, kl

    def step(self, loss):
        """Take one optimizer step."""
        self.optimizer.zero_grad()
        loss.backward()
        params = [p for p in self.model.parameters() if p.grad is not None]
        self.norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in params)))
        if self.config.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(params, self.config.max_grad_norm)
        self.optimizer.step()


def is_ignored(rollout, t, b):
    """Return whether the row is not a transition."""
    return rollout.valid is not None and not bool(rollout.valid[t, b])


def begins_after(rollout, t, b):
    """Return whether row t + 1 is the first row of an episode."""
    ended = rollout.terminated[t, b] or rollout.truncated[t, b]
    return bool(ended) or is_ignored(rollout, t, b)


def is_last(rollout, t, b):
    """Return whether step t is the last of its episode or of the rollout, or a gap follows."""
    last_row = t == rollout.num_steps - 1
    return last_row or begins_after(rollout, t, b) or is_ignored(rollout, t + 1, b)


def transitions(rollout, steps=None, envs=None):
    """Return the positions (t, b) of transitions in time order, for all or some steps and envs."""
    every = (
        (t, b) for t in steps or range(rollout.num_steps) for b in envs or range(rollout.num_envs)
    )
    return [place for place in every if not is_ignored(rollout, *place)]
