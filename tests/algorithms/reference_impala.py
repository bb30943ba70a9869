"""Updates of IMPALA, written from the paper: sums over the steps of each episode.

Nothing of the package is called but the networks, one step of one environment at a time.
Gradients are those of autograd, clipping is that of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from reference_actor_critic import (
    Critic,
    at,
    element,
    make_optimizer,
    normalized,
    slow_log_prob_and_entropy,
)

if TYPE_CHECKING:
    from gymnasium import spaces

    from maze_train.algorithms.impala.config import ImpalaAlgorithmConfig
    from maze_train.data.rollout import Rollout


class Step(NamedTuple):
    """What the networks say about one step; all but `value` has a gradient."""

    log_prob: torch.Tensor
    entropy: torch.Tensor
    raw: torch.Tensor
    value: float


def clipped(ratio, threshold):
    """The smaller one; None is no bound."""
    return ratio if threshold is None else min(ratio, threshold)


class SlowRMSprop:
    """RMSProp of TensorFlow 1: the mean square starts at 1, epsilon is under the root."""

    def __init__(self, params, lr, alpha, eps, momentum=0.0):
        self.params, self.lr, self.eps = list(params), lr, eps
        self.alpha, self.momentum = alpha, momentum
        self.squares = [torch.ones_like(param) for param in self.params]
        self.moves = [torch.zeros_like(param) for param in self.params]

    def zero_grad(self):
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def step(self):
        for param, square, move in zip(self.params, self.squares, self.moves, strict=True):
            square.copy_(self.alpha * square + (1 - self.alpha) * param.grad**2)
            step = self.lr * param.grad / (square + self.eps).sqrt()
            move.copy_(self.momentum * move + step)
            param -= move


class SlowImpala:
    """A learner that keeps its optimizer from one update to the next.

    Args:
        model: Any actor-critic network; its weights change.
        action_space: The action space.
        config: Settings of the algorithm; numbers, no schedules.
        critic: Meaning of the critic's output.
    """

    def __init__(self, model, action_space: spaces.Space, config: ImpalaAlgorithmConfig, critic):
        self.model, self.space, self.config = model, action_space, config
        self.critic = critic or Critic()
        node = dict(config.optimizer)
        if node["_target_"].endswith("RMSpropTF"):
            del node["_target_"]
            self.optimizer = SlowRMSprop(model.parameters(), config.lr, **node)
        else:
            self.optimizer = make_optimizer(model, config, config.lr)

    # -- networks --------------------------------------------------------------------------------

    def inputs(self, obs):
        """What networks read: without masks, normalised by the formula."""
        if isinstance(obs, dict):
            obs = {key: x for key, x in obs.items() if key != "action_mask"}
        normalizer = self.model.normalizer
        if normalizer is None:
            return obs

        def scaled(x):
            x = (x - normalizer.mean) / (normalizer.var + 1e-8).sqrt()
            return x.clamp(-normalizer._clip, normalizer._clip)

        return {key: scaled(x) for key, x in obs.items()} if isinstance(obs, dict) else scaled(obs)

    def features(self, obs, state):
        """Features of one observation, and what is remembered after it."""
        x = self.inputs(obs)
        if self.model.trunk is not None:
            x = self.model.trunk(x)
        return (x, None) if self.model.memory is None else self.model.memory.step(x, state)

    def policy_terms(self, params, obs, action):
        """Log-probability and entropy; with a mask, of the legal actions alone."""
        if not isinstance(obs, dict) or "action_mask" not in obs:
            return slow_log_prob_and_entropy(self.space, params, action)
        legal = obs["action_mask"][0].bool()
        assert bool(legal[action])
        probabilities = params[legal].exp() / params[legal].exp().sum()
        log_prob = (params[action].exp() / params[legal].exp().sum()).log()
        return log_prob, -(probabilities * probabilities.log()).sum()

    def run(self, rollout: Rollout):
        """Steps by place, values of all rows by place, and those of last observations.

        A memory begins with what the actor remembered in the first row, and goes on with what
        these networks remember. Gradients flow back through `sequence_length` steps.
        """
        steps, self.values, self.finals = {}, {}, {}
        positions = rollout.final_positions.tolist()
        length = self.config.sequence_length or rollout.num_steps + 1
        for b in range(rollout.num_envs):
            state = None if rollout.hidden_states is None else rollout.hidden_states[0, b : b + 1]
            for t in range(rollout.num_steps + 1):
                if state is not None and t % length == 0:
                    state = state.detach()
                obs = at(rollout.obs, t, b)
                x, state = self.features(obs, state)
                raw = self.model.critic(x)[0]
                self.values[t, b] = value = self.critic.value(raw)
                if t == rollout.num_steps:
                    break
                action = element(rollout.actions, t, b)
                terms = self.policy_terms(self.model.policy(x)[0], obs, action)
                steps[t, b] = Step(*terms, raw, value)
                if t * rollout.num_envs + b in positions:
                    k = positions.index(t * rollout.num_envs + b)
                    last, _ = self.features(at(rollout.final_obs, k), state)
                    self.finals[t, b] = self.critic.value(self.model.critic(last)[0])
                if state is not None and self.begins_after(rollout, t, b):
                    state = torch.zeros_like(state)
        return steps

    # -- V-trace ---------------------------------------------------------------------------------

    @staticmethod
    def is_ignored(rollout, t, b):
        """Whether the row is no transition."""
        return rollout.valid is not None and not bool(rollout.valid[t, b])

    def begins_after(self, rollout, t, b):
        """Whether row t + 1 is the first one of an episode."""
        ended = rollout.terminated[t, b] or rollout.truncated[t, b]
        return bool(ended) or self.is_ignored(rollout, t, b)

    def is_last(self, rollout, t, b):
        """Whether nothing after step t belongs to it: its episode ended or was lost, or row T."""
        last_row = t == rollout.num_steps - 1
        return last_row or self.begins_after(rollout, t, b) or self.is_ignored(rollout, t + 1, b)

    def errors(self, rollout):
        """Temporal differences r + gamma V(x') - V(x) by place, and V(x'): 0 after the end."""
        errors, following = {}, {}
        for t, b in self.places(rollout):
            following[t, b] = self.values[t + 1, b]
            if rollout.terminated[t, b]:
                following[t, b] = 0.0
            elif rollout.truncated[t, b]:
                following[t, b] = self.finals[t, b]
            reward = float(rollout.rewards[t, b])
            errors[t, b] = reward + self.config.gamma * following[t, b] - self.values[t, b]
        return errors, following

    def places(self, rollout):
        """All transitions in order of time."""
        every = ((t, b) for t in range(rollout.num_steps) for b in range(rollout.num_envs))
        return [place for place in every if not self.is_ignored(rollout, *place)]

    def targets(self, rollout, ratios):
        """Advantages and targets by place: eq. 1, and the policy gradient of section 4.2.

        v_s = V(x_s) + sum over t >= s of gamma^(t-s) (c_s ... c_(t-1)) rho_t delta_t, with
        c_i = lambda min(c_bar, ratio_i), c_bar = min(1, rho_bar); the sum ends with the episode.
        """
        config, targets, advantages = self.config, {}, {}
        c_bar = clipped(1.0, config.vtrace_clip_rho_threshold)
        errors, following = self.errors(rollout)
        for s, b in self.places(rollout):
            total, weight, t = 0.0, 1.0, s
            while True:
                rho = clipped(ratios[t, b], config.vtrace_clip_rho_threshold)
                total += weight * rho * errors[t, b]
                if self.is_last(rollout, t, b):
                    break
                weight *= config.gamma * config.gae_lambda * min(c_bar, ratios[t, b])
                t += 1
            targets[s, b] = self.values[s, b] + total
        for s, b in targets:
            q = following[s, b]
            if not self.is_last(rollout, s, b):
                q += config.gae_lambda * (targets[s + 1, b] - self.values[s + 1, b])
            rho = clipped(ratios[s, b], config.vtrace_clip_pg_rho_threshold)
            error = float(rollout.rewards[s, b]) + config.gamma * q - self.values[s, b]
            advantages[s, b] = rho * error
        return advantages, targets

    # -- the update ------------------------------------------------------------------------------

    def update(self, rollout: Rollout):
        """One step on a rollout; returns the importance weights of its transitions."""
        config, steps = self.config, self.run(rollout)
        places = self.places(rollout)
        ratios = {
            place: (steps[place].log_prob.detach() - rollout.log_probs[place]).exp().item()
            for place in places
        }
        by_place, targets = self.targets(rollout, ratios)
        advantages = [by_place[place] for place in places]
        if config.normalize_advantage:
            advantages = normalized(advantages)
        loss = torch.zeros(())
        for place, advantage in zip(places, advantages, strict=True):
            step = steps[place]
            error = self.critic.loss(step.raw, self.critic.h(targets[place]), 0.0, 0.0)
            loss = loss - config.policy_loss_coef * step.log_prob * advantage
            loss = loss + config.value_loss_coef * error - config.entropy_coef * step.entropy
        if config.loss_reduction == "mean":
            loss = loss / len(places)
        self.optimizer.zero_grad()
        loss.backward()
        if config.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
        self.optimizer.step()
        return ratios
