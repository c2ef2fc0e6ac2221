"""The page itself: one file that asks nothing of the network."""

from __future__ import annotations

from cmsf.report.contents import Report


def render(report: Report) -> str:
    """The whole of report.html."""
    raise NotImplementedError(report.version)
