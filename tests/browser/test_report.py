"""The page in a real Chromium: what a reader sees, clicks and presses."""

import base64
import re
import socket
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("selenium", reason="without Selenium; make browser-test has it")

from report_sample import CLASSES, HOSTILE, WRITTEN, hostile_report, pool, report
from selenium.common import WebDriverException
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from browser.chromium import requested
from cmsf.report.contents import Report, RunReport
from cmsf.utils.text import escape_unprintable, shorten

Opened = Callable[..., Chrome]
NEAR = pool(0, 60, CLASSES).near


def one(driver: Chrome, selector: str) -> WebElement:
    return driver.find_element(By.CSS_SELECTOR, selector)


def texts(driver: Chrome, selector: str) -> list[str]:
    """Of what is visible."""
    return [each.text for each in driver.find_elements(By.CSS_SELECTOR, selector) if each.is_displayed()]


def until(driver: Chrome, true: Callable[[Chrome], Any]) -> Any:
    return WebDriverWait(driver, 60).until(true)


def click(driver: Chrome, selector: str) -> None:
    """Where it stands clear of what is stuck to the top."""
    element = one(driver, selector)
    driver.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
    element.click()


def press(driver: Chrome, *keys: str) -> None:
    ActionChains(driver).send_keys(*keys).perform()


def shown_near(driver: Chrome) -> list[int]:
    """The images that the walk offers next."""
    buttons = driver.find_elements(By.CSS_SELECTOR, "#walk-near button")
    return [int(button.get_attribute("data-image") or -1) for button in buttons]


def walking(driver: Chrome) -> bool:
    return bool(driver.execute_script("return document.getElementById('walk').open"))


def near(image: int) -> list[int]:
    return [other for other, _ in NEAR[image]]


def complaints(driver: Chrome) -> list[str]:
    return [entry["message"] for entry in driver.get_log("browser")]


def overflow(driver: Chrome) -> int:
    return int(driver.execute_script("return document.documentElement.scrollWidth - window.innerWidth"))


BARE = Report((RunReport("bare", "runs/bare", "epoch 0 of 10"),), WRITTEN, "0.0", live=True)


@pytest.mark.parametrize("given", [report(runs=2, live=True), hostile_report(), BARE], ids=["plain", "hostile", "bare"])
def test_the_page_loads_without_complaint_and_asks_nothing_of_the_network(opened: Opened, given: Report) -> None:
    driver = opened(given)
    assert complaints(driver) == []
    assert requested(driver) == [driver.current_url]


def test_the_browser_itself_forbids_the_page_to_fetch_anything(opened: Opened) -> None:
    """A picture and scripts that have found their way onto it reach nobody."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        smuggled = f'<img src="{address}"><script>fetch("{address}")</script><main'
        driver = opened(change=lambda page: page.replace("<main", smuggled))
        asked = driver.execute_async_script(
            "fetch(arguments[0]).then(() => arguments[1]('sent'), () => arguments[1]('refused'))", address
        )
        assert asked == "refused"
        assert sum("Content Security Policy" in complaint for complaint in complaints(driver)) >= 3
        listening.settimeout(1)
        with pytest.raises(TimeoutError):
            listening.accept()


def test_a_click_in_the_gallery_shows_the_neighbours_and_one_may_walk_on_and_back(opened: Opened) -> None:
    driver = opened()
    start = driver.current_url
    click(driver, ".gallery .query .thumb")
    assert walking(driver)
    assert one(driver, "#walk-title").text == "circle, labelled square"
    assert "circle/000.png" in one(driver, "#walk-facts").text
    assert shown_near(driver) == near(0)

    second = near(0)[1]
    click(driver, f'#walk-near [data-image="{second}"]')
    assert shown_near(driver) == near(second)
    third = near(second)[2]
    click(driver, f'#walk-near [data-image="{third}"]')
    assert shown_near(driver) == near(third)
    assert driver.current_url == f"{start}#walk-0-0.{second}.{third}"
    assert len(driver.find_elements(By.CSS_SELECTOR, "#walk-trail button")) == 3

    driver.back()
    until(driver, lambda _: shown_near(driver) == near(second))
    driver.forward()
    until(driver, lambda _: shown_near(driver) == near(third))
    click(driver, "#walk-back")
    until(driver, lambda _: shown_near(driver) == near(second))
    click(driver, "#walk-trail button")
    until(driver, lambda _: shown_near(driver) == near(0))
    click(driver, "#walk-close")
    until(driver, lambda _: not walking(driver))
    assert driver.current_url == start
    assert complaints(driver) == []


def test_an_address_of_a_walk_opens_it_and_one_that_names_nothing_does_not(opened: Opened) -> None:
    driver = opened(at="#walk-0-3.4")
    assert shown_near(driver) == near(4)
    click(driver, "#walk-back")
    until(driver, lambda _: shown_near(driver) == near(3))
    assert not one(driver, "#walk-back").is_enabled()
    click(driver, "#walk-close")
    until(driver, lambda _: not walking(driver))
    for nowhere in ("#walk-0-99999", "#walk-7-0", "#walk-0-", "#walk-__proto__-1"):
        driver = opened(at=nowhere)
        assert not walking(driver)
        assert complaints(driver) == []


def test_one_can_leave_after_more_steps_than_a_browser_keeps(opened: Opened) -> None:
    driver = opened()
    start = driver.current_url
    driver.execute_script("for (let step = 0; step < 70; step += 1) walkTo(0, step % 60)")
    assert shown_near(driver) == near(9)
    assert len(driver.find_elements(By.CSS_SELECTOR, "#walk-trail button")) == 30
    click(driver, "#walk-close")
    until(driver, lambda _: not walking(driver))
    assert driver.current_url == start


def test_wrong_neighbours_have_a_sign_and_not_a_colour_alone(opened: Opened) -> None:
    driver = opened()
    wrong = driver.find_elements(By.CSS_SELECTOR, '.gallery [data-wrong="yes"]')
    assert wrong
    assert all("×" in thumb.text and "another class" in (thumb.get_property("textContent") or "") for thumb in wrong)
    assert not [1 for thumb in driver.find_elements(By.CSS_SELECTOR, '.gallery [data-wrong="no"]') if "×" in thumb.text]
    assert "rank 13" in texts(driver, ".gallery .more")


def test_a_table_is_sorted_by_any_column_both_ways_with_the_unknown_last(opened: Opened) -> None:
    driver = opened()

    def names() -> list[str]:
        return texts(driver, "#run-0-classes-table tbody th")

    def head(column: int) -> str:
        return f"#run-0-classes-table thead th:nth-child({column})"

    assert names() == ["circle", "square", "stripe"]
    for column, first, then in (
        (1, ["circle", "square", "stripe"], ["stripe", "square", "circle"]),
        (2, ["circle", "square", "stripe"], ["stripe", "square", "circle"]),
        (3, ["stripe", "square", "circle"], ["circle", "square", "stripe"]),
        (4, ["circle", "square", "stripe"], ["stripe", "square", "circle"]),
        (5, ["stripe", "square", "circle"], ["square", "stripe", "circle"]),
    ):
        click(driver, f"{head(column)} button")
        assert names() == first
        once = one(driver, head(column)).get_attribute("aria-sort")
        click(driver, f"{head(column)} button")
        assert names() == then
        assert {once, one(driver, head(column)).get_attribute("aria-sort")} == {"ascending", "descending"}
        sorted_by = driver.find_elements(By.CSS_SELECTOR, '#run-0-classes-table th[aria-sort$="scending"]')
        assert len(sorted_by) == 1


def test_tables_are_filtered_by_words_and_by_class(opened: Opened) -> None:
    driver = opened()
    one(driver, "#run-0-classes-filter").send_keys("STR")
    assert texts(driver, "#run-0-classes-table tbody th") == ["stripe"]
    assert one(driver, '[data-counts="run-0-classes-table"]').text == "1 of 3"

    def given_labels() -> list[str]:
        return texts(driver, "#run-0-suspects-table tbody td:nth-child(2)")

    everything = given_labels()
    assert everything == ["square", "circle", "stripe", "square", "stripe", "stripe"]
    one(driver, '#run-0-suspects-class option[value="stripe"]').click()
    assert given_labels() == ["stripe", "stripe", "stripe"]
    one(driver, "#run-0-suspects-filter").send_keys("020")
    assert given_labels() == ["stripe"]
    one(driver, "#run-0-suspects-filter").send_keys("nothing of the kind")
    assert given_labels() == []
    one(driver, "#run-0-suspects-filter").clear()
    one(driver, '#run-0-suspects-class option[value=""]').click()
    assert given_labels() == everything


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("given", [report(runs=2, live=True), hostile_report()], ids=["plain", "hostile"])
def test_nothing_is_wider_than_the_screen(opened: Opened, given: Report, width: int, theme: str) -> None:
    driver = opened(given, width=width, theme=theme)
    driver.execute_script("document.querySelectorAll('details').forEach((each) => { each.open = true })")
    assert overflow(driver) <= 0
    ink, paper = driver.execute_script(
        "const style = getComputedStyle(document.body); return [style.color, style.backgroundColor]"
    )
    assert (brightness(ink) < brightness(paper)) == (theme == "light")
    click(driver, ".gallery .query .thumb")
    assert overflow(driver) <= 0
    walk = one(driver, "#walk").rect
    assert walk["x"] >= 0
    assert walk["x"] + walk["width"] <= width
    assert (
        driver.execute_script(
            "const walk = document.getElementById('walk'); return walk.scrollWidth - walk.clientWidth"
        )
        <= 0
    )


def brightness(colour: str) -> int:
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def test_drawings_are_light_on_dark_when_the_page_is(opened: Opened) -> None:
    driver = opened(theme="dark")
    tick = "return getComputedStyle(document.querySelector('.drawing svg text')).fill"
    assert brightness(driver.execute_script(tick)) > 600


def test_the_theme_is_chosen_by_a_button_and_kept(opened: Opened) -> None:
    driver = opened(theme="light")
    paper = "return getComputedStyle(document.body).backgroundColor"
    as_system = driver.execute_script(paper)
    click(driver, "#theme")
    click(driver, "#theme")
    assert one(driver, "#theme").text == "Theme: dark"
    dark = driver.execute_script(paper)
    assert brightness(dark) < brightness(as_system)
    driver.refresh()
    assert driver.execute_script(paper) == dark
    click(driver, "#theme")
    assert driver.execute_script(paper) == as_system


def test_names_with_markup_stay_text(opened: Opened) -> None:
    driver = opened(hostile_report())
    driver.execute_script("for (const map of maps) map.point(0)")
    for image in range(len(HOSTILE)):
        driver.execute_script("walkTo(0, arguments[0])", image)
        assert one(driver, "#walk-title").text.startswith(shorten(escape_unprintable(HOSTILE[image]), 120)[:20])
    markup = "main :is(script, iframe, object, [onerror], [onclick]), dialog :is(script, [onerror]), img[src='x']"
    assert driver.find_elements(By.CSS_SELECTOR, markup) == []
    assert len(driver.find_elements(By.TAG_NAME, "script")) == 2
    assert driver.title.startswith("2 runs")
    assert complaints(driver) == []  # and no alert: one that is open would have stopped every command


def test_the_keyboard_alone_opens_an_image_walks_on_and_leaves(opened: Opened) -> None:
    driver = opened()
    for _ in range(60):
        press(driver, Keys.TAB)
        if driver.switch_to.active_element.get_attribute("data-image") is not None:
            break
    thumb = driver.switch_to.active_element
    outline = driver.execute_script("return getComputedStyle(arguments[0]).outlineStyle", thumb)
    assert outline == "solid"
    press(driver, Keys.ENTER)
    assert shown_near(driver) == near(0)
    while driver.switch_to.active_element.get_attribute("data-image") is None:
        press(driver, Keys.TAB)
    press(driver, Keys.ENTER)
    assert shown_near(driver) == near(near(0)[0])
    press(driver, Keys.ESCAPE)
    until(driver, lambda _: not walking(driver))
    assert driver.switch_to.active_element == thumb


def test_arrow_keys_move_on_the_map_to_what_lies_on_that_side(opened: Opened) -> None:
    driver = opened()
    canvas = one(driver, ".map-box canvas")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'}); arguments[0].focus()", canvas)

    def current() -> int:
        return int(driver.execute_script("return maps[0].current"))

    def place() -> list[float]:
        found: list[float] = driver.execute_script("return maps[0].onCanvas(maps[0].current)")
        return found

    press(driver, Keys.ARROW_RIGHT)
    for key, axis, sign in ((Keys.ARROW_LEFT, 0, -1), (Keys.ARROW_DOWN, 1, 1), (Keys.ARROW_RIGHT, 0, 1)):
        before, at = current(), place()
        press(driver, key)
        assert current() != before
        assert sign * (place()[axis] - at[axis]) > 0
    assert one(driver, ".tip").is_displayed()
    spoken = driver.execute_script("return document.querySelector('[data-role=spoken]').textContent")
    assert f"/{current():03}.png" in spoken
    image = current()
    press(driver, Keys.ENTER)
    assert shown_near(driver) == near(image)


def test_the_map_is_zoomed_moved_coloured_and_filtered(opened: Opened) -> None:
    driver = opened()
    canvas = one(driver, ".map-box canvas")

    def of_map(what: str) -> Any:
        return driver.execute_script(f"return maps[0].{what}")

    click(driver, '.map [data-role="in"]')
    assert of_map("magnified") == 1.6
    click(driver, '.map [data-role="whole"]')
    assert of_map("magnified") == 1
    driver.execute_script("arguments[0].focus()", canvas)
    ActionChains(driver).move_to_element(canvas).perform()
    driver.execute_script(
        "arguments[0].dispatchEvent(new WheelEvent('wheel', {deltaY: -200, bubbles: true, cancelable: true}))", canvas
    )
    assert of_map("magnified") > 1.5
    before = of_map("centre")
    ActionChains(driver).drag_and_drop_by_offset(canvas, 60, 30).perform()
    after = of_map("centre")
    assert after["x"] < before["x"]
    assert after["y"] > before["y"]
    assert not walking(driver)

    everything = of_map("shown().length")
    click(driver, ".legend-items input")
    assert of_map("shown().length") == everything - 20
    click(driver, '.legend [data-role="none"]')
    assert of_map("shown().length") == 0
    options = [option.text for option in driver.find_elements(By.CSS_SELECTOR, '[data-role="colour"] option')]
    assert options == ["class", "classes of the nearest", "label given", "wrong labels", "part"]
    click(driver, '.legend [data-role="all"]')
    for number, _ in enumerate(options):
        click(driver, f'[data-role="colour"] option[value="{number}"]')
        assert of_map("shown().length") == 60
    click(driver, '[data-role="projection"] option[value="1"]')
    click(driver, '.map [data-role="pictures"]')
    until(driver, lambda _: of_map("pictures.size") == 60)
    assert complaints(driver) == []


def test_a_point_of_the_map_that_is_clicked_is_opened(opened: Opened) -> None:
    driver = opened()
    canvas = one(driver, ".map-box canvas")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", canvas)
    x, y = driver.execute_script("return maps[0].onCanvas(7)")
    width, height = canvas.size["width"], canvas.size["height"]
    ActionChains(driver).move_to_element_with_offset(canvas, round(x - width / 2), round(y - height / 2)).perform()
    hovered = driver.execute_script("return maps[0].current")
    assert one(driver, ".tip img").is_displayed()
    ActionChains(driver).click().perform()
    assert shown_near(driver) == near(hovered)


def test_several_runs_are_switched_between_and_an_address_finds_its_run(opened: Opened) -> None:
    driver = opened(report(runs=3))
    assert [run.get_attribute("id") for run in driver.find_elements(By.CSS_SELECTOR, "article:not([hidden])")] == [
        "run-0"
    ]
    driver.execute_script("document.getElementById('switch-0').focus()")
    press(driver, Keys.ARROW_RIGHT)
    assert texts(driver, "article h2") == ["run 2"]
    assert one(driver, "#comparison").is_displayed()
    assert one(driver, '#comparison [data-plot="compute"] svg').is_displayed()
    driver = opened(report(runs=3), at="#run-2-suspects")
    assert texts(driver, "article h2") == ["run 3"]
    assert abs(one(driver, "#run-2-suspects").rect["y"] - driver.execute_script("return scrollY")) < 450


def test_a_page_that_is_loaded_again_comes_back_as_it_was_left(opened: Opened) -> None:
    driver = opened(report(runs=2))
    click(driver, "#switch label:nth-of-type(2)")
    click(driver, "#run-1-recipe summary")
    one(driver, "#run-1-classes-filter").send_keys("s")
    click(driver, "#run-1-classes-table th:nth-child(3) button")
    click(driver, '#run-1-map [data-role="in"]')
    driver.execute_script("window.scrollTo(0, 700)")
    driver.refresh()
    assert texts(driver, "article h2") == ["run 2"]
    assert driver.execute_script("return document.getElementById('run-1-recipe').open")
    assert texts(driver, "#run-1-classes-table tbody th") == ["stripe", "square"]
    assert driver.execute_script("return maps[1].magnified") == 1.6
    assert driver.execute_script("return scrollY") == 700
    assert complaints(driver) == []


def test_a_live_page_looks_for_a_newer_one_until_it_is_paused(opened: Opened) -> None:
    driver = opened(report(live=True), change=lambda page: page.replace('data-every="15"', 'data-every="1"'))

    def in_page(script: str) -> Any:
        """As soon as it is not just being loaded again."""
        waiting = WebDriverWait(driver, 60, ignored_exceptions=[WebDriverException])
        return waiting.until(lambda _: driver.execute_script(script))

    in_page("window.stayed = true; return true")
    in_page("return !window.stayed && document.readyState === 'complete'")
    in_page("document.getElementById('pause').click(); window.stayed = true; return true")
    assert driver.execute_async_script("setTimeout(() => arguments[0](window.stayed), 4000)")
    assert "does not look" in one(driver, "#live").text
    driver.refresh()
    assert "does not look" in one(driver, "#live").text
    click(driver, "#pause")
    in_page("return document.getElementById('pause').ariaPressed === 'false'")


def test_a_live_page_does_not_tear_away_who_is_walking(opened: Opened) -> None:
    driver = opened(
        report(live=True), at="#walk-0-1", change=lambda page: page.replace('data-every="15"', 'data-every="1"')
    )
    stayed = "window.stayed = true; setTimeout(() => arguments[0](window.stayed), 4000)"
    assert driver.execute_async_script(stayed)


def test_on_paper_everything_is_open_and_afterwards_as_it_was(opened: Opened) -> None:
    driver = opened(report(runs=2), theme="dark")
    driver.execute_script(
        """window.addEventListener("beforeprint", () => {
             const open = (selector) => document.querySelectorAll(selector).length;
             window.onPaper = [open("details:not([open])"), open("article[hidden]")];
           })"""
    )
    written = driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True, "preferCSSPageSize": True})["data"]
    document = base64.b64decode(written)
    assert document.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", document)) >= 4
    assert driver.execute_script("return window.onPaper") == [0, 0]
    assert driver.execute_script("return document.querySelectorAll('article[hidden]').length") == 1
    assert driver.execute_script("return document.querySelectorAll('details[open]').length") == 0


def test_every_control_and_picture_has_a_name(opened: Opened) -> None:
    driver = opened(report(runs=2, live=True))
    nodes = driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    told = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    named = {
        "button",
        "checkbox",
        "radio",
        "combobox",
        "searchbox",
        "link",
        "application",
        "image",
        "region",
        "navigation",
    }
    assert len([1 for role, _ in told if role in named]) > 50
    assert [role for role, name in told if role in named and not name] == []
    levels = driver.execute_script(
        "return [...document.querySelectorAll('h1, h2, h3, h4')].map((each) => +each.tagName[1])"
    )
    assert all(after - before <= 1 for before, after in pairwise(levels))
