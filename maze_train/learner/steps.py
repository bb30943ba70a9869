"""The gradient steps of one update: their statistics, and compiled losses.

A reader can skip this file: numbers are those of `Learner.compute_losses`, but for the rounding of
other sums, and modules keep their names and state. What is compiled is kept by PyTorch in the
directory of `TORCHINDUCTOR_CACHE_DIR`, for further runs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import _dynamo as dynamo
from torch import nn
from torch._dynamo.utils import calculate_time_spent

from maze_train.core.errors import ConfigError, TrainingError
from maze_train.core.events import Event, EventInterface
from maze_train.core.notices import warn
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.learner.optimizers import norm_of
from maze_train.learner.part import OwnStatistics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from maze_train.core.events import Statistics
    from maze_train.core.types import Tensor
    from maze_train.learner.config import Progress


AnyLearner: TypeAlias = Any
"""A `Learner`."""


class LearnerEvents(EventInterface, prefix="train"):
    """Statistics that every learner emits."""

    grad_norm = Event("L2 norm of the gradient before clipping, mean over minibatches.")
    grad_norm_clipped = Event("The same after clipping; empty without.")
    gradient_steps = Event("Gradient steps taken.", reduce="sum")
    learning_rate = Event(
        "Learning rate of the last update, of the first optimizer of a module.", reduce="last"
    )
    skipped_steps = Event("Gradient steps left out: not finite.", reduce="sum")
    zeroed_gradients = Event("Entries of gradients that counted 0: not finite.", reduce="sum")
    compile_s = Event("Seconds that `algorithm.compile` took.", reduce="sum")
    loss = Event("Terms of a loss that has several, each as `train/loss/<term>`.")


class GradientSteps:
    """Takes the gradient steps of one update, and notes what becomes of each.

    Args:
        learner: The learner, with its `active` optimizers, after `compute_gradients`.

    Attributes:
        norms: Norms before clipping, 0-d, of the steps that were taken.
        clipped: Their norms after clipping, 0-d, if there is any.
        zeroed: Entries that were not finite and are 0 now, 0-d.
        skipped: Minibatches whose gradient was not finite, without a step.
        overflows: Steps left out because a scaled loss was too large.
    """

    def __init__(self, learner: AnyLearner) -> None:
        self._learner = learner
        # A look at each norm would stall a GPU; there all are looked at after the update.
        self._looks = (
            learner.device.type == "cpu"
            or learner.on_non_finite == "skip"
            or learner.loss_scaler is not None
        )
        self.norms: list[Tensor] = []
        self.clipped: list[Tensor] = []
        self.zeroed: list[Tensor] = []
        self.skipped: list[int] = []
        self.overflows = 0

    def take(self, number: int) -> None:
        """Take the gradient step of a minibatch, or of those up to it, if it is finite."""
        learner = self._learner
        if learner.accumulation is not None:
            learner.active = learner.accumulation.take()
        if learner.on_non_finite == "zero" and not self._may_have_overflowed():
            self.zeroed += [optimizer.zero_non_finite() for optimizer in learner.active]
        norm = learner.postprocess_gradients()
        if self._looks and not math.isfinite(norm):
            if learner.loss_scaler is not None and learner.loss_scaler.lower():
                self.overflows += 1
            else:
                self.skipped.append(number)
            return
        self.norms.append(norm)
        if any(optimizer.clipping[0] > 0 for optimizer in learner.active):
            self.clipped.append(norm_of([g for o in learner.active for g in o.gradients()]))
        learner.apply_gradients()
        if learner.loss_scaler is not None:
            learner.loss_scaler.count_step()
        learner.after_gradient_step()

    def _may_have_overflowed(self) -> bool:
        """Whether a gradient is not finite that a smaller scale of the loss could mend."""
        scaler = self._learner.loss_scaler
        if scaler is None or scaler.scale <= 1.0:
            return False
        gradients = [gradient for own in self._learner.active for gradient in own.gradients()]
        return not math.isfinite(norm_of(gradients))

    def finish(self, statistics: Statistics, progress: Progress) -> None:
        """Refuse gradients that were not finite, all or each as the settings say; record the rest.

        Raises:
            TrainingError: If they are refused.
        """
        learner, bad = self._learner, self._bad()
        learner.empty_updates = learner.empty_updates + 1 if bad and not self.norms else 0
        skips = learner.on_non_finite == "skip"
        if bad and not (skips and learner.empty_updates < learner.most_empty_updates):
            advice = "; algorithm.on_non_finite=skip leaves such steps out"
            if skips:
                advice = f" (there was no other gradient in {learner.empty_updates} updates)"
            where = f"epoch {progress.epoch + 1}, update {learner.weights_seq_no}"
            # The weights can only be the cause once a step has changed them.
            has_learned = bool(learner.weights_seq_no or bad[0])
            raise _non_finite_error(where, bad[0], statistics, has_learned, advice)
        statistics.record(LearnerEvents.gradient_steps, float(len(self.norms)))
        for norm in self.norms:
            statistics.record(LearnerEvents.grad_norm, norm)
        for norm in self.clipped:
            statistics.record(LearnerEvents.grad_norm_clipped, norm)
        for count in self.zeroed:
            statistics.record(LearnerEvents.zeroed_gradients, count)
        if self.skipped or self.overflows:
            left_out = float(len(self.skipped) + self.overflows)
            statistics.record(LearnerEvents.skipped_steps, left_out)

    def _bad(self) -> list[int]:
        """Minibatches, or steps where no one looked before, whose gradient was not finite."""
        if self._looks or not self.norms:
            return self.skipped
        bad: list[int] = (~torch.isfinite(torch.stack(self.norms))).nonzero().flatten().tolist()
        return bad


def _non_finite_error(
    where: str, minibatch: int, statistics: Statistics, has_learned: bool, advice: str
) -> TrainingError:
    """The error of a gradient that is not finite.

    Args:
        where: Epoch and update.
        minibatch: Number of the minibatch in the update.
        statistics: Of the update; those that are not finite are named.
        has_learned: Whether a step was taken before, which may be the cause.
        advice: Further words for the end.
    """
    numbers = {tag: value for tag, value in statistics.reduce().items() if value - value != 0.0}
    hint = "No step was taken yet: look for"
    if has_learned:
        hint = "A smaller algorithm.lr or an algorithm.max_grad_norm may help, or look for"
    named = "".join(f", {tag} = {value}" for tag, value in numbers.items())
    return TrainingError(
        f"{where}: the gradient of minibatch {minibatch} is not finite{named}. {hint} "
        "observations, rewards or outputs of a network of your own that are not finite, such as "
        f"logits that are all -inf{advice}"
    )


def statistics_of(module_id: str, statistics: Statistics) -> Statistics:
    """Statistics that record under the id of a module, if it is one of several."""
    if module_id == DEFAULT_MODULE:
        return statistics
    own: Statistics = OwnStatistics(statistics, module_id)
    return own


def check_finite(modules: Mapping[str, nn.Module], where: str) -> None:
    """Refuse weights that are not finite; see `Learner.check_weights`."""
    for module_id, module in modules.items():
        for name, value in module.named_parameters():
            if not bool(torch.isfinite(value).all()):
                raise TrainingError(
                    f"{where}: {name} of module {module_id!r} is not finite. A smaller "
                    "algorithm.lr or an algorithm.max_grad_norm may help"
                )


"""A `Learner`."""
Record: TypeAlias = "tuple[Event, float | Tensor, tuple[float, ...]]"

BACKEND = "inductor"
MOST_GRAPHS = 64
"""Graphs of one function, over all learners of a process: PyTorch's own limit is 8."""


def compiled_losses(learner: AnyLearner) -> Compiled | None:
    """Return the compiled losses of a learner, as its settings say; None: nothing is compiled.

    Without a C++ compiler there is a warning.

    Raises:
        ConfigError: If a module has recurrent layers.
    """
    from torch._inductor import cpp_builder, exc

    way = learner.settings.compile
    parts = [part for module in learner.modules.values() for part in module.modules()]
    if any(isinstance(part, nn.RNNBase) for part in parts):
        problem = "the compiler of PyTorch takes no recurrent layers (model.rnn); expected none"
        raise ConfigError("algorithm.compile", problem, way)
    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        warn(
            f"algorithm.compile={way}: no C++ compiler was found, so nothing "
            "is compiled; install g++, or name one in the environment variable CXX"
        )
        return None
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, MOST_GRAPHS)
    kinds = {"forward": CompiledNetworks, "update": CompiledLosses}
    return kinds[way](learner)


class Compiled(ABC):
    """Computes losses of a learner with what is compiled.

    Args:
        learner: The learner.
    """

    def __init__(self, learner: AnyLearner) -> None:
        self._learner = learner
        self._spent_s = _spent_s()

    @abstractmethod
    def __call__(self, module_id: str, batch: Any, statistics: Statistics) -> Tensor:
        """The loss of a module, 0-d, with a graph; see `Learner.loss_of`."""

    def report(self, statistics: Statistics) -> None:
        """Record the time that compilation took since the last call, if any."""
        before, self._spent_s = self._spent_s, _spent_s()
        if self._spent_s > before:
            statistics.record(LearnerEvents.compile_s, self._spent_s - before)


class CompiledNetworks(Compiled):
    """Compiles modules, each that a loss calls with all that it calls in turn.

    To act, they are called as they are: there are other sizes and no gradient.
    """

    def __init__(self, learner: AnyLearner) -> None:
        super().__init__(learner)
        self._calls: WeakKeyDictionary[nn.Module, list[tuple[nn.Module, Any]]]
        self._calls = WeakKeyDictionary()

    def __call__(self, module_id: str, batch: Any, statistics: Statistics) -> Tensor:
        """The loss of a module."""
        with self._networks_compiled(self._learner.modules[module_id]):
            loss: Tensor = self._learner.loss_of(module_id, batch, statistics)
        return loss

    @contextmanager
    def _networks_compiled(self, module: nn.Module) -> Iterator[None]:
        calls = self._calls.get(module)
        if calls is None:
            calls = self._calls[module] = [
                (part, torch.compile(part._call_impl, backend=BACKEND))
                for part in module.modules()
                if part._compiled_call_impl is None
            ]
        for part, call in calls:
            part.__dict__["_compiled_call_impl"] = call
        try:
            yield
        finally:
            for part, _ in calls:
                del part.__dict__["_compiled_call_impl"]


class CompiledLosses(Compiled):
    """Compiles each loss as one graph, with another one for its gradient.

    There are two such pairs where the number of samples changes: for the first number, and for all
    others.

    Random numbers of a loss are drawn before it: `before_compiled_loss(module_id, batch)` of a
    learner does that, if there is one.
    """

    def __init__(self, learner: AnyLearner) -> None:
        super().__init__(learner)
        self._draws = getattr(learner, "before_compiled_loss", None)
        self._compiled: Any = torch.compile(self._loss_of, fullgraph=True, backend=BACKEND)

    def __call__(self, module_id: str, batch: Any, statistics: Statistics) -> Tensor:
        """The loss of a module."""
        if self._draws is not None:
            self._draws(module_id, batch)
        try:
            loss, records = self._compiled(module_id, batch)
        except (dynamo.exc.Unsupported, dynamo.exc.UserError) as error:
            raise ConfigError(
                "algorithm.compile",
                f"the loss of {type(self._learner).__name__} cannot be compiled as a whole "
                f"({str(error).splitlines()[0]}); expected forward or none",
                "update",
            ) from error
        for event, value, weight in records:
            statistics.record(event, value, *weight)
        return loss  # type: ignore[no-any-return]  # of what is compiled

    def _loss_of(self, module_id: str, batch: Any) -> tuple[Tensor, list[Record]]:
        """The loss, and what it records: graphs hold no statistics."""
        recorder = _Recorder()
        return self._learner.loss_of(module_id, batch, recorder), recorder.records


class _Recorder:
    """Notes what a loss records in its `Statistics`."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def record(self, event: Event, value: float | Tensor, *weight: float) -> None:
        self.records.append((event, value, weight))


def _spent_s() -> float:
    """Seconds of compilation in this process."""
    return calculate_time_spent()["total_wall_time"]
