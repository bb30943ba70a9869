"""Lines for people."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from maze_train.notices import tell, warn

if TYPE_CHECKING:
    import pytest


class Gone(io.StringIO):
    """A stream whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_lines_go_to_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning says that it is one; a reader who is gone costs the line and nothing else."""
    tell("a line")
    warn("look out")
    assert capsys.readouterr() == ("", "a line\nwarning: look out\n")
    monkeypatch.setattr(sys, "stderr", Gone())
    tell("nobody reads this")
    sys.stderr.close()
    tell("nor this")
