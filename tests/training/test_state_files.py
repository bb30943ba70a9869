from __future__ import annotations

import io
import json
import math
import pickle
import struct
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from maze_train.core.errors import RunDirectoryError
from maze_train.core.types import StatePart
from maze_train.data.state_files import dumps, loads

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
    """The bytes of a tensor or an array, in the order of its elements."""
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().clone().reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.asarray(value).tobytes()


def assert_same(a, b):
    """Equal in type, in structure and in every bit."""
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


def raw(data, n, size, is_bool):
    """N elements of `size` bytes, all bit patterns but those that are no bool."""
    high = 1 if is_bool else 255
    return bytes(data.draw(st.lists(st.integers(0, high), min_size=n * size, max_size=n * size)))


@st.composite
def tensors(draw):
    """Tensors of any type and of few elements; not all of them contiguous."""
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    data = draw(st.data())
    content = raw(data, math.prod(shape), dtype.itemsize, dtype == torch.bool)
    flat = torch.tensor(list(content), dtype=torch.uint8).view(dtype)
    value = flat.reshape(shape)
    return value.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else value


@st.composite
def arrays(draw):
    """Arrays and scalars of numpy of any type."""
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    content = raw(draw(st.data()), math.prod(shape), dtype.itemsize, dtype.kind == "b")
    value = np.frombuffer(content, dtype).reshape(shape)
    kind = draw(st.sampled_from(("plain", "transposed", "scalar")))
    if kind == "scalar" and value.ndim == 0:
        return value[()]
    return value.T if kind == "transposed" else value


def part(version, content):
    """A part of a state."""
    return StatePart(version, lambda: content)


FLOATS = st.floats(allow_nan=False) | st.sampled_from((math.nan, math.inf, -math.inf, -0.0))
TEXTS = st.text(st.characters(), max_size=5) | st.sampled_from(
    ("~", "/", "", "__metadata__", "\ud800")
)
KEYS = TEXTS | st.integers()
LEAVES = st.none() | st.booleans() | st.integers() | FLOATS | TEXTS | tensors() | arrays()
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


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(KEYS, TREES, max_size=5))
def test_a_state_comes_back_bit_for_bit(state):
    """Types, keys, order, numbers and every bit of tensors; and equal states are equal bytes."""
    data = dumps(state)
    assert_same(loads(data), state)
    assert dumps(loads(data)) == data


def test_every_type_of_tensor_and_array():
    """Empty ones and those without dimensions; byte order; arrays that are read can be written."""
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
    *(2**53, -(2**53), 2**64, -(10**6000)),
    *("", "~", "\ud83d", "\ud83d\ude00", "😀", "\0"),
    *((), [], {}, ((),), {1: 2, "1": 3}, {-(2**70): None}),
    *({"~": 1}, {"~": "tensor", "data": "x"}, {"é": 1}, {"__metadata__": 1}),
)


def test_plain_values():
    """What JSON would change or refuse."""
    for value in PLAIN:
        assert_same(loads(dumps({"x": value})), {"x": value})


def test_names_of_tensors_do_not_collide():
    """Different places may have the same name when their keys are joined."""
    state = {
        "a/b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
        "a/b#2": torch.tensor(3),
        "__metadata__": torch.tensor(4),
        "tree.json": torch.tensor(5),
        "1": torch.tensor(6),
        1: torch.tensor(7),
        "\ud800": torch.tensor(8),
        "?": torch.tensor(9),
    }
    assert_same(loads(dumps(state)), state)


def test_names_tell_the_place():
    """Other programs that read safetensors see the weights by their path, and the tree."""
    stored = load(dumps({"model": {"weight": torch.ones(2, 3)}, "epoch": 3}))
    assert set(stored) == {"model/weight", "tree.json"}
    assert stored["model/weight"].shape == (2, 3)
    tree = json.loads(stored["tree.json"].numpy().tobytes())
    assert tree["state"]["epoch"] == 3


def test_tensors_that_share_memory():
    """Each comes back as it looks, with memory of its own."""
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


def test_tensors_begin_where_pytorch_begins_them():
    """Sums can depend on the alignment of memory, and a resumed run must not."""
    tensors = loads(dumps({n: torch.ones(n) for n in range(1, 50)})).values()
    assert {tensor.data_ptr() % 64 for tensor in tensors} == {0}


def test_parameters_and_ordered_dicts_become_plain():
    """A state of a module comes back as dict of tensors without gradient."""
    state = OrderedDict(weight=torch.nn.Parameter(torch.ones(2)))
    result = loads(dumps({"module": state}))["module"]
    assert type(result) is dict
    assert type(result["weight"]) is torch.Tensor
    assert not result["weight"].requires_grad


class Number(int):
    """An int that is more than an int."""


def deep(depth):
    """A list in a list in a list."""
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
        (np.datetime64("2000-01-01"), "only numbers"),
        (np.ma.array([1]), "MaskedArray"),
        (torch.ones(2).to_sparse(), r"\.to_dense\(\)"),
        (torch.ones(2, device="meta"), "no dense tensor"),
        (torch.zeros(2, dtype=torch.bits8), "tensor of bits8"),
        (deep(100), r"state\['a'\]\[1\].* deeper than 64"),
        (part("1", {"x": [1, object()]}), r"state\['a'\]\[1\].*\['x'\]\[1\] is of type object"),
        (part("1", [1]), r"state\['a'\]\[1\] is a part .*list"),
        (part(1, {}), r"state\['a'\]\[1\] has the version 1: versions are str"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_can_not_be_stored(value, message):
    """Said at once, with the place."""
    with pytest.raises(TypeError, match=message):
        dumps({"a": [0, value]})


def test_a_state_that_holds_itself():
    """An error, not an endless loop."""
    state = {}
    state["self"] = state
    with pytest.raises(TypeError, match="deeper"):
        dumps(state)
    with pytest.raises(TypeError, match="dict, not list"):
        dumps([])


def test_the_deepest_state_comes_back():
    """What can be written can be read."""
    state = {"x": deep(62)}
    assert_same(loads(dumps(state)), state)
    nested = 1
    for _ in range(63):
        nested = {1: nested}
    assert_same(loads(dumps({"x": nested})), {"x": nested})


# -- hostile files -------------------------------------------------------------------------------


def with_tree(state, **stored):
    """A file that says `state`, with these tensors."""
    text = state if isinstance(state, bytes) else json.dumps({"format": 1, "state": state}).encode()
    return save({"tree.json": torch.tensor(list(text), dtype=torch.uint8), **stored})


def tensor(data="t", dtype="float32", shape=(2,), kind="tensor"):
    """What stands for a tensor."""
    return {"~": kind, "dtype": dtype, "shape": list(shape), "data": data}


MARKERS = {
    "unknown kind": {"~": "object", "items": []},
    "no kind": {"~": None},
    "deeper than allowed": deep(80),
    "tuple of a dict": {"~": "tuple", "items": {}},
    "tuple without items": {"~": "tuple"},
    "dict of triples": {"~": "dict", "items": [[1, 2, 3]]},
    "dict with a list as key": {"~": "dict", "items": [[[], 1]]},
    "dict with a key twice": {"~": "dict", "items": [[1, 1], [1, 2]]},
    "int": {"~": "int", "hex": "0xg"},
    "float": {"~": "float", "value": "x"},
    "text of half a character": {"~": "str", "utf8": "c3"},
    "part without version": {"~": "part", "content": {}},
    "part with a number as version": {"~": "part", "version": 1, "content": {}},
    "part of a tuple": {"~": "part", "version": "", "content": {"~": "tuple", "items": []}},
    "part with more": {"~": "part", "version": "", "content": {}, "more": 1},
    "part in a file": {"~": "part", "version": "", "file": "part.safetensors"},
    "key of a part": {"~": "dict", "items": [[{"~": "part", "version": "", "content": {}}, 1]]},
    "missing tensor": tensor("u"),
    "tree as tensor": tensor("tree.json", "uint8", (9,)),
}
"""What stands for a value, in a file without tensors."""

T, B = torch.ones(2), torch.zeros(8, dtype=torch.uint8)
TENSORS = {
    "unused": (1, T),
    "used twice": ([tensor(), tensor()], T),
    "other type": (tensor(dtype="float64"), T),
    "unknown type": (tensor(dtype="storage"), T),
    "other shape": (tensor(shape=(1,)), T),
    "shape of bools": (tensor(shape=(True, True)), torch.ones(1, 1)),
    "huge shape": (tensor(dtype="complex64", shape=(2**62, 2**62)), B),
    "shape to be guessed": (tensor(dtype="complex64", shape=(-1,)), B),
    "bytes in two dimensions": (tensor(dtype="complex64"), B.reshape(2, 4)),
    "odd bytes": (tensor(dtype="complex64", shape=(1,)), B[:7].clone()),
    "array of objects": (tensor(dtype="|O8", kind="array", shape=(1,)), B),
    "array of huge text": (tensor(dtype="<U99999999", kind="array"), B),
    "array with a huge shape": (tensor(dtype=">f4", kind="array", shape=(2**60,)), B),
    "scalar with dimensions": (tensor(dtype="<f4", kind="scalar"), T),
}
"""What stands for a value, and the tensor `t` of its file."""

PART = b'{"~":"part","version":"","content":'
TREES_OF_BYTES = {
    "literal NaN": b'{"format": 1, "state": {"a": NaN}}',
    "twice the same key": b'{"format": 1, "state": {"a": 1, "a": 2}}',
    "digits": b'{"format": 1, "state": {"a": ' + b"9" * 5000 + b"}}",
    "deep": b'{"format":1,"state":{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}}",
    "no format": b'{"state": {}}',
    "format 0": b'{"format": 0, "state": {}}',
    "format 2": b'{"format": 2, "state": {}}',
    "more than a tree": b'{"format": 1, "state": {}, "more": 1}',
    "part of a part": b'{"format":1,"state":{"a":' + PART * 90 + b"{}" + b"}" * 92,
}


def header(dtype, shape, end):
    """A file whose header names one tensor, without content."""
    text = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}).encode()
    return struct.pack("<Q", len(text)) + text


FILES = {
    "number": with_tree(1),
    "state that is no dict": with_tree({"~": "tuple", "items": []}),
    "no tree": save({"a": T}),
    "header without end": struct.pack("<Q", 2**63) + b"{}",
    "deep header": struct.pack("<Q", 200_000) + b'{"a":' + b"[" * 199_995,
    "tensor beyond the end": header("F32", [2**40], 2**42),
    "overflow": header("F32", [2**62, 2**62], 0),
    "type that torch does not have": header("F8_E8M0", [0], 0),
    "empty and huge for safetensors": header("F32", [0, 2**62, 2**62], 0),
    "nothing": b"",
    "pickle": pickle.dumps({"a": 1}),
}
CRAFTED = {
    **FILES,
    **{name: with_tree(text) for name, text in TREES_OF_BYTES.items()},
    **{name: with_tree({"a": marker}) for name, marker in MARKERS.items()},
    **{name: with_tree({"a": marker}, t=t) for name, (marker, t) in TENSORS.items()},
}


def test_how_parts_are_stored():
    """What was written once can be read for ever."""
    marker = {"~": "part", "version": "7", "content": {"x": tensor(), "y": [1]}}
    found = loads(with_tree({"a": [marker]}, t=T))["a"][0]
    assert_same(found, part("7", {"x": T, "y": [1]}))


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_files_are_damaged(name):
    """Whatever a file holds, the only exception is the one that names it; or the remedy."""
    remedy = "install a newer maze_train" if name == "format 2" else ""
    with pytest.raises(RunDirectoryError, match=rf"there\.file.*{remedy}"):
        loads(CRAFTED[name], Path("there.file"))


def test_a_bool_is_0_or_1():
    """Other bytes would be neither true nor false."""
    data = dumps({"a": torch.tensor([True, True])})
    at = data.rindex(b"\x01\x01")
    with pytest.raises(RunDirectoryError, match="neither 0 nor 1"):
        loads(data[:at] + b"\x02" + data[at + 1 :])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_flipped_files_give_a_state_or_the_error(data):
    """Without checksums a flip may stay unnoticed here, but it sets nothing else off."""
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
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_files_run_no_code(tmp_path):
    """A pickle in the place of a state, or in a tensor, is damaged and not more."""
    mark, file = tmp_path / "mark", io.BytesIO()
    torch.save({"a": Intruder(mark)}, file)
    pickled = pickle.dumps(Intruder(mark))
    hidden = torch.tensor(list(pickled), dtype=torch.uint8)
    marker = tensor(dtype="|O8", kind="array", shape=(1,))
    for data in (pickled, file.getvalue(), with_tree({"a": marker}, t=hidden)):
        with pytest.raises(RunDirectoryError):
            loads(data)
    assert not mark.exists()
    pickle.loads(pickled)
    assert mark.exists()
