from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import tracemalloc
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maze_train.core.errors import RunDirectoryError
from maze_train.core.state import StatePart
from maze_train.core.state_files import dumps, loads

TORCH_DTYPES = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
)
NUMPY_DTYPES = (
    *("?", "u1", "<u2", "<u4", "<u8", "i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8"),
    *("<c8", "<c16", ">f4", ">i2", ">c8", np.dtype(np.longdouble).str),
)


def bits(value):
    """Return the bytes of a tensor or an array, in the order of its elements."""
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().clone().reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.asarray(value).tobytes()


def assert_same(a, b):
    """Check that type, structure and all bits are equal."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        assert [type(key) for key in a] == [type(key) for key in b]
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, torch.Tensor | np.ndarray | np.generic):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert bits(a) == bits(b)
    elif isinstance(a, StatePart):
        assert a.version == b.version
        assert_same(a.read(), b.read())
    elif isinstance(a, float):
        assert struct.pack("<d", a) == struct.pack("<d", b)
    else:
        assert a == b


def raw(draw, n, size, is_bool):
    """Return n elements of `size` bytes with any bit patterns, except invalid bools."""
    high = 1 if is_bool else 255
    return bytes(draw(st.lists(st.integers(0, high), min_size=n * size, max_size=n * size)))


@st.composite
def tensors(draw):
    """Small tensors of any dtype, contiguous or not."""
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    content = raw(draw, math.prod(shape), dtype.itemsize, dtype == torch.bool)
    flat = torch.tensor(list(content), dtype=torch.uint8).view(dtype)
    value = flat.reshape(shape)
    return value.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else value


@st.composite
def arrays(draw):
    """NumPy arrays and scalars of any dtype."""
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    content = raw(draw, math.prod(shape), dtype.itemsize, dtype.kind == "b")
    value = np.frombuffer(content, dtype).reshape(shape)
    kind = draw(st.sampled_from(("plain", "transposed", "scalar")))
    if kind == "scalar" and value.ndim == 0:
        return value[()]
    return value.T if kind == "transposed" else value


def part(version, content):
    """Return a part of a state."""
    return StatePart(version, lambda: content)


FLOATS = st.floats(allow_nan=False) | st.sampled_from((math.nan, math.inf, -math.inf, -0.0))
TEXTS = st.text(st.characters(), max_size=5) | st.sampled_from(("", "\ud800"))
INTS = st.integers(-(2**200), 2**200)
KEYS = TEXTS | INTS
LEAVES = st.none() | st.booleans() | INTS | FLOATS | TEXTS | tensors() | arrays()
TREES = st.recursive(
    LEAVES,
    lambda tree: (
        st.lists(tree, max_size=4)
        | st.lists(tree, max_size=4).map(tuple)
        | st.dictionaries(KEYS, tree, max_size=4)
        | st.builds(part, TEXTS, st.dictionaries(KEYS, tree, max_size=4))
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(KEYS, TREES, max_size=5))
def test_states_round_trip_bit_for_bit(state):
    """Types, keys, order, values and all bits of tensors are restored."""
    assert_same(loads(dumps(state)), state)


def test_tensors_and_arrays_of_every_dtype_round_trip():
    """Empty and 0-d tensors and arrays of all dtypes and byte orders are restored."""
    state = {}
    for shape in ((), (0,), (2, 3)):
        n = math.prod(shape)
        for dtype in TORCH_DTYPES:
            content = torch.arange(n * dtype.itemsize, dtype=torch.uint8)
            content %= 2 if dtype == torch.bool else 255
            state[f"{dtype}{shape}"] = content.view(dtype).reshape(shape)
        for dtype in NUMPY_DTYPES:
            state[f"{dtype}{shape}"] = np.arange(n).reshape(shape).astype(dtype)
    result = loads(dumps(state))
    assert_same(result, state)
    assert all(x.flags.writeable for x in result.values() if isinstance(x, np.ndarray))


PLAIN = (
    *(math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, True, 1, 1.0),
    *(2**53, -(2**53), 2**64, 2**2000 - 1, -(2**2000 - 1)),
    *("", "\ud83d", "\ud83d\ude00", "😀", "\0"),
    *((), [], {}, ((),), {1: 2, "1": 3}, {-(2**70): None}, {"é": 1}),
)


def test_plain_values_round_trip():
    """Plain values that other formats change or reject are restored."""
    for value in PLAIN:
        assert_same(loads(dumps({"x": value})), {"x": value})


def test_views_become_separate_tensors():
    """Views are restored as separate tensors with equal values."""
    base = torch.arange(12.0)
    complex_ones = torch.tensor([1 + 2j, 3 - 4j])
    state = {
        "base": base,
        "view": base[2:7:2],
        "matrix": base.view(3, 4).t(),
        "again": base,
        "expanded": torch.ones(1).expand(5),
        "conjugated": complex_ones.conj(),
        "negative": complex_ones.conj().imag,
        "image": torch.arange(24.0)
        .reshape(1, 2, 3, 4)
        .contiguous(memory_format=torch.channels_last),
    }
    result = loads(dumps(state))
    for key, value in state.items():
        assert torch.equal(result[key], value)
        assert result[key].is_contiguous()
    result["base"][0] = 7.0
    assert base[0] == result["again"][0] == 0.0


def test_loaded_tensors_keep_their_alignment():
    """Memory alignment is preserved, since sums can depend on it."""
    tensors = loads(dumps({n: torch.ones(n) for n in range(1, 50)})).values()
    assert {tensor.data_ptr() % 64 for tensor in tensors} == {0}


def test_module_states_become_plain_dicts():
    """The state of a module is restored as a dict of tensors without gradient."""
    state = OrderedDict(weight=torch.nn.Parameter(torch.ones(2)))
    result = loads(dumps({"module": state}))["module"]
    assert type(result) is dict
    assert type(result["weight"]) is torch.Tensor
    assert not result["weight"].requires_grad


class Number(int):
    """Subclass of int."""


def deep(depth):
    """Return a list nested to a depth."""
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), r"state\['a'\]\[1\] is of type object"),
        ({1, 2}, "is of type set"),
        (b"bytes", "is of type bytes"),
        (Number(1), "is of type Number"),
        (1j, "is of type complex"),
        ({(1, 2): 3}, r"has the key \(1, 2\)"),
        ({True: 3}, "has the key True"),
        ({1.0: 3}, "has the key 1.0"),
        (np.array(["a"]), "array of <U1"),
        (np.array([None]), "array of object"),
        (np.datetime64("2000-01-01"), "only numeric arrays"),
        (np.ma.array([1]), "MaskedArray"),
        (torch.ones(2).to_sparse(), r"\.to_dense\(\)"),
        (torch.ones(2, device="meta"), "is not a dense tensor"),
        (torch.zeros(2, dtype=torch.bits8), r"tensor of torch\.bits8"),
        (2**2000, "an integer of more than 2000 bits"),
        (deep(100), r"state\['a'\]\[1\].* deeper than 64"),
        (part("1", {"x": [1, object()]}), r"state\['a'\]\[1\].*\['x'\]\[1\] is of type object"),
        (part("1", [1]), r"state\['a'\]\[1\] is a part .*list"),
        (part(1, {}), r"state\['a'\]\[1\] has the version 1: versions are str"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_unsupported_values_raise(value, message):
    """Unsupported values raise an error that names their position."""
    with pytest.raises(TypeError, match=message):
        dumps({"a": [0, value]})


def test_recursive_state_raises():
    """A recursive state raises an error."""
    state = {}
    state["self"] = state
    with pytest.raises(TypeError, match="deeper"):
        dumps(state)
    with pytest.raises(TypeError, match="dict, got list"):
        dumps([])


def test_deepest_state_round_trips():
    """The deepest state that can be written can be read."""
    state = {"x": deep(62)}
    assert_same(loads(dumps(state)), state)
    nested = 1
    for _ in range(63):
        nested = {1: nested}
    assert_same(loads(dumps({"x": nested})), {"x": nested})


# -- hostile files -------------------------------------------------------------------------------


def stored(content):
    """Return the bytes that `torch.save` writes for any content."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def of(value):
    """Return a state file with a value."""
    return stored({"format": 2, "state": {"a": value}})


def array(kind="array", dtype="<f4", shape=(2,), data=None):
    """Return the stored form of an array."""
    data = torch.zeros(8, dtype=torch.uint8) if data is None else data
    return {None: kind, "dtype": dtype, "shape": shape, "data": data}


def part_of(**fields):
    """Return the stored form of a part."""
    return {None: "part", "version": "", **fields}


def repeated(levels):
    """Return a list that contains itself twice at each level: a short pickle of a huge tree."""
    value = []
    for _ in range(levels):
        value = [value, value]
    return value


def compressed(data):
    """Return the same archive with compressed entries."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", 8) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return file.getvalue()


def archived(content, record=b"0123"):
    """Return an archive with a pickle and one storage, as `torch.save` writes it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/byteorder", sys.byteorder)
        archive.writestr("archive/data/0", record)
    return file.getvalue()


def tensor_of(num_entries, size=(1,), stride=(1,)):
    """Return a state with one float tensor of a storage of four bytes."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            if value is storage:
                return ("storage", torch.FloatStorage, "0", "cpu", num_entries)
            return None

        def reducer_override(self, value):
            return (
                (rebuild, (storage, 0, size, stride, False, {})) if value is ONE else NotImplemented
            )

    storage, file, rebuild = object(), io.BytesIO(), torch._utils._rebuild_tensor_v2
    Pickler(file, 2).dump({"format": 2, "state": {"a": ONE}})
    return archived(file.getvalue())


def nested_tuple(levels):
    """Return a pickle of a dict whose key is a tuple that contains itself twice at each level."""
    pairs = b"".join(b"q%ch%c\x86" % (i, i) for i in range(levels))
    return archived(b"\x80\x02}K\x01" + pairs + b"K\x01s.")


CYCLE = []
CYCLE.append(CYCLE)
ONE = torch.ones(1)
CRAFTED = {
    "nothing": b"",
    "pickle": pickle.dumps({"format": 2, "state": {}}),
    "a file of another format": b"\x10\0\0\0\0\0\0\0" + b"{}" + b" " * 14,
    "compressed": compressed(of(torch.zeros(1000))),
    "a list": stored([1]),
    "no format": stored({"state": {}}),
    "format 0": stored({"format": 0, "state": {}}),
    "state that is no dict": stored({"format": 2, "state": ()}),
    "set": of({1}),
    "bytes": of(bytearray(b"1")),
    "type": of(torch.float32),
    "cycle": of(CYCLE),
    "more than its length": of(repeated(60)),
    "deeper than allowed": of(deep(80)),
    "key": of({1.5: 1}),
    "unknown kind": of({None: "object"}),
    "view": stored({"format": 2, "state": {"a": torch.ones(9)[:2]}}),
    "huge": of(ONE.expand(2**40)),
    "parameter": of(torch.nn.Parameter(ONE)),
    "sparse": of(ONE.to_sparse()),
    "meta": of(ONE.to("meta")),
    "conjugate": of(torch.ones(2, dtype=torch.complex64).conj()),
    "more memory than stored": archived(b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x7f\x85R."),
    "more memory in a protocol": archived(b"\x80\x05\x96" + (3 << 30).to_bytes(8, "little") + b"."),
    "tensor beyond its storage": tensor_of(1000, (1000,)),
    "tensor that repeats its storage": tensor_of(1, (1 << 40,), (0,)),
    "key of nested tuples": nested_tuple(200),
    "item of a number": archived(b"\x80\x02K\x01K\x01a."),
    "bool of 2": of(torch.full((2,), 2, dtype=torch.uint8).view(torch.bool)),
    "array of objects": of(array(dtype="|O8")),
    "array of huge text": of(array(dtype="<U99999999")),
    "array of another shape": of(array(shape=(3,))),
    "array of a shape to be guessed": of(array(shape=(-1,))),
    "array of bytes that are floats": of(array(data=torch.ones(2))),
    "array of bools of 2": of(array(dtype="|b1", shape=(8,), data=torch.full((8,), 2).byte())),
    "array with more": of({**array(), "more": 1}),
    "scalar with dimensions": of(array(kind="scalar")),
    "part without version": of({None: "part", "content": {}}),
    "part with a number as version": of(part_of(version=1, content={})),
    "part of a tuple": of(part_of(content=())),
    "part with more": of(part_of(content={}, more=1)),
    "part in a file": of(part_of(file="part.pt")),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_state_files_raise(name):
    """Crafted files raise only the error that names the file, and allocate little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(RunDirectoryError, match=r"there\.file is damaged") as told:
            loads(CRAFTED[name], Path("there.file"))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert "weights_only" not in str(told.value)


def test_state_file_of_another_format_raises():
    """The error names the format and the remedy."""
    for number, remedy in ((1, "use the version that wrote it"), (3, "install a newer maze_train")):
        with pytest.raises(RunDirectoryError, match=f"has format {number}, .* format 2: {remedy}"):
            loads(stored({"format": number, "state": {}}))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_flipped_bits_give_a_state_or_an_error(data):
    """Flipped bits lead to a state or the documented error."""
    whole = bytearray(SAMPLE)
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(RunDirectoryError):
        assert isinstance(loads(bytes(whole)), dict)


SAMPLE = dumps(
    {
        "w": torch.ones(2, 3),
        "c": torch.ones(2, dtype=torch.complex128),
        "n": np.arange(3),
        "d": {1: (math.nan, 2**70, "\ud800"), "s": np.float32(2.0)},
        "b": torch.tensor([True, False]),
    }
)


class Intruder:
    """Object that creates a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_state_files_run_no_code(tmp_path):
    """Pickles in place of a state or a tensor are treated as damage and not executed."""
    mark = tmp_path / "mark"
    pickled = pickle.dumps(Intruder(mark))
    hidden = torch.tensor(list(pickled), dtype=torch.uint8)
    crafted = (of(Intruder(mark)), of(array(dtype="|O8", shape=(1,), data=hidden)))
    for data in (pickled, *crafted):
        with pytest.raises(RunDirectoryError):
            loads(data)
    assert not mark.exists()
    pickle.loads(pickled)
    assert mark.exists()


def test_state_file_bytes_depend_on_values_only():
    """The bytes of a file do not depend on the identity of equal keys."""
    key = "agents/first"
    copy = "/".join(["agents", "first"])
    assert key is not copy
    assert dumps({"obs": {key: 1}, "end": {copy: 2}}) == dumps({"obs": {key: 1}, "end": {key: 2}})
