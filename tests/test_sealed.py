"""Sealed JSON: any change of a file is detected."""

from __future__ import annotations

import hashlib
import json
import math

import pytest

from maze_train.core.files import seal, unseal

CONTENT = {"b": [1, None, "é"], "a": {"x": 0.1}}


@pytest.mark.parametrize("indent", [2, None])
def test_sealed_json_detects_any_change(indent):
    """Changed bytes, truncation, and a reformatted file are detected."""
    data = seal(CONTENT, indent=indent)
    content = unseal(data)
    assert content.pop("sha256") == hashlib.sha256(_plain(CONTENT, indent)).hexdigest()
    assert content == CONTENT
    assert seal({**CONTENT, "sha256": "other"}, indent=indent) == data
    for i in range(len(data)):
        flipped = data[:i] + bytes([data[i] ^ (1 << i % 8)]) + data[i + 1 :]
        for changed in (flipped, data[:i], data + b"\n", b" " + data):
            with pytest.raises(ValueError, match="damaged"):
                unseal(changed)


def _plain(content, indent):
    return (json.dumps(content, indent=indent, sort_keys=True) + "\n").encode()


INFINITE = {"bounds": [-math.inf, [math.inf]], "text": 'Infinity, "NaN"', "unknown": math.nan}


def _refuse(constant):
    raise ValueError(constant)


def test_sealed_infinities_are_valid_json():
    """Every JSON parser reads the file; strings such as "Infinity" are unchanged."""
    data = seal(INFINITE)
    found = json.loads(data, parse_constant=_refuse)
    assert found == unseal(data)
    assert {**found, "sha256": ""} == {**INFINITE, "unknown": None, "sha256": ""}


@pytest.mark.parametrize("indent", [2, None])
def test_sealed_files_of_0_2_are_read(indent):
    """Files of version 0.2 contain the constant `Infinity`."""
    plain = _plain(INFINITE | {"unknown": 0}, indent)
    digest = hashlib.sha256(plain).hexdigest()
    old = _plain(INFINITE | {"unknown": 0, "sha256": digest}, indent)
    assert b"Infinity" in old
    assert unseal(old)["bounds"] == [-math.inf, [math.inf]]
    with pytest.raises(ValueError, match="damaged"):
        unseal(old.replace(b"-Infinity", b" Infinity"))


@pytest.mark.parametrize("data", [b"", b"[]\n", b"\xff", b"[" * 100_000, b"{}\n", b"null"])
def test_unsealed_files_raise(data):
    """Any other content raises the same error."""
    with pytest.raises(ValueError, match="damaged"):
        unseal(data)
