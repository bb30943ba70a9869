"""Conversion of arguments to the override syntax of Hydra."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from maze_train.core.errors import ConfigError
from maze_train.core.text import shell_word
from maze_train.hydra_app import as_given, as_typed, normalise, parsed


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return a configuration folder with a group and an environment."""
    for path in ("own/x.yaml", "env/short.yaml"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text("id: CartPole-v1\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("algorithm=ppo", "algorithm=ppo"),
        ("+algorithm=ppo", "algorithm=ppo"),
        ("+env=ALE/Tennis-v5", "env=id ++env.id=ALE/Tennis-v5"),
        ("+env=CartPole-v1", "env=CartPole-v1"),
        ("env=default", "env=default"),
        ("env=short", "env=short"),
        ("experiment=glob(ppo/Cart*)", "experiment=ppo/CartPole-v1,ppo/CartPole-v1-positions"),
        ("+experiment=ppo/CartPole-v1", "experiment=ppo/CartPole-v1"),
        ("algorithm={lr: 1}", "++algorithm={lr: 1}"),
        ("algorithm.lr=1", "++algorithm.lr=1"),
        ("+algorithm.lr=1", "++algorithm.lr=1"),
        ("env.kwargs.path=a/b=c", "++env.kwargs.path=a/b=c"),
        ("seed=0,1,2", "++seed=0,1,2"),
        ("algoritm=ppo", "++algoritm=ppo"),
        ("own=x", "own=x"),
        ("hydra.sweep.dir=x", "hydra.sweep.dir=x"),
        ("hydra/launcher=joblib", "hydra/launcher=joblib"),
        ("~algorithm.lr", "~algorithm.lr"),
        ("+env@eval_env=CartPole-v1", "+env@eval_env=CartPole-v1"),
        ("algorithm/sub=x", "algorithm/sub=x"),
        ("word", "word"),
        ("env.kwargs.mode=-m", "++env.kwargs.mode=-m"),
        ("algorithm=3", "algorithm='3'"),
    ],
)
def test_arguments_become_overrides(given: str, expected: str, folder: str) -> None:
    """`+` is removed from choices, `++` is added to values, everything else is unchanged."""
    words = normalise([given], [folder])
    assert " ".join(words) == expected
    if given.startswith(("+env=", "env=")):
        assert as_given(words) == [given.lstrip("+")]


def test_sweeps_over_ids_and_options_of_env_raise(folder: str) -> None:
    """Ids are set as `env.id`, options as `env`."""
    assert normalise(["env=A-v0,B-v1"], [folder], True) == ["env=id", "++env.id=A-v0,B-v1"]
    assert normalise(["env=short,default"], [folder], True) == ["env=short,default"]
    with pytest.raises(ConfigError, match=r"^env = 'A-v0,short': A-v0: ids"):
        normalise(["env=A-v0,short"], [folder], True)


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/tmp/lr-1e-3", "resume=/tmp/lr-1e-3"),
        ("/tmp/lr=0.1,seed=2", "\"resume='/tmp/lr=0.1,seed=2'\""),
        ("/home/jos\u00e9/a b", "\"resume='/home/jos\u00e9/a b'\""),
        ("it's", None),
        ("$HOME/`a`/\\'\"!", None),
    ],
)
def test_shell_quoting_round_trips(path: str, word: str | None) -> None:
    """The shell and Hydra read the quoted path unchanged."""
    written = shell_word("resume", path)
    assert word is None or written == word
    (given,) = shlex.split(written)
    (read,) = normalise([given])
    value = OverridesParser.create().parse_override(read.lstrip("+")).value()
    assert str(getattr(value, "text", value)) == path


@pytest.mark.parametrize(
    ("given", "paths"),
    [
        ("run_dir=runs/it's", "runs/it's"),
        ("+run=jos\u00e9/a b(1)", "jos\u00e9/a b(1)"),
        ("resume=~/lr=0.1,seed=2", "~/lr=0.1,seed=2"),
        ("base_run=a\u00e9\\", "a\u00e9\\"),
        ("study=2026_11_20", "2026_11_20"),
        ("runner.dataset=#1", "#1"),
        ("policies.wolf=a b", "a b"),
        ("policies.wolf.source=\u65e5:wolf", "\u65e5:wolf"),
        ("hydra.sweep.dir=it's", "it's"),
        ("output='a,b'", "a,b"),
        ("run_dir=null", None),
        ("runs=[a,it's, \u00e9]", ["a", "it's", "\u00e9"]),
        ("runs=[a, b]", ["a", "b"]),
        ("runs=[a*,(b)]", ["a*", "(b)"]),
    ],
)
def test_paths_are_quoted_for_hydra(given: str, paths: Any) -> None:
    """Only text that Hydra would interpret is quoted: not null, lists, or quoted text."""
    (word,) = normalise([given])
    assert OverridesParser.create().parse_override(word).value() == paths


def test_commas_separate_paths_in_a_sweep() -> None:
    """Commas separate paths in a sweep, quoted or not."""
    words = ["run_dir=it's,b", "output_dir=a,b", "resume=a"]
    sweep = ["++run_dir='it\\'s',b", "++output_dir=a,b", "++resume=a"]
    assert normalise(words, is_sweep=True) == sweep


@pytest.mark.parametrize(
    ("argv", "options", "overrides"),
    [
        (["algorithm=ppo", "-m", "seed=0,1"], {"multirun": True}, ["algorithm=ppo", "seed=0,1"]),
        (["seed=1", "-cn", "config", "a=b"], {"config_name": "config"}, ["seed=1", "a=b"]),
        (["--config-dir", "a.b=c", "seed=1"], {"config_dir": "a.b=c"}, ["seed=1"]),
        (["--info", "seed=1"], {"info": "all"}, ["seed=1"]),
        (["--info", "defaults", "seed=1"], {"info": "defaults"}, ["seed=1"]),
        (["-m", "--", "seed=1"], {"multirun": True}, ["seed=1"]),
        (["a=-m", "~b", "word"], {"multirun": False}, ["a=-m", "~b", "word"]),
    ],
)
def test_option_arguments_are_no_overrides(
    argv: list[str], options: dict[str, Any], overrides: list[str]
) -> None:
    """An argument of an option is not an override, even if it looks like one."""
    found = parsed(argv)
    assert found.overrides == overrides
    assert {name: getattr(found, name) for name in options} == options


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-cn"], "--config-name/-cn: expected one argument"),
        (["--cfg", "x"], "--cfg/-c: invalid choice: 'x'"),
        (["a=b", "--multi"], r"--multi: no such option; did you mean --multirun\?"),
    ],
)
def test_invalid_option_raises(argv: list[str], message: str) -> None:
    """The error names the option and its allowed values."""
    with pytest.raises(ConfigError, match=f"^{message}"):
        parsed(argv)


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("bad '++seed=0,1'", "bad '+seed=0,1'"),
        ("bad ++env.kwargs.a=b++c.", "bad env.kwargs.a=b++c."),
        ("bad algorithm=ppo", "bad +algorithm=ppo"),
        ("bad ++my_seed=1", "bad ++my_seed=1"),
        ("bad ++seed=1 of a sweep", "bad +seed=1 of a sweep"),
    ],
)
def test_hydra_errors_show_typed_arguments(message: str, typed: str) -> None:
    """Errors of Hydra show the arguments as they were typed."""
    argv = ["+seed=0,1", "-m", "env.kwargs.a=b++c", "+algorithm=ppo", "++my_seed=1"]
    assert as_typed(message, argv) == typed
