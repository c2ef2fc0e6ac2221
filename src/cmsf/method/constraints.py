"""Constraints: which rows of the bank are related to a query. Each is a small pure function of two Rows.

Where a query lacks the label or companion that a constraint needs, C_i relaxes to the whole bank.
"""

from __future__ import annotations

from dataclasses import dataclass

from cmsf.method.rows import Rows
from cmsf.method.search import Candidates, Constraint, EveryRow, Relaxed, RowsOfLabel, ShortList
from cmsf.method.topk import OwnRow, nearest_vectors
from cmsf.utils.constants import UNKNOWN

__all__ = ["Constraint", "NearCompanion", "SameLabel", "Unconstrained"]


@dataclass(frozen=True)
class Unconstrained(Constraint):
    """C_i = M: mean shift, and with k = 1 BYOL."""

    def __call__(self, query: Rows, rows: Rows) -> Candidates:
        return EveryRow()


@dataclass(frozen=True)
class SameLabel(Constraint):
    """C_i = the rows with the query's label (Sec. 2.2); a query without a label relaxes (Sec. 2.3)."""

    def __call__(self, query: Rows, rows: Rows) -> Candidates:
        if query.label is None or rows.label is None:
            raise ValueError("SameLabel needs labels on queries and bank; give Rows(..., label=...), UNKNOWN for none")
        known = query.label != UNKNOWN
        return RowsOfLabel() if known.all() else Relaxed(known, RowsOfLabel())


@dataclass(frozen=True)
class NearCompanion(Constraint):
    """C_i = the rows whose companions are the k nearest to the query's own companion (Sec. 2.1; k' in the paper).

    Companions are compared with companions, both from the older target. A query without one relaxes; a row
    without one is in nobody's neighbourhood. k = None admits every row that has a companion.
    """

    k: int | None = 5

    def __call__(self, query: Rows, rows: Rows) -> Candidates:
        if query.companion is None or rows.companion is None:
            raise ValueError(
                "NearCompanion needs companions on queries and bank; give a row of NaN where there is none"
            )
        known = query.has_companion
        if not known.any():
            return EveryRow()
        having = query[known]
        assert having.companion is not None
        if self.k is None:
            near: Candidates = EveryRow(with_companion=True)
        else:
            own, allowed = OwnRow(rows.positions_of(having.index)), rows.exists & rows.has_companion
            near = ShortList(nearest_vectors(having.companion, rows.companion, allowed, rows.index, self.k, own))
        return near if known.all() else Relaxed(known, near)
