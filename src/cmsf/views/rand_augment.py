"""RandAugment with cutout: FixMatch's strong view."""

from __future__ import annotations

from dataclasses import dataclass

from cmsf.views.augmentation import Augmentation


@dataclass(frozen=True)
class RandAugment(Augmentation):
    """Two random operations and a grey square."""
