"""Functions from the top of the package that objects on lower floors offer as methods.

The package puts them here when it is imported, so these objects import nothing above themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


load_learner: Callable[..., Any]
"""Reads the learner of a run, for `Learner.from_checkpoint`."""

export_policy: Callable[..., Any]
"""Writes a policy as one file, for `TrainedPolicy.export`."""
