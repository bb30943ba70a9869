"""Connections to Ray: clusters, a lost head, Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from maze_train.cluster import session as ray_session
from maze_train.cluster.pool import RayBackend
from maze_train.cluster.session import RaySession, ctrl_c_waits, find_cluster
from maze_train.core.errors import WorkerError


def ray_at(address: str) -> Any:
    """Return a stand-in for Ray that finds a cluster at the address, or none if it is empty."""
    services = SimpleNamespace(
        canonicalize_bootstrap_address=lambda asked: address if asked == "auto" else asked,
        find_bootstrap_address=lambda folder: address or None,
    )
    return SimpleNamespace(_private=SimpleNamespace(services=services))


def test_ray_is_started_locally_or_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is started locally if no cluster runs; a configured address must respond."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        lives = f"127.0.0.1:{server.getsockname()[1]}"
        assert find_cluster(ray_at(lives), "auto") == lives
        assert find_cluster(ray_at(""), lives) == lives
    dead = lives
    for found in ("", dead):
        assert find_cluster(ray_at(found), "auto") == "local"
    with pytest.raises(OSError, match="refused"):
        find_cluster(ray_at(""), dead)
    monkeypatch.setenv("RAY_ADDRESS", dead)
    with pytest.raises(OSError, match="refused"):
        find_cluster(ray_at(dead), "auto")


def test_lost_ray_head_raises_worker_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the head is unreachable for too long, WorkerError is raised."""
    now = 100.0
    monkeypatch.setattr(ray_session, "time", SimpleNamespace(monotonic=lambda: now))
    session: Any = RaySession()
    session._head = "127.0.0.1:1"
    for is_there in (False, True, False):
        session.answers = lambda is_there=is_there: is_there
        now += 15.0
        session.check_head()
    now += 25.0
    with pytest.raises(WorkerError, match=r"the head .*\(127\.0\.0\.1:1\) is lost; restart Ray"):
        session.check_head()


def test_placement_timeout_raises_lost_head() -> None:
    """A timeout of a placement group raises the error of a lost head."""

    def placement_group(bundles: list[Any], strategy: str) -> None:
        raise TimeoutError

    session: Any = RaySession()
    exceptions = SimpleNamespace(GetTimeoutError=TimeoutError)
    session.ray = SimpleNamespace(
        util=SimpleNamespace(placement_group=placement_group), exceptions=exceptions
    )
    session._groups, session._head = {}, "10.0.0.1:6379"
    with pytest.raises(WorkerError, match=r"the head .*\(10\.0\.0\.1:6379\) is lost"):
        session.options(RayBackend(), 2, object())


def test_sigint_is_deferred_until_the_function_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """SIGINT is deferred until the function has finished, with one message."""
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
