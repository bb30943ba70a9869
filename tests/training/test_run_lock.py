from __future__ import annotations

import errno
import fcntl
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from maze_train.core.errors import RunDirectoryError
from maze_train.core.files import (
    atomic_write,
    claim_temporary,
    exclusive,
    fsync_directory,
    process_runs,
    write_synced,
)

HOLDER = """
import os, pathlib, sys, time
from maze_train.core.files import exclusive
with exclusive(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_run_directory_lock_excludes_other_processes(tmp_path):
    """A second process raises an error that names the first; afterwards the directory is free."""
    with exclusive(tmp_path):
        text = rf"another process \(pid {os.getpid()} on host \S+\) trains in {tmp_path}"
        with pytest.raises(RunDirectoryError, match=text), exclusive(tmp_path):
            pytest.fail("two at a time")
        with pytest.raises(RunDirectoryError), exclusive(tmp_path):
            pytest.fail("the failed attempt has freed the lock")
    with pytest.raises(ZeroDivisionError), exclusive(tmp_path):  # however the block ends
        _ = 1 / 0
    with exclusive(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("make_again", [False, True])
def test_moved_run_directory_is_not_written(tmp_path, make_again):
    """Nothing is written while a directory is moved; results are written once it is restored."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()

    def write() -> None:
        with atomic_write(run / "policies" / "a" / "weights") as file:
            file.write(b"1")

    with exclusive(run):
        run.rename(elsewhere)
        if make_again:
            shutil.copytree(elsewhere, run)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(FileNotFoundError, match="moved or removed during the run"):
            write()
        assert sorted(tmp_path.rglob("*")) == before
        shutil.rmtree(run, ignore_errors=True)
        elsewhere.rename(run)
        write()
    shutil.rmtree(run)
    write()  # outside the block, the directory is not special


@pytest.mark.parametrize("text", [b"", b"\xff" * 9000, b"pid 7 on host a\nb\n"])
def test_lock_file_content_is_informative_only(tmp_path, text):
    """The content of the lock file is informative only."""
    with exclusive(tmp_path):
        (tmp_path / ".lock").write_bytes(text)
        with pytest.raises(RunDirectoryError, match="pid unknown"), exclusive(tmp_path):
            pass
    with exclusive(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"pid {os.getpid()} on host ")


def test_links_in_a_run_directory_raise(tmp_path):
    """The run directory may be a link, but must not contain links (see `test_attacks.py`)."""
    run = tmp_path / "run"
    (run / "policies").mkdir(parents=True)
    (tmp_path / "link").symlink_to(run)
    with exclusive(tmp_path / "link"):
        pass
    (run / "policies" / "epoch_1").symlink_to(tmp_path)
    text = "run/policies/epoch_1 is a symbolic link"
    with pytest.raises(RunDirectoryError, match=text), exclusive(run):
        pass
    (run / "policies" / "epoch_1").unlink()
    (run / ".lock").unlink()
    (run / ".lock").mkdir()
    for place, text in ((run, r"regular file: remove it.*\.lock"), (tmp_path / "x", "x cannot")):
        with pytest.raises(RunDirectoryError, match=text), exclusive(place):
            pass


def open_locks():
    """Return the descriptors of open lock files of this process."""
    links = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return [number for number, link in links.items() if link.endswith(".lock")]


def test_temporary_directories_of_dead_processes_are_removed(tmp_path, monkeypatch):
    """The next start removes marked folders of dead processes, and no others."""
    folders = {name: tmp_path / f"pymp-{name}" for name in ("own", "dead", "alive", "other")}
    for name, folder in folders.items():
        folder.mkdir()
        if name in ("dead", "alive"):
            (folder / "maze_train.lock").touch()
    monkeypatch.setattr(multiprocessing.util, "get_temp_dir", lambda: str(folders["own"]))
    with (folders["alive"] / "maze_train.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        before = open_locks()
        claim_temporary()
        claim_temporary()
    assert {path.name for path in tmp_path.iterdir()} == {"pymp-own", "pymp-alive", "pymp-other"}
    (mark,) = set(open_locks()) - set(before)
    with (folders["own"] / "maze_train.lock").open() as ours, pytest.raises(BlockingIOError):
        fcntl.flock(ours, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(mark)


def test_child_process_does_not_claim_the_directory_of_its_parent(tmp_path, monkeypatch):
    """Killing a child does not remove the temporary folder of its parent."""
    monkeypatch.setattr(multiprocessing.util, "get_temp_dir", lambda: str(tmp_path))
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    claim_temporary()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_directory_of_a_killed_fork_server_is_removed(tmp_path):
    """The next process that starts workers removes the folder."""
    code = (
        "import os, sys; from maze_train.workers.pool import WorkerSpecs\n"
        "from maze_train.workers.process_pool import LocalProcesses\n"
        "pool = LocalProcesses(start_method='forkserver').pool(WorkerSpecs([print], ['worker']))\n"
        "print(len(os.listdir(os.environ['TMPDIR'])), flush=True)\n"
        "if sys.argv[1] == 'killed': os.kill(os.getpid(), 9)\n"
        "pool.close()\n"
    )
    for how, left in (("killed", 1), ("ended", 0)):
        command = [sys.executable, "-c", code, how]
        env = {**os.environ, "TMPDIR": str(tmp_path)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert "1" in done.stdout.splitlines()
        assert len(list(tmp_path.iterdir())) == left


def test_lock_descriptors_are_closed_and_not_inherited(tmp_path):
    """File descriptors are closed after success and failure, and not inherited."""
    before = open_locks()  # may contain the lock of a fork server
    with exclusive(tmp_path):
        own = set(open_locks()) - set(before)
        assert all(fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for number in own)
        with pytest.raises(RunDirectoryError), exclusive(tmp_path):
            pass
        assert set(open_locks()) == {*before, *own}
    assert open_locks() == before


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "    raise KeyError\n"], ids=["success", "error"])
def test_forked_process_does_not_keep_the_lock(tmp_path, end):
    """The lock is released even if forked workers are still running."""
    code = (
        "import contextlib, os, pathlib, sys, time; from maze_train.core.files import exclusive\n"
        "with contextlib.suppress(KeyError), exclusive(pathlib.Path(sys.argv[1])):\n"
        "    pid = os.fork()\n"
        "    if pid == 0: time.sleep(60)\n"
        f"{end}"
        "with exclusive(pathlib.Path(sys.argv[1])): print('free')\n"
        "os.kill(pid, 9); os.waitpid(pid, 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=60
    )
    assert (result.stdout, result.stderr) == ("free\n", "")


@pytest.mark.parametrize(("number", "locked"), [(errno.ENOLCK, True), (errno.EIO, False)])
def test_file_system_without_locks_is_allowed(tmp_path, monkeypatch, number, locked):
    """Without lock support, training continues; other errors are raised."""

    def fail(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    if locked:
        with exclusive(tmp_path):
            pass
    else:
        text = r"\.lock cannot be locked"
        with pytest.raises(RunDirectoryError, match=text), exclusive(tmp_path):
            pass


@pytest.mark.slow
def test_killed_process_releases_the_lock(tmp_path):
    """Killing a process releases its lock."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        assert process_runs(process.pid)
        text = rf"pid {process.pid} on host"
        with pytest.raises(RunDirectoryError, match=text), exclusive(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not process_runs(process.pid)
    with exclusive(tmp_path):
        pass


def test_unsupported_directory_sync_is_ignored(tmp_path, monkeypatch):
    """Missing support for directory syncs is ignored; other errors are raised."""
    write_synced(tmp_path / "a", b"abc")
    fsync_directory(tmp_path)
    assert (tmp_path / "a").read_bytes() == b"abc"
    for number in (errno.EINVAL, errno.EIO):

        def fail(descriptor, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fail)
        if number == errno.EINVAL:
            fsync_directory(tmp_path)
        else:
            with pytest.raises(OSError, match="Input/output error"):
                fsync_directory(tmp_path)
    with pytest.raises(FileNotFoundError):
        fsync_directory(tmp_path / "nowhere")
