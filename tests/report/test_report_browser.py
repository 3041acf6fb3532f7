"""The report in a real browser, opened from a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium")
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

import fedstill as library
from support.browser import chromium, complaints, look, lowest_contrast, overflow
from support.commandline import SHORT, fedstill
from support.written import write_run

pytestmark = pytest.mark.slow

METRICS = ("accuracy", "amp", "fm", "wlp")
HOSTILE = '"><img src=x onerror=window.broken=1><script>window.broken=1<'  # without a slash: it is a folder's name


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    """A browser that shows the report of two methods with two seeds and one with regions, in a hostile folder."""
    folder = tmp_path_factory.mktemp("page") / HOSTILE
    for seed in (0, 1):
        for method in ("fedavg", "fedprox"):
            library.run(method, out=folder / f"{method}-{seed}", **(SHORT | {"seed": seed}))
    regions = {"clients": 6, "regions": 2, "pool": 0.2, "server_epochs": 1, "fraction": 0.1}
    library.run("lkd", out=folder / "lkd", **(SHORT | regions))
    out = tmp_path_factory.getbasetemp() / "report.html"
    answer = fedstill("report", folder, "--out", out, "--title", HOSTILE)
    assert answer.code == 0, answer.err
    with chromium() as found:
        look(found, 1280)
        found.get(out.as_uri())
        yield found


def script(browser: WebDriver, code: str) -> Any:
    return browser.execute_script(code)


def hidden_tables(browser: WebDriver) -> list[str]:
    """The tables that have columns out of sight."""
    code = "return [...document.querySelectorAll('.wide:has(table)')].filter((w) => w.scrollWidth > w.clientWidth + 1)"
    found: list[str] = script(browser, f"{code}.map((w) => w.ariaLabel)")
    return found


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 768, 1024, 1280])
def test_the_page_fits_the_screen_and_can_be_read(browser: WebDriver, width: int, dark: bool) -> None:
    look(browser, width, dark=dark)
    script(browser, "for (const each of document.querySelectorAll('details')) each.open = true")
    assert overflow(browser) == 0
    assert hidden_tables(browser) == []
    ratio, where = lowest_contrast(browser)
    assert ratio >= 4.5, where


@pytest.mark.parametrize("width", [390, 1024, 1280])
def test_no_column_is_out_of_sight_with_five_seeds_and_long_numbers(
    browser: WebDriver, tmp_path: Path, width: int
) -> None:
    for method in ("fedavg", "fedprox", "fedgkd-plus", "feddistill-plus"):
        for seed in range(5):
            numbers = {f"{which}_{name}": 0.12345 * seed for which in ("best", "final") for name in METRICS}
            cost = {"bytes_down": 1e10, "bytes_up": 1e10 * seed, "seconds": 12345.6 * seed, "eval_seconds": 0.0}
            classes = {"final_per_class": [0.1 * seed] * 10}
            write_run(
                tmp_path / f"{method}-{seed}", [0.5], method=method, seed=seed, summary={**numbers, **cost, **classes}
            )
    before = browser.current_url
    assert fedstill("report", tmp_path, "--out", tmp_path / "r.html").code == 0
    look(browser, width)
    browser.get((tmp_path / "r.html").as_uri())
    try:
        assert overflow(browser) == 0
        assert hidden_tables(browser) == []
    finally:
        browser.get(before)


def test_a_printed_page_is_light_and_as_wide_as_the_paper(browser: WebDriver) -> None:
    look(browser, 700, dark=True)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": dark})
    try:
        assert overflow(browser) == 0
        assert script(browser, "return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert script(browser, "return getComputedStyle(document.querySelector('.controls')).display") == "none"
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_charts_have_the_colours_of_the_page_in_the_dark(browser: WebDriver) -> None:
    colours = []
    for dark in (False, True):
        look(browser, 1280, dark=dark)
        colours.append(script(browser, "return getComputedStyle(document.querySelector('path.curve')).stroke"))
    assert colours[0] != colours[1]


def test_every_chart_is_drawn_named_and_nothing_was_kept_from_running(browser: WebDriver) -> None:
    charts = script(browser, "return [...document.querySelectorAll('figure svg[role=img]')].map((s) => s.ariaLabel)")
    kinds = script(browser, "return [...document.querySelectorAll('figure')].map((f) => f.dataset.chart)")
    assert set(kinds) == {"curves", "clients", "confusion", "bubbles"}
    assert len(charts) >= len(kinds)
    assert all(charts)
    assert complaints(browser) == []


def test_a_hostile_title_and_folder_are_text(browser: WebDriver) -> None:
    assert browser.find_element(By.TAG_NAME, "h1").text == HOSTILE
    assert script(browser, "return window.broken") is None
    assert script(browser, "return document.querySelectorAll('img').length") == 0


def test_the_reader_chooses_metric_smoothing_axis_and_lines(browser: WebDriver) -> None:
    look(browser, 1280)

    def drawn() -> list[str]:
        paths = "document.querySelectorAll('[data-chart=curves] path[data-points]')"
        found: list[str] = script(browser, f"return [...{paths}].map((path) => path.getAttribute('d'))")
        return found

    def put(selector: str, change: str) -> None:
        code = f"const e = document.querySelector('[data-chart=curves] {selector}'); {change}; "
        script(browser, code + "e.dispatchEvent(new Event('input'))")

    seen = [drawn()]
    assert len(seen[0]) == 3
    for selector, change in (
        ("select", "e.value = 'loss'"),
        ("input[type=range]", "e.value = 0.6"),
        ("input[type=checkbox]", "e.checked = true"),
    ):
        put(selector, change)
        assert drawn() not in seen
        seen.append(drawn())
    browser.find_element(By.CSS_SELECTOR, "[data-chart=curves] .legend button").click()
    assert len(drawn()) == 2


def test_the_values_under_the_pointer_are_shown(browser: WebDriver) -> None:
    look(browser, 1280)
    chart = browser.find_element(By.CSS_SELECTOR, "[data-chart=curves] svg[role=img]")
    script(browser, "document.querySelector('[data-chart=curves]').scrollIntoView()")
    ActionChains(browser).move_to_element(chart).perform()
    tip = browser.find_element(By.CSS_SELECTOR, "[data-chart=curves] .tip").text
    assert "round 2" in tip
    assert "fedprox" in tip


def test_smoothing_is_the_mean_that_tensorboard_draws(browser: WebDriver) -> None:
    """Weighted by powers of the weight, the newest most; with the sum of the weights, not one, below."""
    source = script(browser, "return [...document.querySelectorAll('script[type=module]')].pop().textContent")
    body = source[source.index("export function smoothed") :].split("\n}\n")[0].removeprefix("export ") + "\n}"
    found = script(browser, body + "; return smoothed([4, null, 1, 2], 0.5)")
    expected = [4, None, (1 + 0.5 * 4) / 1.5, (2 + 0.5 * 1 + 0.25 * 4) / 1.75]
    assert found == pytest.approx(expected)
