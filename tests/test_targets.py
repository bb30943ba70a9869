from __future__ import annotations

import collections
import sys
import textwrap
from types import ModuleType

import pytest
import torch

from maze_train.core.errors import ConfigError
from maze_train.core.targets import InlineObject, build_target, is_target, locate


@pytest.fixture
def own_modules(tmp_path, monkeypatch):
    """Create two user modules; importing the second one fails."""
    (tmp_path / "own_good.py").write_text(
        textwrap.dedent("""
            import pathlib
            import torch

            LIMIT = 3

            def linear():
                return torch.nn.Linear(1, 1)

            def nothing():
                return []

            def touch():
                pathlib.Path("marker").touch()

            class Part:
                class Inner:
                    pass

                def __init__(self, size, name="a", inner=None):
                    if size < 0:
                        raise ValueError("size must be >= 0")
                    self.size, self.name, self.inner = size, name, inner
        """)
    )
    (tmp_path / "own_needy.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_locate_accepts_dots_and_a_colon(own_modules):
    """Classes, also nested ones, are found as package.module.Name and package.module:Name."""
    for path in ("collections.OrderedDict", "collections:OrderedDict"):
        assert locate(path) is collections.OrderedDict
    assert locate("own_good.Part.Inner").__qualname__ == "Part.Inner"
    assert locate("torch.optim.Adam.step").__name__ == "step"
    assert is_target({"_target_": "a.B"})
    assert not any(is_target(node) for node in ({"target": "a.B"}, "_target_", ["_target_"], None))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("Adam", r"optimizer = 'Adam': expected a dotted path"),
        ("torch.optim.", r"expected a dotted path"),
        ("../evil.Name", r"expected a dotted path"),
        ("no_such_package_here.Name", r"no module 'no_such_package_here'"),
        ("torch.optim.Adan", r"torch.optim has no 'Adan'; did you mean Adam\?"),
        ("own_needy.Name", r"importing own_needy failed: .*a_package_that_is_missing"),
    ],
)
def test_unknown_target_is_named(own_modules, path, message):
    """The error names the key, the path, and what was not found."""
    with pytest.raises(ConfigError, match=message):
        locate(path, key="optimizer")


def test_target_node_overrides_keyword_arguments(own_modules):
    """Positional arguments come first; keys of the node override keyword arguments."""
    built = build_target({"_target_": "own_good.Part", "name": "node"}, 4, name="caller")
    assert (built.size, built.name) == (4, "node")
    assert build_target({"_target_": "own_good.Part"}, size=5, name="caller").name == "caller"


def test_nested_targets_are_built_first(own_modules):
    """A mapping with `_target_` becomes an object; other mappings stay mappings."""
    node = {"_target_": "own_good.Part", "size": 1, "inner": {"_target_": "own_good.Part.Inner"}}
    before = {**node, "inner": dict(node["inner"])}
    first, second = build_target(node), build_target(node)
    assert type(first.inner).__name__ == "Inner"
    assert node == before
    assert first.inner is not second.inner
    plain = build_target({"_target_": "own_good.Part", "size": 1, "inner": {"a": 1}})
    assert plain.inner == {"a": 1}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": "own_good.LIMIT"}, r"model.part._target_ = .*: expected a class or function"),
        ({"_target_": "own_good.Part"}, r"model.part: calling own_good.Part failed: .*'size'"),
        (
            {"_target_": "own_good.Part", "size": 1, "colour": "red"},
            r"calling own_good.Part failed: .*'colour'.*; it accepts size",
        ),
        ({"_target_": "own_good.Part", "size": -1}, r"model.part: calling .* failed"),
        (
            {"_target_": "torch.optim.Adam", "params": [], "betas": [2.0, 0.9]},
            r"model.part: calling .* failed",
        ),
        (
            {"_target_": "own_good.Part", "inner": {"_target_": "own_good.Part.Outer"}},
            r"model.part.inner._target_ = 'own_good.Part.Outer': own_good has no 'Outer'",
        ),
    ],
)
def test_invalid_target_arguments_are_named(own_modules, node, message):
    """The error names the setting and the cause."""
    with pytest.raises(ConfigError, match=message):
        build_target(node, key="model.part")


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("own_good.Part", "expected a subclass of torch.nn.Module, or a function"),
        ("subprocess.getoutput", "expected a subclass of torch.nn.Module, or a function"),
        ("torch.nn.Linear", "model.part.bias._target_ = 'os.system': expected a class"),
    ],
)
def test_targets_are_checked_before_any_call(own_modules, tmp_path, monkeypatch, target, problem):
    """Wrong classes and functions of the standard library are rejected before any call."""
    monkeypatch.chdir(tmp_path)
    touch = {"_target_": "own_good.touch"}
    nested = {"size": touch, "bias": {"_target_": "os.system", "command": "touch marker"}}
    with pytest.raises(ConfigError, match=problem):
        build_target({"_target_": target, **nested}, key="model.part", kind=torch.nn.Module)
    assert not (tmp_path / "marker").exists()


def test_target_function_result_is_checked(own_modules):
    """The result of a function is checked, since its type is unknown before the call."""
    built = build_target({"_target_": "own_good.linear"}, key="model.part", kind=torch.nn.Module)
    assert isinstance(built, torch.nn.Linear)
    with pytest.raises(ConfigError, match=r"model.part = 'list': expected a torch.nn.Module"):
        build_target({"_target_": "own_good.nothing"}, key="model.part", kind=torch.nn.Module)


@pytest.mark.parametrize(
    ("file", "name"), [("own_script.py", "own_script.Net"), (None, "__main__.Net")]
)
def test_script_objects_have_importable_names(tmp_path, monkeypatch, file, name):
    """The name resolves to the script's object without running the script again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_script.py").write_text("raise RuntimeError")
    main = ModuleType("__main__")
    main.Net = type("Net", (), {"__module__": "__main__"})
    main.__file__ = file and str(tmp_path / file)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert InlineObject(main.Net) == name
    assert locate(name) is main.Net
