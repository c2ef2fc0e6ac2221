"""The numbers of a run as JSON lines and TensorBoard events."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.utils.tensorboard import SummaryWriter

TIMING_FIELDS = ("images_per_second", "seconds")
"""Fields that differ between two runs which compute the same."""


class MetricsLog:
    """Appends to metrics.jsonl; a resumed run first cuts off what came after its checkpoint."""

    def __init__(self, path: Path, tensorboard: Path, length: int, step: int) -> None:
        self.file = path.open("ab")
        self.file.truncate(length)
        self.file.seek(length)
        self.events = SummaryWriter(str(tensorboard), purge_step=step + 1)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        line = {"kind": kind, "step": step} | {name: _plain(value) for name, value in values.items()}
        self.file.write((json.dumps(line, allow_nan=False) + "\n").encode())
        self.file.flush()
        for name, value in line.items():
            if isinstance(value, int | float) and name not in ("step", "epoch"):
                self.events.add_scalar(f"{kind}/{name}", value, step)

    def length(self) -> int:
        return self.file.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        self.events.close()


def _plain(value: Any) -> Any:
    """JSON has no NaN: a number that is not there is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
