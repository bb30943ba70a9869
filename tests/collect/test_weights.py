"""Weights in memory shared by learner and actors."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import re
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from actor_envs import OBSERVATIONS, model_maker, set_version
from gymnasium import spaces
from torch import nn

from maze_train.collect.actors import WeightsReader, WeightsWriter, acting_state, weights_nbytes
from maze_train.core.errors import TrainingError
from maze_train.nets.joint import JointModel

if TYPE_CHECKING:
    from maze_train.core.types import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def make_memory(model):
    """Return memory for the weights of a model."""
    return np.zeros(weights_nbytes(model), np.uint8)


def test_critic_weights_are_not_sent():
    """Weights used only by the learner are neither sent nor overwritten."""
    make_model = model_maker(OBSERVATIONS["box"], spaces.Discrete(3))
    model, acting = make_model(), make_model()
    memory = make_memory(model)
    set_version(model, 1)
    kept = {key: value.clone() for key, value in acting.critic.state_dict().items()}
    WeightsWriter(model, memory).publish(1)
    WeightsReader(acting, memory).load()
    for key, value in acting.critic.state_dict().items():
        assert torch.equal(value, kept[key])
        assert not torch.equal(value, model.critic.state_dict()[key])
    whole = sum(value.nbytes for value in model.state_dict().values())
    critic = sum(value.nbytes for value in model.critic.state_dict().values())
    # The same holds for several agents.
    joint = JointModel({"a": model, "b": acting}, {"left": "a", "right": "b"})
    own = {key for key in model.state_dict() if not key.startswith("critic.")}
    sent = {f"policies.{policy}.{key}" for policy in "ab" for key in own}
    assert acting_state(joint).keys() == sent
    # Memory has two buffers; each tensor is aligned to a cache line.
    padding = 64 * (len(model.state_dict()) + 2)
    assert 2 * (whole - critic) < len(memory) < 2 * (whole - critic + padding)


class OddModule(nn.Module):
    """Module with buffers of many types and a submodule with two names."""

    flag: Tensor
    counts: Tensor
    fine: Tensor

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 2)
        self.b = self.a
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("counts", torch.zeros(5, dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("fine", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("none", None)
        self.weight = nn.Parameter(torch.zeros(4, 3).T)


@torch.no_grad()
def test_buffers_of_all_types_are_sent():
    """Buffers of all types are sent, including replaced buffers and tensors with several names."""
    model, acting = OddModule(), OddModule()
    memory = make_memory(model)
    writer, reader = WeightsWriter(model, memory), WeightsReader(acting, memory)
    for version in range(1, 4):
        set_version(model, version)
        model.flag = torch.tensor(version % 2 == 1)
        model.counts = torch.arange(5) * 10**12 + version
        model.fine.copy_(torch.full((3,), 1.0 / 3.0, dtype=torch.float64) * version)
        writer.publish(version)
        assert reader.load() == version
        ours, theirs = model.state_dict(), acting.state_dict()
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert theirs[key].dtype == value.dtype
            assert torch.equal(theirs[key], value), key
        assert acting.a.weight.data_ptr() == acting.b.weight.data_ptr()


@pytest.mark.parametrize("shape", [(), (1,), (6,)])
def test_resized_buffer_raises(shape):
    """A buffer whose shape changes raises an error; readers keep the last published weights."""
    model, acting = OddModule(), OddModule()
    memory = make_memory(model)
    writer, reader = WeightsWriter(model, memory), WeightsReader(acting, memory)
    writer.publish(1)
    model.counts = torch.ones(shape, dtype=torch.int64)
    words = rf"counts of the model has the shape {re.escape(str(list(shape)))}, had \[5\]"
    with pytest.raises(TrainingError, match=words):
        writer.publish(2)
    assert reader.load() == 1
    assert torch.equal(acting.counts, torch.zeros(5, dtype=torch.int64))


# -- concurrency -------------------------------------------------------------------------------


class Wide(nn.Module):
    """Module whose weights all equal its version."""

    def __init__(self, size=4):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(size))
        self.b = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        self.register_buffer("c", torch.zeros(size, dtype=torch.int64))

    @torch.no_grad()
    def fill(self, version):
        """Set all weights to a version."""
        for value in self.state_dict().values():
            value.fill_(version)

    def versions(self):
        """Return the set of values of the weights; a single one if the weights are consistent."""
        return {float(x) for value in self.state_dict().values() for x in value.aminmax()}


class Watched:
    """Header that calls a function before each access."""

    def __init__(self, header, before):
        self.header, self.before = header, before

    def __getitem__(self, i):
        self.before()
        return self.header[i]

    def __setitem__(self, i, value):
        self.before()
        self.header[i] = value


class InHalves:
    """Tensor that is copied in two halves, with a call before each of them."""

    def __init__(self, tensor, before):
        self.tensor, self.before = tensor, before

    @property
    def shape(self):
        """Shape of the tensor."""
        return self.tensor.shape

    def __getitem__(self, part):
        return self.tensor[part]

    def copy_(self, source):
        """Copy the source in two halves."""
        half = len(source) // 2
        for part in (slice(half), slice(half, None)):
            self.before()
            self.tensor[part] = source[part]


class Stopped(Exception):  # noqa: N818  # not an error
    """Raised in the writer thread to end it."""


class SteppedWriter:
    """Thread that publishes versions and advances by a given number of memory accesses."""

    def __init__(self, memory):
        self.published = 0
        self._model = Wide()
        self._writer = WeightsWriter(self._model, memory)
        self._publish()
        self._writer.header = Watched(self._writer.header, self._pause)
        views = self._writer._views
        for i, by_key in enumerate(views):
            views[i] = {key: InHalves(view, self._pause) for key, view in by_key.items()}
        self._stopped = False
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._done.acquire()

    def _publish(self):
        self._model.fill(self.published + 1)
        self._writer.publish(self.published + 1)
        self.published += 1

    def _run(self):
        try:
            while True:
                self._publish()
        except Stopped:
            self._done.release()

    def _pause(self):
        self._done.release()
        self._go.acquire()
        if self._stopped:
            raise Stopped

    def advance(self, steps):
        """Advance by a number of memory accesses."""
        for _ in range(steps):
            self._go.release()
            assert self._done.acquire(timeout=30), "the thread of the writer failed"

    def stop(self):
        """End the thread."""
        self._stopped = True
        self.advance(1)
        self._thread.join()


@pytest.fixture
def stepped():
    """A stepped writer and its memory."""
    memory = make_memory(Wide())
    writer = SteppedWriter(memory)
    yield writer, memory
    writer.stop()


@pytest.mark.parametrize("longest", [3, 20])
def test_interleaved_reads_are_consistent(stepped, longest):
    """In thousands of interleavings, reads are consistent and never return an older version."""
    writer, memory = stepped
    rng = np.random.default_rng(longest)

    def overlap():
        if rng.random() < 0.3:
            writer.advance(int(rng.integers(1, longest + 1)))

    model = Wide()
    reader = WeightsReader(model, memory)
    reader.header = Watched(reader.header, overlap)
    private = InHalves(reader._private, overlap)
    reader._private = private
    last, retries, seen = 0, 0, set()
    for _ in range(600):
        published = writer.published
        version = reader.load()
        assert model.versions() == {float(version)}
        assert version >= max(last, published)
        assert version <= writer.published + 1
        retries += writer.published > version
        last = version
        seen.add(version)
    assert len(seen) > 30
    assert retries


def read_versions(memory, size, count):
    """Read `count` versions; return a description of the first error, or ''."""
    torch.set_num_threads(1)
    model = Wide(size)
    reader = WeightsReader(model, memory)
    last = 0
    while count:
        version = reader.load()
        if version and model.versions() != {float(version)}:
            return f"version {version} is {model.versions()}"
        if version < last:
            return f"version {version} came after {last}"
        count -= version > last
        last = version
    return ""


def read_in_a_process(memory, size, count):
    """Call `read_versions` as the main function of a process."""
    problem = read_versions(memory, size, count)
    os.write(2, problem.encode())
    os._exit(1 if problem else 0)


@pytest.mark.slow
def test_reader_process_sees_complete_versions():
    """A reader in another process sees only complete versions while the writer publishes."""
    size, count = 20_000, 500
    model = Wide(size)
    memory = mmap.mmap(-1, weights_nbytes(model))
    context = multiprocessing.get_context("fork")
    reader = context.Process(target=read_in_a_process, args=(memory, size, count))
    writer, version = WeightsWriter(model, memory), 0
    deadline = time.monotonic() + 60.0
    reader.start()
    while (reader.is_alive() or version < 2_000) and time.monotonic() < deadline:
        version += 1
        model.fill(version)
        writer.publish(version)
    assert reader.exitcode == 0
    assert version > 1_000
