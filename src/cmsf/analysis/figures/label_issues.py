"""Figure of label issues: images with their labels and the suggested classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from cmsf.analysis.figures.thumbnails import PLAIN, THUMBNAIL, WRONG, Sheet, shortened
from cmsf.analysis.label_issues import Suspect
from cmsf.data import Split
from cmsf.utils.progress import track

SHOWN = 40
_COLUMNS = 8
_ACROSS, _DOWN, _TOP = 1.25, 1.5, 0.35
"""Steps between pictures and height of the title, in inches."""


def draw_suspects(split: Split, suspects: Sequence[Suspect], out: Path) -> None:
    """Draws the first forty: the label in red, and below it the suggested class."""
    drawn = suspects[:SHOWN]
    columns = min(_COLUMNS, len(drawn))
    sheet = Sheet(columns * _ACROSS, _TOP + -(-len(drawn) // _COLUMNS) * _DOWN)
    sheet.write(0, _TOP / 2, "label", size=11, colour=WRONG, align="left")
    sheet.write(0.5, _TOP / 2, "suggested", size=11, colour=PLAIN, align="left")
    for place, suspect in enumerate(track(drawn, "picture", len(drawn))):
        line, column = divmod(place, _COLUMNS)
        x, y = column * _ACROSS, _TOP + line * _DOWN
        sheet.show(x, y, split.read(torch.tensor([suspect.index]), THUMBNAIL)[0])
        sheet.write(x + 0.5, y + 1.11, shortened(suspect.label), size=8, colour=WRONG)
        sheet.write(x + 0.5, y + 1.27, shortened(suspect.suggested), size=8, colour=PLAIN)
    sheet.save(out)
