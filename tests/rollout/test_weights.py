"""Weights in memory that the learner and actors share."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from actor_envs import OBSERVATIONS, model_maker, set_version
from gymnasium import spaces
from torch import nn

from maze_train.errors import TrainingError
from maze_train.rollout.weights import WeightsReader, WeightsWriter, weights_nbytes
from maze_train.training.state_files import dumps, loads
from maze_train.types import tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from maze_train.nets.actor_critic import ActorCriticModel
    from maze_train.types import Tensor, TensorTree

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

N = 6
"""Observations in a batch."""

KINDS: dict[str, dict[str, bool]] = {
    "box": {},
    "dict": {},
    "image": {},
    "mask": {},
    "box, normalised": {"normalises": True},
    "dict, normalised": {"normalises": True},
    "dict, memory": {"memory": True},
}


def make_memory(model: nn.Module) -> Any:
    """Memory for the weights of a model."""
    return np.zeros(weights_nbytes(model), np.uint8)


def observations(space: spaces.Space[Any], seed: int) -> TensorTree:
    """A batch of observations, as models get them."""
    rng = np.random.default_rng(seed)

    def leaf(part: spaces.Space[Any]) -> Tensor:
        if isinstance(part, spaces.Box) and part.dtype == np.uint8:
            return torch.from_numpy(rng.integers(0, 256, (N, *part.shape)).astype(np.uint8))
        if isinstance(part, spaces.Box):
            return torch.from_numpy(rng.normal(3.0, 2.0, (N, *part.shape)).astype(np.float32))
        return torch.ones((N, *(part.shape or ())), dtype=torch.int64)

    return tree_map(leaf, dict(space) if isinstance(space, spaces.Dict) else space)


def params_of(model: ActorCriticModel, obs: TensorTree) -> Tensor:
    """What a model makes of observations."""
    if model.state_size:
        return model.policy_step(obs, torch.ones(N, model.state_size))[0]
    return model.policy_params(obs)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_reader_acts_as_the_learner_does(kind: str) -> None:
    """Outputs are equal to the bit after each publication, and change with nothing else."""
    space = OBSERVATIONS[kind.split(",")[0]]
    make_model = model_maker(space, spaces.Discrete(3), **KINDS[kind])
    model, acting = make_model(), make_model()
    memory = make_memory(model)
    writer, reader = WeightsWriter(model, memory), WeightsReader(acting, memory)
    obs = observations(space, 0)
    before = params_of(acting, obs).clone()
    for version in range(1, 5):
        set_version(model, version)
        if model.normalizer is not None:
            model.normalizer.update(observations(space, version))
        expected = params_of(model, obs)
        assert not torch.equal(expected, before)
        if version % 2:  # twice, or not at all
            assert reader.load() == reader.load()
        assert torch.equal(params_of(acting, obs), before) or version == 1
        writer.publish(10 * version)
        assert reader.load() == reader.weights_seq_no == 10 * version
        before = params_of(acting, obs).clone()
        assert torch.equal(before, expected)
        if model.normalizer is not None:
            assert acting.normalizer is not None
            for key, value in model.normalizer.state_dict().items():
                assert torch.equal(acting.normalizer.state_dict()[key], value)


def test_the_critic_stays_at_home() -> None:
    """What only the learner needs is neither sent nor touched."""
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
    # Two buffers; each tensor begins on a cache line of its own.
    padding = 64 * (len(model.state_dict()) + 2)
    assert 2 * (whole - critic) < len(memory) < 2 * (whole - critic + padding)


class OddModule(nn.Module):
    """Buffers of many types; a part that has two names; nothing that only a learner needs."""

    flag: Tensor
    counts: Tensor
    fine: Tensor

    def __init__(self) -> None:
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
def test_buffers_of_all_types_arrive() -> None:
    """Also those that the module replaced, and what has several names."""
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
def test_a_buffer_that_changes_its_size_is_named(shape: tuple[int, ...]) -> None:
    """Readers keep what was published before."""
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


def test_published_weights_are_state() -> None:
    """They may be older than those of the model; who goes on publishes the old ones first."""
    make_model = model_maker(OBSERVATIONS["box"], spaces.Discrete(3), normalises=True)
    model, obs = make_model(), observations(OBSERVATIONS["box"], 0)
    assert model.normalizer is not None
    writer = WeightsWriter(model, make_memory(model))
    set_version(model, 3)
    model.normalizer.update(observations(OBSERVATIONS["box"], 1))
    writer.publish(3)
    expected = params_of(model, obs).clone()
    state = writer.state_dict()
    set_version(model, 5)
    model.normalizer.update(observations(OBSERVATIONS["box"], 2))
    for version in (5, 6):
        writer.publish(version)
    state = loads(dumps(state))
    acting = make_model()
    memory = make_memory(model)
    other, reader = WeightsWriter(model, memory), WeightsReader(acting, memory)
    other.load_state_dict(state)
    assert reader.load() == 3
    assert torch.equal(params_of(acting, obs), expected)
    assert torch.equal(other.state_dict()["published"], state["published"])
    other.publish(7)
    assert reader.load() == 7
    assert torch.equal(params_of(acting, obs), params_of(model, obs))


# -- at the same time --------------------------------------------------------------------------


class Wide(nn.Module):
    """Weights that are all equal to the number of their version."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(size))
        self.b = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        self.register_buffer("c", torch.zeros(size, dtype=torch.int64))

    @torch.no_grad()
    def fill(self, version: int) -> None:
        """Make it a version."""
        for value in self.state_dict().values():
            value.fill_(version)

    def versions(self) -> set[float]:
        """One number, or several if not all are equal."""
        return {float(x) for value in self.state_dict().values() for x in value.aminmax()}


class Watched:
    """A header; something happens before each access."""

    def __init__(self, header: Any, before: Callable[[], object]) -> None:
        self.header, self.before = header, before

    def __getitem__(self, i: int) -> Any:
        self.before()
        return self.header[i]

    def __setitem__(self, i: int, value: Any) -> None:
        self.before()
        self.header[i] = value


class InHalves:
    """A tensor that is copied to half by half; something happens before each of them."""

    def __init__(self, tensor: Tensor, before: Callable[[], object]) -> None:
        self.tensor, self.before = tensor, before

    @property
    def shape(self) -> torch.Size:
        """That of the tensor."""
        return self.tensor.shape

    def __getitem__(self, part: slice) -> Tensor:
        return self.tensor[part]

    def copy_(self, source: Tensor) -> None:
        """Copy."""
        half = len(source) // 2
        for part in (slice(half), slice(half, None)):
            self.before()
            self.tensor[part] = source[part]


class Stopped(Exception):  # noqa: N818  # not an error
    """The writer is to end."""


class SteppedWriter:
    """Publishes version after version in a thread, which moves only as far as it is told."""

    def __init__(self, memory: Any) -> None:
        self.published = 0
        self._model = Wide()
        self._writer = WeightsWriter(self._model, memory)
        self._publish()
        shared: Any = self._writer
        shared.header = Watched(shared.header, self._pause)
        views: Any = self._writer._views
        for i, by_key in enumerate(views):
            views[i] = {key: InHalves(view, self._pause) for key, view in by_key.items()}
        self._stopped = False
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._done.acquire()

    def _publish(self) -> None:
        self._model.fill(self.published + 1)
        self._writer.publish(self.published + 1)
        self.published += 1

    def _run(self) -> None:
        try:
            while True:
                self._publish()
        except Stopped:
            self._done.release()

    def _pause(self) -> None:
        self._done.release()
        self._go.acquire()
        if self._stopped:
            raise Stopped

    def advance(self, steps: int) -> None:
        """Let so many accesses happen."""
        for _ in range(steps):
            self._go.release()
            assert self._done.acquire(timeout=30), "the thread of the writer failed"

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self.advance(1)
        self._thread.join()


@pytest.fixture
def stepped() -> Iterator[tuple[SteppedWriter, Any]]:
    """A writer that is moved by hand, and its memory."""
    memory = make_memory(Wide())
    writer = SteppedWriter(memory)
    yield writer, memory
    writer.stop()


@pytest.mark.parametrize("longest", [3, 20, 60])
def test_whatever_the_writer_does_between_two_steps_of_a_reader(
    stepped: tuple[SteppedWriter, Any], longest: int
) -> None:
    """Thousands of interleavings: what is read is whole, and never older than what was read."""
    writer, memory = stepped
    rng = np.random.default_rng(longest)

    def meanwhile() -> None:
        if rng.random() < 0.3:
            writer.advance(int(rng.integers(1, longest + 1)))

    model = Wide()
    reader = WeightsReader(model, memory)
    shared: Any = reader
    shared.header = Watched(shared.header, meanwhile)
    private: Any = InHalves(reader._private, meanwhile)
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


def read_versions(memory: mmap.mmap, size: int, count: int) -> str:
    """Read so many versions; returns what was wrong."""
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


def read_in_a_process(memory: mmap.mmap, size: int, count: int) -> None:
    """The same as the main function of a process."""
    problem = read_versions(memory, size, count)
    os.write(2, problem.encode())
    os._exit(1 if problem else 0)


@pytest.mark.slow
def test_a_reader_elsewhere_never_sees_half_of_a_version() -> None:
    """Thousands of versions are published while it reads."""
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
