"""Updates of evolution strategies, written from the paper: loops over members and over entries.

Nothing of the package is called, and there are no tensors: parameters are lists of Python floats.
"""

from __future__ import annotations

import math


def ranks(returns):
    """Places in the sorted list, scaled to [-0.5, 0.5]; equal returns share their mean place."""
    order = sorted(range(len(returns)), key=lambda i: returns[i])
    utilities = [0.0] * len(returns)
    for i, own in enumerate(returns):
        places = [place for place, j in enumerate(order) if returns[j] == own]
        utilities[i] = sum(places) / len(places) / (len(returns) - 1) - 0.5
    return utilities


def deviation(values):
    """Standard deviation, with the number of values as divisor."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / len(values))


def shaped(returns, shaping):
    """Utilities of returns."""
    if shaping == "centered_ranks":
        return ranks(returns)
    if shaping == "raw":
        return list(returns)
    mean, std = math.fsum(returns) / len(returns), deviation(returns)
    return [(r - mean) / std if std else 0.0 for r in returns]


def norm(vector):
    """Euclidean length."""
    return math.sqrt(math.fsum(x * x for x in vector))


class SlowAdam:
    """Kingma and Ba (2015), algorithm 1, one entry after the other."""

    def __init__(self, betas=(0.9, 0.999), eps=1e-8):
        self.betas, self.eps, self.t = betas, eps, 0
        self.m, self.v = {}, {}

    def move(self, theta, gradient, lr, sizes):
        """The parameters after a step."""
        self.t += 1
        moved = []
        for i, g in enumerate(gradient):
            self.m[i] = self.betas[0] * self.m.get(i, 0.0) + (1 - self.betas[0]) * g
            self.v[i] = self.betas[1] * self.v.get(i, 0.0) + (1 - self.betas[1]) * g * g
            m = self.m[i] / (1 - self.betas[0] ** self.t)
            v = self.v[i] / (1 - self.betas[1] ** self.t)
            moved.append(theta[i] - lr * m / (math.sqrt(v) + self.eps))
        return moved


class SlowSGD:
    """Steps along v = momentum v + share g; the first v is the first gradient if `full_start`."""

    def __init__(self, momentum=0.0, share=1.0, full_start=True):
        self.momentum, self.share, self.full_start = momentum, share, full_start
        self.v = None

    def move(self, theta, gradient, lr, sizes):
        """The parameters after a step."""
        if self.v is None:
            self.v = list(gradient) if self.full_start else [self.share * g for g in gradient]
        else:
            self.v = [
                self.momentum * v + self.share * g for v, g in zip(self.v, gradient, strict=True)
            ]
        return [p - lr * v for p, v in zip(theta, self.v, strict=True)]


class SlowDirections:
    """Every tensor moves by the learning rate against the direction of its own gradient."""

    def move(self, theta, gradient, lr, sizes):
        """The parameters after a step."""
        moved, start = [], 0
        for size in sizes:
            piece = gradient[start : start + size]
            length = norm(piece)
            moved += [theta[start + i] - lr * g / length for i, g in enumerate(piece)]
            start += size
        return moved


class SlowES:
    """A learner that keeps its optimizer from one update to the next.

    Args:
        theta: All parameters that can be trained.
        sizes: Entries of each tensor of them.
        config: Settings of the algorithm.
        optimizer: What steps.
    """

    def __init__(self, theta, sizes, config, optimizer):
        self.theta, self.sizes, self.config = list(theta), sizes, config
        self.optimizer = optimizer

    def update(self, returns, noise, lr):
        """One step from the returns (plus, minus) and the noise of each pair; gives the metrics."""
        config, old = self.config, self.theta
        members = [
            (r, sign, k)
            for k, pair in enumerate(returns)
            for r, sign in ((pair[0], 1), (pair[1], -1))
        ]
        utilities = shaped([r for r, _, _ in members], config.fitness_shaping)
        ascent = []
        for i in range(len(old)):
            terms = [
                u * sign * noise[k][i] for u, (_, sign, k) in zip(utilities, members, strict=True)
            ]
            ascent.append(math.fsum(terms) / len(members))
        descent = [config.l2_penalty * p - g for p, g in zip(old, ascent, strict=True)]
        length = norm(descent)
        if config.max_grad_norm:
            share = config.max_grad_norm / (length + 1e-6)  # as torch has it
            descent = [g * min(share, 1.0) for g in descent]
        has_gradient = any(ascent)
        if has_gradient:
            self.theta = self.optimizer.move(old, descent, lr, self.sizes)
        steps = [new - p for new, p in zip(self.theta, old, strict=True)]
        return {
            "train/policy_grad_norm": norm(ascent),
            **({"train/grad_norm": length} if has_gradient else {}),
            "train/policy_norm": norm(old),
            "train/update_ratio": norm(steps) / norm(old),
            "train/fitness_std": deviation([r for r, _, _ in members]),
            "train/learning_rate": lr,
            "train/gradient_steps": float(has_gradient),
        }
