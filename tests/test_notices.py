"""Notes, warnings and errors for the user."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from maze_train.core.errors import ConfigError, EnvError
from maze_train.core.notices import notify, say, tell_traceback, warn
from maze_train.tracking.console import Display

if TYPE_CHECKING:
    import pytest


class Gone(io.StringIO):
    """Stream whose reader has closed."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_notices_go_to_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warnings have a prefix; a closed reader loses the line, but no error is raised."""
    notify("a line")
    warn("look out")
    assert capsys.readouterr() == ("", "a line\nwarning: look out\n")
    monkeypatch.setattr(sys, "stderr", Gone())
    notify("no one reads this")
    sys.stderr.close()
    notify("nor this")


def test_unprintable_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Unprintable characters are escaped in all output, so names cannot control the terminal."""
    name = "\x1b]0;title\x07a\rb\u202ec\udc80 d"
    shown = r"\x1b]0;title\x07a\rb\u202ec\udc80 d"
    say(name)
    Display("lines").say(name)
    notify(name)
    tell_traceback(EnvError(name))
    out, err = capsys.readouterr()
    assert out == f"{shown}\n{shown}\n"
    assert err == f"{shown}\nmaze_train.core.errors.EnvError: {shown}\n"
    assert str(ConfigError("env", name)) == f"env: {shown}"


def test_unencodable_characters_are_replaced() -> None:
    """Characters that the encoding lacks, as in the final summary, raise no error."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Display("lines", Console(file=stream)).say("1 \u00b1 2")
    stream.seek(0)
    assert stream.read() == "1 ? 2\n"
