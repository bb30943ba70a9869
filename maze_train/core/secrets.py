"""Redact passwords and tokens in strings that are stored or sent to a service."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

REMOVED = "***"
"""Replacement of a secret."""

NAMES = r"(?:token|password|passwd|secret|credentials?|(?:api_?)?key)"
SECRET_KEY = re.compile(rf"(?:^|[._-]){NAMES}$", re.IGNORECASE)
"""Matches names of settings and options with secret values, by the end of the name."""

SECRET_VALUE = re.compile(
    rf"""((?:^|[^a-z0-9]){NAMES}["']?\s*[:=]\s*)("[^"]*"|'[^']*'|[^\s,;&)\]}}"'][^,;&)\]}}]*)""",
    re.IGNORECASE,
)
"""Matches a secret name and value in a mapping, a query or a call."""

URL_LOGIN = re.compile(r"://[^/@\s]+@")


def without_login(text: str, replacement: str = f"{REMOVED}@") -> str:
    """Return a text with the logins of all URLs replaced."""
    return URL_LOGIN.sub(f"://{replacement}", text)


def without_secrets(words: Iterable[str]) -> list[str]:
    """Return a command line with passwords and tokens replaced.

    Values are removed if the last part of their name is `token`, `password`, `secret`,
    `credentials`, `key` or similar: in `key=value`, in nested values, and after an option such as
    `--api-key`. The login is removed from URLs.
    """
    found: list[str] = []
    is_value = False
    for word in words:
        key, equals, _ = word.partition("=")
        is_name = bool(SECRET_KEY.search(key))
        if is_value:
            word = REMOVED
        elif is_name and equals:
            word = f"{key}={REMOVED}"
        found.append(without_login(SECRET_VALUE.sub(rf"\1{REMOVED}", word)))
        is_value = is_name and not equals and word.startswith("-")
    return found


def settings_without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings with passwords and tokens replaced, see `without_secrets`."""
    return {key: _without_secrets(value, key) for key, value in settings.items()}


def _without_secrets(value: object, key: str) -> object:
    if isinstance(value, dict):
        return settings_without_secrets(value)
    if isinstance(value, list | tuple):
        return [_without_secrets(own, key) for own in value]
    if SECRET_KEY.search(str(key)) and value is not None:
        return REMOVED
    return without_login(value) if isinstance(value, str) else value
