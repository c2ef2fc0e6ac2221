"""Options of training that change no result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from cmsf.utils.errors import BadInput
from cmsf.utils.numbers import check_number

OnFullDisk = Literal["stop", "go-on"]
OnCollapse = Literal["warn", "stop"]


@dataclass(frozen=True)
class TrainingOptions:
    """checkpoint_minutes: the longest time between checkpoints, within an epoch too; 0: at ends of epochs only.
    on_full_disk: whether to stop where there is no room for a checkpoint or a line of the log.
    on_collapse: what to do when the embeddings of all images become the same."""

    checkpoint_minutes: float = 15
    on_full_disk: OnFullDisk = "stop"
    on_collapse: OnCollapse = "warn"

    def __post_init__(self) -> None:
        check_number("--checkpoint-minutes", self.checkpoint_minutes, 0, hint="in minutes; 0: only after epochs")
        for flag, chosen, kind in (
            ("--on-full-disk", self.on_full_disk, OnFullDisk),
            ("--on-collapse", self.on_collapse, OnCollapse),
        ):
            if chosen not in get_args(kind):
                raise BadInput(f"invalid value {flag} {chosen}; expected {' or '.join(get_args(kind))}")
