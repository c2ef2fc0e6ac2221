from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from report_sample import report

from cmsf.report.contents import Report
from cmsf.report.page import render

if TYPE_CHECKING:
    from selenium.webdriver import Chrome


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    from browser.chromium import chromium, missing

    if absent := missing():
        pytest.skip(f"without {' and '.join(absent)}; make browser installs them")
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def opened(driver: Chrome, tmp_path: Path) -> Callable[..., Chrome]:
    """Opens the page of a report as a user does, from the disk, each at a new address, of which nothing is kept."""
    from browser.chromium import be_wide, prefer

    def open_page(
        given: Report | None = None,
        *,
        width: int = 1280,
        theme: str = "light",
        at: str = "",
        change: Callable[[str], str] = str,
    ) -> Chrome:
        page = tmp_path / "report.html"
        page.write_text(change(render(given or report())), encoding="utf-8")
        driver.get("about:blank")  # or a new # in the address would not load the page
        driver.get_log("performance")
        driver.get_log("browser")
        be_wide(driver, width)
        prefer(driver, theme)
        driver.get(page.as_uri() + at)
        return driver

    return open_page
