"""Constants that several packages share."""

from __future__ import annotations

UNKNOWN = -1
"""The index, label or position that stands for none."""

RECIPE_FILE = "recipe.yaml"
"""The file that makes a folder a run."""
ENVIRONMENT_FILE = "environment.json"
"""Where a run was trained, and on which images."""
BACKBONE_FILE = "backbone.safetensors"
"""A run's network."""

WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".tar")
"""The endings of files of weights."""
