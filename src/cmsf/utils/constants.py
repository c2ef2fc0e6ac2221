"""Constants that several packages share."""

from __future__ import annotations

UNKNOWN = -1
"""The index, label or position that stands for none."""

WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".tar")
"""The endings of files of weights."""
