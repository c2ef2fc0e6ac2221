"""What a run has cost, in words for the page."""

from __future__ import annotations

from cmsf.runs.cost import Spent
from cmsf.utils.text import format_duration


def cost(bill: Spent) -> tuple[tuple[str, str], ...]:
    """Passes through the backbone, multiply-adds by the paper's equation, and time."""
    lines = [
        ("epochs", f"{bill.epochs} of {bill.recipe.epochs}"),
        ("training images", f"{bill.images:,}"),
        ("forward passes", f"{bill.compute.forward_passes:,.0f}"),
        ("backward passes", f"{bill.compute.backward_passes:,.0f}"),
        ("multiply-adds, a backward pass counted as two", f"{bill.compute.flops:.3g}"),
    ]
    if bill.clean_views is not None:
        lines.append(("of the offline cache beside them", f"{bill.clean_views.flops:.3g}"))
    if bill.seconds is not None:
        lines.append(("time of training", format_duration(bill.seconds)))
    return tuple(lines)
