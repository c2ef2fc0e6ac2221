"""The page as it is written, without a browser; what it does in one is in tests/browser."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_sample import CLASSES, HOSTILE, hostile_report, pool, report

from cmsf.report.contents import ImagePool, Report, RunReport
from cmsf.report.page import render
from cmsf.utils.text import escape_unprintable, shorten

_LOADS = {"src", "srcset", "href", "xlink:href", "action", "formaction", "data", "poster", "background", "ping"}


class Elements(HTMLParser):
    """Every element of a page, with its attributes, and the texts of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def data_of(page: str) -> Any:
    return json.loads(Elements(page).scripts[0])


def test_the_same_report_gives_the_same_page() -> None:
    assert render(report(runs=2)) == render(report(runs=2))


def test_every_part_of_a_run_is_on_the_page_and_can_be_jumped_to() -> None:
    elements = Elements(render(report()))
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [link["href"] for link in elements.of("a")]
    assert len(links) == 10
    assert {link.removeprefix("#") for link in links if link} <= set(ids)


def test_what_a_run_does_not_have_is_not_on_its_page() -> None:
    page = render(Report((RunReport("bare", "runs/bare", "epoch 0 of 10", notes=("nothing yet",)),), "", "0.0"))
    elements = Elements(page)
    assert not [1 for tag in ("section", "table", "canvas", "figure") if elements.of(tag)]
    assert "nothing yet" in page
    assert data_of(page) == {"thumbnails": [], "runs": [None]}


@pytest.mark.parametrize("given", [report(runs=2, live=True), hostile_report()], ids=["plain", "hostile"])
def test_nothing_on_the_page_is_fetched(given: Report) -> None:
    elements = Elements(render(given))
    addresses = [
        value for _, attributes in elements.found for key, value in attributes.items() if key in _LOADS and value
    ]
    assert addresses
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert len(elements.of("script")) == 2
    style = re.sub(r"/\*.*?\*/", "", render(given).split("<style>")[1].split("</style>")[0], flags=re.DOTALL)
    assert "@import" not in style
    assert "url(" not in style
    [policy] = [meta["content"] for meta in elements.of("meta") if "http-equiv" in meta]
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "script-src 'sha256-" in policy


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_name_is_text_whatever_it_holds(name: str) -> None:
    """As many elements and attributes as of a harmless name, and no mark that turns or hides words."""
    harmless, hostile = (Elements(render(report(classes=(given, *CLASSES[1:])))) for given in ("harmless", name))
    assert [(tag, sorted(attributes)) for tag, attributes in hostile.found] == [
        (tag, sorted(attributes)) for tag, attributes in harmless.found
    ]
    assert len(hostile.scripts) == len(harmless.scripts) == 2
    page = render(report(classes=(name, *CLASSES[1:])))
    page.encode()
    assert not set(page) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029")
    assert data_of(page)["runs"][0]["classes"][0] == shorten(escape_unprintable(name), 120)


def test_all_of_a_report_may_be_hostile() -> None:
    page = render(hostile_report())
    page.encode()
    assert "alert(1)</script>" not in page
    assert "<img src=x" not in page
    assert "49" not in re.findall(r"<li>(.*?)\{% raw", page)


def test_an_image_in_several_runs_is_stored_once() -> None:
    one, three = (data_of(render(report(runs=runs))) for runs in (1, 3))
    assert one["thumbnails"] == three["thumbnails"]
    assert len(set(one["thumbnails"])) == len(one["thumbnails"])
    addresses = [three["thumbnails"][number] for number in three["runs"][2]["thumbnail"]]
    assert addresses == list(pool(2, 60, CLASSES).thumbnail)


def test_two_thousand_images_fit_into_ten_megabytes() -> None:
    """At 2.5 kB each, what a photograph of 96 pixels takes as a JPEG of quality 70."""
    small = pool(0, 2000, CLASSES)
    photographs = tuple(f"data:image/jpeg;base64,{number:>2500}" for number in range(2000))
    run = RunReport("large", "runs/large", "complete", images=ImagePool(**(vars(small) | {"thumbnail": photographs})))
    assert len(render(Report((run,), "", "0.0")).encode()) < 10_000_000


def test_a_number_that_is_none_does_not_break_the_page() -> None:
    strange = pool(0, 3, CLASSES)
    near = (((1, float("nan")),), (), ())
    run = RunReport("nan", "runs/nan", "complete", images=ImagePool(**(vars(strange) | {"near": near})))
    assert data_of(render(Report((run,), "", "0.0")))["runs"][0]["near"] == [[[1, None]], [], []]


def test_columns_of_different_lengths_make_no_pool() -> None:
    with pytest.raises(ValueError, match="different lengths: \\[2, 3\\]"):
        ImagePool(**(vars(pool(0, 3, CLASSES)) | {"label": (0, 0)}))


def test_drawings_take_the_colours_of_the_page() -> None:
    page = render(report())
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(drawings) == 2
    assert all("var(--ink)" in one and "#24292f" not in one and "<style" not in one for one in drawings)
    assert all("<text" in one for one in drawings)


def test_several_runs_are_compared_line_by_line() -> None:
    page = render(report(runs=2))
    table = page.split('<table class="comparison">')[1].split("</table>")[0]
    words = re.sub(r"<[^>]+>", " ", table).split()
    assert words[:4] == ["run", "1", "run", "2"]
    line = " ".join(words)
    assert "20-nn 80.0 % untrained 40.0 % 81.0 % untrained 40.0 %" in line
    assert "1-nn 79.00 77.50 to 80.50 80.00 77.50 to 80.50" in line
    assert 'class="comparison"' not in render(report(runs=1))


def test_changed_values_of_the_recipe_stand_first() -> None:
    page = render(report())
    assert page.index(">epochs<") < page.index(">batch_size<")
    assert "1 of 2 values changed" in page


def test_a_page_that_is_complete_does_not_reload() -> None:
    assert 'id="live"' not in render(report())
    assert 'data-every="15"' in render(report(live=True))


def test_every_asset_is_part_of_the_package() -> None:
    """What is beside page.py in the sources is what hatch puts into the wheel: nothing there is ignored by git."""
    import cmsf.report.page as page

    assets = Path(page.__file__).parent / "assets"
    assert {file.suffix for file in assets.iterdir()} == {".html", ".css", ".js"}
    assert {file.stem for file in assets.glob("*.js")} == set(page._SCRIPTS)
