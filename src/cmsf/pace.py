"""How fast a run goes."""

from __future__ import annotations

import time


class Pace:
    """Since some step."""

    def __init__(self, step: int) -> None:
        self.first, self.start = step, time.monotonic()

    def images_per_second(self, step: int, batch_size: int) -> float:
        return round((step - self.first) * batch_size / self._seconds, 1)

    def share(self, seconds: float) -> float:
        """How much of the time that was."""
        return round(seconds / self._seconds, 4)

    @property
    def _seconds(self) -> float:
        return max(time.monotonic() - self.start, 1e-9)
