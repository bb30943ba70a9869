"""A small learner that fits lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from maze_train import GradientSettings, Learner

ADAM = {"_target_": "torch.optim.Adam"}


@dataclass(kw_only=True)
class LineSettings(GradientSettings):
    """Settings of `LineLearner`."""

    lr: Any = 0.1
    gradient_accumulation: int = 1

    @property
    def accumulated_minibatches(self) -> int:
        return self.gradient_accumulation


def make_module(seed=0):
    """Return a linear model with two inputs."""
    torch.manual_seed(seed)
    return nn.Linear(2, 1)


def make_data(seed=0, size=10):
    """Return random inputs and targets, `[size, 3]`."""
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))


class LineLearner(Learner[torch.Tensor, torch.Tensor, torch.Tensor]):
    """Least squares on shuffled minibatches; records every call.

    Experience is `[N, 3]`: two inputs and a target per row.
    """

    settings_class = LineSettings

    def __init__(self, modules, batch_size=4, refused=(), stop_at=None, seed=0, **settings):
        self.calls = []
        self.batch_size, self.refused, self.stop_at = batch_size, refused, stop_at
        super().__init__(modules, self.settings_class(**settings), seed=seed)

    def note(self, call):
        """Record a call."""
        self.calls.append(call)

    def before_gradient_based_update(self, progress, statistics):
        self.note("before")
        super().before_gradient_based_update(progress, statistics)

    def preprocess(self, module_id, experience, statistics):
        self.note(f"preprocess {module_id}")
        return experience

    def minibatches(self, prepared, statistics):
        self.note("minibatches " + ",".join(prepared))
        orders = {
            key: torch.randperm(len(data), generator=self.generator)
            for key, data in prepared.items()
        }
        for start in range(0, max(map(len, prepared.values())), self.batch_size):
            rows = slice(start, start + self.batch_size)
            yield {
                key: data[orders[key][rows]] for key, data in prepared.items() if start < len(data)
            }

    def compute_losses(self, minibatch, statistics):
        self.note("losses")
        return super().compute_losses(minibatch, statistics)

    def compute_loss_for_module(self, module_id, batch, statistics):
        module = self.modules[module_id]
        self.note(f"loss {module_id} {'train' if module.training else 'eval'}")
        return (module(batch[:, :2]).squeeze(-1) - batch[:, 2]).square().mean()

    def modules_to_stop(self, kept):
        stops = self.stop_at is not None and self.calls.count("losses") > self.stop_at
        return self.modules if stops else ()

    def compute_gradients(self, losses, optimizers):
        self.note("gradients")
        super().compute_gradients(losses, optimizers)

    def postprocess_gradients(self, optimizers):
        self.note("postprocess")
        return super().postprocess_gradients(optimizers)

    def apply_gradients(self, optimizers, skip):
        self.note("apply")
        super().apply_gradients(optimizers, skip)

    def after_gradient_step(self, module_ids):
        self.note("after step")
        super().after_gradient_step(module_ids)

    def should_module_be_updated(self, module_id, experience):
        wanted = super().should_module_be_updated(module_id, experience)
        return wanted and module_id not in self.refused

    def after_gradient_based_update(self, progress, statistics):
        self.note(f"after {self.weights_seq_no}")
        super().after_gradient_based_update(progress, statistics)
