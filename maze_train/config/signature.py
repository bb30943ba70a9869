"""Signatures of configuration files. Files signed by this user need no `trust`.

The signature is a comment in the last line: HMAC-SHA256 (RFC 2104) over all preceding bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from maze_train.core.folders import OPENS_BELOW

LINE = "# signature of the user who made this: "
KEY, KEY_NBYTES = "key", 32


def config_home() -> Path:
    """Return the configuration folder of this package in the user's home directory."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~/.config"))
    return base / "maze_train"


def signed(text: str) -> str:
    """Append the signature of this user; without a key, the text is returned unsigned."""
    try:
        return text + _signature(text, _key(make=True))
    except OSError:
        return text


def is_signed(text: str) -> bool:
    """Return whether the text carries a valid signature of this user."""
    settings, line, _ = text.rpartition(LINE)
    if not line:
        return False
    try:
        expected = settings + _signature(settings, _key())
    except OSError:
        return False
    return hmac.compare_digest(text.encode(), expected.encode())


def _signature(text: str, key: bytes) -> str:
    return f"{LINE}{hmac.new(key, text.encode(), hashlib.sha256).hexdigest()}\n"


def _key(make: bool = False) -> bytes:
    """Read the secret key of this user. Symbolic links are not followed.

    Args:
        make: Whether to create a missing key.

    Raises:
        OSError: If the key is missing, cannot be created, or is not a private file of this user.
    """
    home = config_home()
    if make:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not OPENS_BELOW:  # Windows: the home directory is private.
        return _key_by_path(home / KEY, make)
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if make:
            _make_key(folder)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(KEY, flags, dir_fd=folder), "rb") as file:
            found = os.fstat(file.fileno())
            is_private = found.st_uid == os.geteuid() and not found.st_mode & 0o077
            key = file.read(KEY_NBYTES + 1) if stat.S_ISREG(found.st_mode) else b""
    finally:
        os.close(folder)
    if not is_private or len(key) != KEY_NBYTES:
        raise OSError(f"{home / KEY} is not a key of this user")
    return key


def _key_by_path(path: Path, make: bool) -> bytes:
    """Read the key, without checks of its owner; see `_key`."""
    if make and not path.exists():
        with suppress(FileExistsError), path.open("xb") as file:
            file.write(secrets.token_bytes(KEY_NBYTES))
    key = path.read_bytes()
    if len(key) != KEY_NBYTES:
        raise OSError(f"{path} is not a key")
    return key


def _make_key(folder: int) -> None:
    """Create the key in an open folder; an existing key is kept."""
    with suppress(FileNotFoundError):
        os.stat(KEY, dir_fd=folder, follow_symlinks=False)
        return
    temporary = f".{KEY}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(secrets.token_bytes(KEY_NBYTES))
        file.flush()
        os.fsync(file.fileno())
    try:
        with suppress(FileExistsError):  # Another process created the key first.
            os.link(temporary, KEY, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.unlink(temporary, dir_fd=folder)
