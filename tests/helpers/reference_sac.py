"""Reference SAC, written from the papers, sample by sample, with autograd."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from gymnasium import spaces
from torch.distributions import Bernoulli, Categorical, Normal

from maze_train.spaces.describe import flat_spaces

DISCRETE_SHARE = 0.98


class SlowPart:
    """One action component with its slices of parameters, noise and critic outputs."""

    def __init__(self, space, params, choices):
        self.space, self.params, self.choices = space, params, choices

    @property
    def is_box(self):
        return isinstance(self.space, spaces.Box)

    def sizes(self):
        return [int(n) for n in getattr(self.space, "nvec", [getattr(self.space, "n", 0)])]

    def sample(self, row, noise):
        """Return the squashed action in [-1, 1] and its log-density for one row of parameters."""
        size = math.prod(self.space.shape)
        mean, log_std = row[:size], row[size:].clamp(-20.0, 2.0)
        normal = Normal(mean, log_std.exp())
        u = mean + log_std.exp() * noise
        squashed = torch.tanh(u)
        return squashed, (normal.log_prob(u) - torch.log(1.0 - squashed**2)).sum()

    def groups(self, row):
        """Return the probabilities of each choice for one row of parameters."""
        if isinstance(self.space, spaces.MultiBinary):
            ons = [Bernoulli(logits=logit).probs for logit in row]
            return [torch.stack([1.0 - on, on]) for on in ons]
        return [Categorical(logits=piece).probs for piece in row.split(self.sizes())]


def slow_parts(action_space, distribution):
    """Return the components of an action space with the slices of their parameters and noise."""
    families = getattr(distribution, "parts", {"": distribution})
    leaves = flat_spaces(action_space)
    found, at, noise_at, choice_at = {}, 0, 0, 0
    for key, family in families.items():
        part = SlowPart(leaves[key], slice(at, at + family.param_size), None)
        part.noise = slice(noise_at, noise_at + family.noise_size)
        if not part.is_box:
            part.choices = slice(choice_at, choice_at + family.num_choices)
            choice_at += family.num_choices
        at, noise_at = at + family.param_size, noise_at + family.noise_size
        found[key] = part
    return found


def soft_value(parts, row, noise, alphas, lowest_of):
    """Return V(s) of a state and the entropy of each component; `lowest_of` maps features to q."""
    features, bonus, entropies = [], 0.0, []
    for part, alpha in zip(parts.values(), alphas, strict=True):
        if part.is_box:
            squashed, log_prob = part.sample(row[part.params], noise[part.noise])
            features.append(squashed)
            bonus = bonus - alpha * log_prob
            entropies.append(-log_prob)
        else:
            groups = part.groups(row[part.params])
            entropy = sum(-(p * torch.where(p > 0, p, 1.0).log()).sum() for p in groups)
            bonus = bonus + alpha * entropy
            entropies.append(entropy)
    q = lowest_of(torch.cat(features) if features else row[:0])
    discrete = [part for part in parts.values() if not part.is_box]
    if not discrete:
        return q[0] + bonus, entropies
    value = bonus
    for part in discrete:
        probs = torch.cat(part.groups(row[part.params]))
        value = value + (probs * q[part.choices]).sum()
    return value, entropies


def target_entropy(part, row):
    """Return the target entropy of a component in one state."""
    if part.is_box:
        return -float(math.prod(part.space.shape))
    legal = [int((p > 0).sum()) for p in part.groups(row[part.params])]
    return DISCRETE_SHARE * sum(math.log(n) for n in legal)


def chosen(parts, actions, i):
    """Return the features of stored action i and the critic outputs that it selects."""
    features, picks = [], []
    for key, part in parts.items():
        action = (actions[key] if isinstance(actions, dict) else actions)[i]
        if part.is_box:
            features.append(torch.tanh(action.flatten()))
        elif isinstance(part.space, spaces.MultiBinary):
            for bit, on in enumerate(action.flatten().tolist()):
                picks.append(part.choices.start + 2 * bit + int(on))
        else:
            start = part.choices.start
            for n, value in zip(part.sizes(), action.flatten().tolist(), strict=True):
                picks.append(start + int(value))
                start += n
    return (torch.cat(features) if features else torch.zeros(0)), picks


def row_of(tree, i):
    """Return sample i with a batch dimension of 1."""
    if isinstance(tree, dict):
        return {key: leaf[i : i + 1] for key, leaf in tree.items()}
    return tree[i : i + 1]


def step_each(losses):
    """Step each optimizer with its loss; return the norm of all gradients."""
    groups = [optimizer.param_groups[0]["params"] for optimizer, _ in losses]
    gradients = [
        torch.autograd.grad(loss, params, retain_graph=True)
        for (_, loss), params in zip(losses, groups, strict=True)
    ]
    for (optimizer, _), params, own in zip(losses, groups, gradients, strict=True):
        for param, gradient in zip(params, own, strict=True):
            param.grad = gradient
        optimizer.step()
    return math.sqrt(sum(float(gradient.square().sum()) for own in gradients for gradient in own))


def of_critics(values):
    """Return the statistics of action values, given as one list of critic values per sample."""
    found = {"critic_value": sum(map(sum, values)) / (len(values) * len(values[0]))}
    if len(values[0]) > 1:
        found["critic_spread"] = sum(max(own) - min(own) for own in values) / len(values)
    return found


def tagged(statistics):
    """Return statistics of learners by tag."""
    values = {name: torch.as_tensor(value).detach() for name, value in statistics.items()}
    return {f"train/{name}": float(value) for name, value in values.items()}


@torch.no_grad()
def move(target, source, tau):
    """Move the target network towards the trained network."""
    for a, b in zip(target.parameters(), source.parameters(), strict=True):
        a.copy_((1 - tau) * a + tau * b)


class SlowSAC:
    """Copy of a model with three plain optimizers; `step` is one gradient step."""

    def __init__(self, model, action_space, config):
        self.model = copy.deepcopy(model)
        self.config = config
        self.parts = slow_parts(action_space, model.distribution)
        with torch.no_grad():
            self.model.log_temperatures.fill_(math.log(config.entropy_coef))
        self.steps = 0
        adam = {"eps": config.optimizer["eps"]}
        self.policy = torch.optim.Adam(self.model.policy.parameters(), config.lr, **adam)
        self.critics = torch.optim.Adam(
            self.model.critics.parameters(), config.critic_lr or config.lr, **adam
        )
        self.temperature = torch.optim.Adam(
            [self.model.log_temperatures], config.entropy_coef_lr or config.lr, **adam
        )

    def step(self, batch, noise_of_next, noise):
        """Update critics, then policy and temperatures; return all statistics by tag."""
        found, before = {"learning_rate": self.config.lr}, copy.deepcopy(self.model.critics)
        norms = [self.update_critics(batch, noise_of_next, found)]
        if self.steps % self.config.policy_update_interval == 0:
            after = self.model.critics
            if self.config.update_order == "joint":
                self.model.critics = before
            norms.append(self.update_policy(batch, noise, found))
            self.model.critics = after
            if self.config.update_order == "joint":
                norms = [math.hypot(*norms)]
        self.skip()
        return tagged({**found, "gradient_steps": 1.0, "grad_norm": np.mean(norms)})

    def skip(self):
        """Count a step; update the target networks if due."""
        self.steps += 1
        if self.steps % self.config.target_update_interval == 0:
            move(self.model.target_critics, self.model.critics, self.config.tau)

    def update_critics(self, batch, noise_of_next, found):
        """Add the statistics of the critics; return the gradient norm."""
        model, n, critic_loss, values = self.model, len(batch.rewards), 0.0, []
        alphas = model.log_temperatures.detach().exp()
        for i in range(n):
            obs, next_obs = row_of(batch.obs, i), row_of(batch.next_obs, i)
            with torch.no_grad():
                row = model.policy_params(next_obs)[0]
                inputs = model.inputs(next_obs)
                value, _ = soft_value(
                    self.parts,
                    row,
                    noise_of_next[i],
                    alphas,
                    lambda x, inputs=inputs: model.target_critics(inputs, x[None])[:, 0].amin(0),
                )
                target = batch.rewards[i] + batch.discounts[i] * value
            features, picks = chosen(self.parts, batch.actions, i)
            q = model.critics(model.inputs(obs), features[None])[:, 0]
            taken = q[:, picks].sum(1) if picks else q[:, 0]
            values.append(taken.tolist())
            weight = 1.0 if batch.weights is None else batch.weights[i]
            critic_loss = critic_loss + weight * 0.5 * ((taken - target) ** 2).sum() / n
        found |= {"critic_loss": critic_loss, "entropy_coef": alphas.mean(), **of_critics(values)}
        return step_each([(self.critics, critic_loss)])

    def update_policy(self, batch, noise, found):
        """Add the statistics of policy and temperatures; return the gradient norm."""
        model, n, entropy, targets = self.model, len(batch.rewards), 0.0, 0.0
        alphas = model.log_temperatures.detach().exp()
        policy_loss = temperature_loss = 0.0
        for i in range(n):
            obs = row_of(batch.obs, i)
            inputs, row = model.inputs(obs), model.policy_params(obs)[0]
            value, entropies = soft_value(
                self.parts,
                row,
                noise[i],
                alphas,
                lambda x, inputs=inputs: model.critics(inputs, x[None])[:, 0].amin(0),
            )
            policy_loss = policy_loss - value / n
            for k, part in enumerate(self.parts.values()):
                target = self.config.target_entropy_multiplier * target_entropy(part, row.detach())
                gap = entropies[k].detach() - target
                entropy, targets = entropy + entropies[k].detach() / n, targets + target / n
                temperature_loss = temperature_loss + model.log_temperatures[k] * gap / n
        losses = [(self.policy, policy_loss)]
        found |= {"policy_loss": policy_loss, "policy_entropy": entropy}
        if self.config.entropy_tuning:
            losses.append((self.temperature, temperature_loss))
            found |= {"temperature_loss": temperature_loss, "target_entropy": targets}
        return step_each(losses)
