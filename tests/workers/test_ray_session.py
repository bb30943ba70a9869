"""The connection with Ray: what is connected to, a head that is lost, Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from maze_train.core.errors import WorkerError
from maze_train.workers import ray_session
from maze_train.workers.ray_session import RaySession, ctrl_c_waits


def session_at(address: str) -> Any:
    """A session whose Ray was started at an address, or never if that is empty."""
    services = SimpleNamespace(
        canonicalize_bootstrap_address=lambda asked: address if asked == "auto" else asked,
        find_bootstrap_address=lambda folder: address or None,
    )
    session: Any = object.__new__(RaySession)
    session.ray = SimpleNamespace(_private=SimpleNamespace(services=services))
    session._head, session._lost_since, session._next_look = address, float("inf"), 0.0
    return session


def test_where_ray_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is started here where no cluster runs; one that is named has to answer."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        lives = f"127.0.0.1:{server.getsockname()[1]}"
        assert session_at(lives)._find("auto") == lives
        assert session_at("")._find(lives) == lives
    dead = lives
    for found in ("", dead):
        assert session_at(found)._find("auto") == "local"
    with pytest.raises(OSError, match="refused"):
        session_at("")._find(dead)
    monkeypatch.setenv("RAY_ADDRESS", dead)
    with pytest.raises(OSError, match="refused"):
        session_at(dead)._find("auto")


def test_a_head_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for, and then the run ends with a message; one that is back is not lost."""
    now = 100.0
    monkeypatch.setattr(ray_session, "time", SimpleNamespace(monotonic=lambda: now))
    session = session_at("127.0.0.1:1")
    for is_there in (False, True, False):
        session.answers = lambda is_there=is_there: is_there
        now += 15.0
        session.check_head()
    now += 25.0
    with pytest.raises(
        WorkerError, match=r"the head .*\(127\.0\.0\.1:1\) is lost; start Ray again"
    ):
        session.check_head()


def test_ctrl_c_waits(capsys: pytest.CaptureFixture[str]) -> None:
    """Until what it would disturb has ended, with one message."""
    ended = []

    @ctrl_c_waits("ending Ray")
    def end() -> None:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        end()
    assert ended == [True]
    assert capsys.readouterr().err == "SIGINT: ending Ray first\n"
