"""Sealed JSON: objects that hold their own sha256, so that any change to their file is noticed."""

from __future__ import annotations

import hashlib
import json
from typing import Any

DIGEST = "sha256"
"""Key of the digest, which is that of the same text without this key."""


def seal(content: dict[str, Any], *, indent: int | None = 2) -> bytes:
    """The only text of a sealed object with this content; its digest is made anew.

    Args:
        content: Values of JSON.
        indent: Spaces per level; None: one line.

    Raises:
        TypeError: If the content has other values than JSON.
    """
    content = {key: value for key, value in content.items() if key != DIGEST}
    content[DIGEST] = hashlib.sha256(_text(content, indent)).hexdigest()
    return _text(content, indent)


def unseal(data: bytes) -> dict[str, Any]:
    """The content of a sealed object, its digest included.

    Raises:
        ValueError: If the text is not what `seal` makes of any content.
    """
    try:
        content = json.loads(data)
        if isinstance(content, dict):
            indent = 2 if data.startswith(b"{\n") else None
            # Every byte counts: the same content in other words was not written here.
            if seal(content, indent=indent) == data:
                return content
    except (ValueError, RecursionError) as error:
        raise ValueError(f"damaged, or no JSON: {error}") from error
    raise ValueError(f"its {DIGEST} differs: it was changed, or is damaged")


def _text(content: dict[str, Any], indent: int | None) -> bytes:
    return (json.dumps(content, indent=indent, sort_keys=True) + "\n").encode()
