"""Renders the page: one file that fetches nothing and runs no script but its own.

Texts go through `escape_unprintable` and are escaped by jinja, or by JSON for the page's script, which sets
them as text alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from cmsf.report.compare import comparison_table
from cmsf.report.contents import ImagePool, Report, RunReport
from cmsf.report.plots import INK, PAPER
from cmsf.utils.text import escape_unprintable, shorten

LONGEST_NAME = 120
"""Longer names lose their middle."""
_SCRIPTS = ("basics", "storage", "tables", "thumbs", "walk", "map", "printing", "live", "page")
"""One script when the page is written, in this order; the last one starts it."""


def render(report: Report) -> str:
    """Returns the whole of report.html; the same report gives the same page."""
    script = "".join(_asset(f"{name}.js") for name in _SCRIPTS)
    template = _environment().get_template("template.html")
    return template.render(
        report=report,
        runs=[(number, run, _sections(run)) for number, run in enumerate(report.runs)],
        comparison=comparison_table(report.runs),
        policy=_policy(script),
        style=Markup(_asset("page.css")),
        script=Markup(script),
        data=Markup(_json(_script_data(report.runs))),
    )


def _policy(script: str) -> str:
    """Forbids to fetch anything and to run any script but the one of this hash; plots have styles of their own."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _sections(run: RunReport) -> list[tuple[str, str]]:
    """Returns the ids and headings of the parts that a run has, in the order of the page."""
    plots = [(_slug(heading), heading) for heading in dict.fromkeys(plot.section for plot in run.plots)]
    has_map = run.images is not None and bool(run.images.projections)
    others = (
        ("neighbours", "Neighbours", run.galleries),
        ("map", "Map", has_map),
        ("classes", "Classes", run.classes is not None),
        ("suspects", "Suspect labels", run.suspects),
        ("results", "Evaluation", run.results),
        ("compute", "Compute", run.compute),
        ("settings", "Recipe and environment", run.recipe or run.environment),
    )
    return [*plots, *((name, heading) for name, heading, present in others if present)]


def _slug(heading: str) -> str:
    return "plots-" + re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


def _script_data(runs: Sequence[RunReport]) -> dict[str, Any]:
    """Returns the data of the script: the pools, with equal thumbnails stored once."""
    number_of: dict[str, int] = {}
    pools = [None if run.images is None else _pool(run.images, number_of) for run in runs]
    return {"thumbnails": list(number_of), "runs": pools}


def _pool(pool: ImagePool, number_of: dict[str, int]) -> dict[str, Any]:
    return {
        "thumbnail": [number_of.setdefault(address, len(number_of)) for address in pool.thumbnail],
        "path": [_short(path) for path in pool.path],
        "split": [_short(split) for split in pool.split],
        "label": pool.label,
        "truth": pool.truth,
        "wrong": pool.wrong,
        "classes": [_short(name) for name in pool.classes],
        "near": [[(image, _rounded(similarity)) for image, similarity in near] for near in pool.near],
        "exact": pool.exact,
        "projections": [
            {"name": projection.name, "x": [*map(_rounded, projection.x)], "y": [*map(_rounded, projection.y)]}
            for projection in pool.projections
        ],
    }


def _rounded(value: float) -> float | None:
    """Rounds to five digits; NaN and inf become None, for JSON has neither."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _json(value: Any) -> str:
    """Returns JSON, ASCII alone, that stays inside of its script element whatever its strings hold."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("cmsf.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    environment.filters |= {"drawing": _inline_svg, "short": _short, "percent": _percent, "number": _number}
    environment.filters |= {"slug": _slug, "minutes": _minutes}
    return environment


def _printable(value: Any) -> Any:
    """Escapes marks that turn or hide words, in every text that the template shows."""
    return escape_unprintable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _inline_svg(svg: str, prefix: str) -> Markup:
    """Prepares a plot for the middle of a page: without a file's head, in the page's colours, and with unique ids."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)  # of the whole page; page.css has it
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    return Markup(svg.replace(INK, "var(--ink)").replace(PAPER, "var(--paper)"))


def _short(name: str) -> str:
    return shorten(escape_unprintable(name), LONGEST_NAME)


def _percent(share: float | None) -> str:
    return "–" if share is None or not math.isfinite(share) else f"{100 * share:.1f} %"


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.2f}" if abs(value) >= 1 else f"{value:.3g}"


def _minutes(written: str) -> str:
    """Formats an ISO 8601 time to the minute."""
    return written[:16].replace("T", " ")


def _asset(name: str) -> str:
    return files("cmsf.report").joinpath("assets", name).read_text(encoding="utf-8")
