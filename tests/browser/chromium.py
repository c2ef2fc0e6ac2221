"""Chromium without a window, steered by Selenium; both are Debian's packages chromium and chromium-driver."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

_PATIENCE = 120
"""Seconds: on a machine with other work a page may take long."""
_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --window-size=1280,900"
)


def missing() -> list[str]:
    """What is not installed of the programs that this needs."""
    return [program for program in ("chromium", "chromedriver") if shutil.which(program) is None]


@contextmanager
def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*_FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(str(shutil.which("chromedriver"))))
    try:
        driver.set_page_load_timeout(_PATIENCE)
        driver.set_script_timeout(_PATIENCE)
        yield driver
    finally:
        driver.quit()


def requested(driver: webdriver.Chrome) -> list[str]:
    """The addresses that were asked for since the last time, pictures in the page itself left out."""
    told: list[dict[str, Any]] = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    addresses = [one["params"]["request"]["url"] for one in told if one["method"] == "Network.requestWillBeSent"]
    return [address for address in addresses if not address.startswith("data:")]


def be_wide(driver: webdriver.Chrome, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def prefer(driver: webdriver.Chrome, theme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": theme}, {"name": "prefers-reduced-motion", "value": "reduce"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
