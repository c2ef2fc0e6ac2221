"""Constants that several rooms share."""

from __future__ import annotations

UNKNOWN = -1
"""An index, label or position that is not there."""
