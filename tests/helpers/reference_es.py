"""Reference updates of evolution strategies, written from the paper with loops over members.

Calls nothing of the package. The optimizer is PyTorch's; all else uses lists of Python floats.
"""

from __future__ import annotations

import math
import statistics

import torch


def slow_ranks(returns: list[float]) -> list[float]:
    """Return the fraction of other entries that each entry beats (ties count half), minus 1/2."""
    utilities = []
    for i, own in enumerate(returns):
        rank = 0.0
        for j, other in enumerate(returns):
            if i != j:
                rank += 1.0 if other < own else 0.5 if other == own else 0.0
        utilities.append(rank / (len(returns) - 1) - 0.5 if len(returns) > 1 else 0.0)
    return utilities


def slow_normalized(returns: list[float]) -> list[float]:
    """Return the distances from the mean in units of the standard deviation."""
    m = len(returns)
    mean = math.fsum(returns) / m
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in returns) / m)
    return [(r - mean) / std for r in returns]


def slow_gradient(utilities: list[list[float]], noise: list[list[float]]) -> list[float]:
    """Return the mean of u * eps over all 2 n policies; in each pair, the second has noise -eps."""
    policies = []
    for (plus, minus), eps in zip(utilities, noise, strict=True):
        policies += [(plus, eps), (minus, [-e for e in eps])]
    return [
        math.fsum(u * eps[i] for u, eps in policies) / len(policies) for i in range(len(noise[0]))
    ]


SHAPINGS = {"centered_ranks": slow_ranks, "normalized": slow_normalized, "raw": list}


def norm(vector):
    """Return the Euclidean norm."""
    return math.sqrt(math.fsum(x * x for x in vector))


class SlowES:
    """Reference learner that keeps its optimizer between updates.

    Args:
        params: All trainable parameters; they are copied.
        config: Settings of the algorithm.
        make_optimizer: Function that builds a PyTorch optimizer.
    """

    def __init__(self, params, config, make_optimizer):
        self.params = [torch.nn.Parameter(p.detach().double().clone()) for p in params]
        self.config, self.optimizer = config, make_optimizer(self.params, lr=1.0)

    @property
    def theta(self):
        """Return all parameters as one list."""
        return [x for param in self.params for x in param.detach().flatten().tolist()]

    def update(self, returns, noise, lr):
        """Update from the returns (plus, minus) and the noise of each pair; return the metrics."""
        config, old = self.config, self.theta
        flat = [r for pair in returns for r in pair]
        utilities = SHAPINGS[config.fitness_shaping](flat)
        pairs = list(zip(utilities[::2], utilities[1::2], strict=True))
        ascent = slow_gradient(pairs, noise)
        descent = [config.l2_penalty * p - g for p, g in zip(old, ascent, strict=True)]
        length = norm(descent)
        bound = config.max_grad_norm
        if bound:
            share = bound / (length + 1e-6)  # as in PyTorch
            descent = [g * min(share, 1.0) for g in descent]
        has_gradient = any(ascent)
        if has_gradient:
            self.optimizer.param_groups[0]["lr"] = lr
            sizes = [param.numel() for param in self.params]
            pieces = torch.tensor(descent, dtype=torch.float64).split(sizes)
            for param, piece in zip(self.params, pieces, strict=True):
                param.grad = piece.view_as(param)
            self.optimizer.step()
        steps = [new - p for new, p in zip(self.theta, old, strict=True)]
        return {
            "train/policy_grad_norm": norm(ascent),
            **({"train/grad_norm": length} if has_gradient else {}),
            **({"train/grad_norm_clipped": norm(descent)} if has_gradient and bound else {}),
            "train/policy_norm": norm(old),
            "train/update_ratio": norm(steps) / norm(old),
            "train/fitness_std": statistics.pstdev(flat),
            "train/learning_rate": lr,
            "train/gradient_steps": float(has_gradient),
        }
