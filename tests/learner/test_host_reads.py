"""Within an update, no value is read on the host between gradient steps."""

from __future__ import annotations

import pytest
import run_cases
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from maze_train import Callback
from maze_train.nets import recurrent

METHODS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")
OPERATIONS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal")
"""Other reads: implicit conversions, and results whose size depends on values."""


class MethodReads(TorchFunctionMode):
    """Mode that records tensor methods that read values."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in METHODS:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


class OperationReads(TorchDispatchMode):
    """Mode that records operations that read values, including boolean indexing."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition(".")[0]
        indices = args[1] if name.startswith("aten::index") and len(args) > 1 else ()
        masks = indices if isinstance(indices, (list, tuple)) else ()
        if name in OPERATIONS or any(m is not None and m.dtype == torch.bool for m in masks):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Watcher(Callback):
    """Callback that counts reads and minibatches in the updates after the first epoch."""

    def __init__(self):
        self.modes, self.minibatches, self.random = (MethodReads(), OperationReads()), 0, []

    def watch(self, minibatches):
        """Yield minibatches and count reads during the gradient steps."""
        before = torch.get_rng_state()
        with self.modes[0], self.modes[1]:
            for minibatch in minibatches:
                self.minibatches += 1
                yield minibatch
        self.random.append(torch.equal(before, torch.get_rng_state()))

    def on_epoch_end(self, run):
        if not self.minibatches:
            minibatches = run.learner.minibatches
            run.learner.minibatches = lambda *args: self.watch(minibatches(*args))


SKIP = {"algorithm.on_non_finite": "skip", "algorithm.max_grad_norm": 0.5}
SCHEDULED = {"algorithm.lr": "linear_0.01", "algorithm.entropy_coef": "linear_0.01"}
RUNS = {
    "ppo": {**SCHEDULED, **SKIP, "algorithm.clip_range": "linear_0.2"},
    "ppo, normalised": {"algorithm.recompute_advantages": True},  # adaptive learning rate
    "ppo, memory": {"algorithm.on_non_finite": "zero"},
    "ppo, frozen parts": {"algorithm.gradient_accumulation": 2},
    "ppo, optimizer of torch": {},
    "a2c": SKIP,  # RMSprop
    "impala": SKIP,
    "sac": {"algorithm.lr": "linear_0.001", **SKIP},
    "td3": {"algorithm.update_order": "critics_first"},
    "dqn": {},
    "bc": {},
    "agents: ppo": {},
    "agents: sac": {},
}


@pytest.mark.parametrize("case", RUNS)
def test_gradient_steps_read_nothing_on_the_host(case, tmp_path, monkeypatch):
    """Random numbers only come from the learner's generator."""
    # The modes of this test must not select the implementation for traced calls.
    monkeypatch.setattr(recurrent, "is_traced", lambda x: False)
    watcher = Watcher()
    run_cases.start(case, tmp_path / "run", callbacks=[watcher], **RUNS[case])
    methods, operations = (mode.found for mode in watcher.modes)
    assert watcher.minibatches >= 6
    assert (methods, operations) == ([], [])
    assert all(watcher.random)
