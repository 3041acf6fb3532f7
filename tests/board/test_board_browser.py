"""The board in a real browser."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("selenium")
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from support.board import served
from support.browser import chromium, complaints, look, lowest_contrast, overflow
from support.commandline import short
from support.guards import start
from support.written import round_line, write_run

pytestmark = [pytest.mark.slow, pytest.mark.servers]

PATIENCE = 60  # seconds; what a busy machine may take
HOSTILE = '"><img src=x onerror=window.broken=1><script>window.broken=1<'  # without a slash: it is a folder's name


@pytest.fixture(scope="module")
def browser() -> Iterator[WebDriver]:
    with chromium() as found:
        yield found


def until(browser: WebDriver, holds: Callable[[], Any]) -> Any:
    return WebDriverWait(browser, PATIENCE, poll_frequency=0.1).until(lambda _: holds())


def script(browser: WebDriver, code: str, *arguments: object) -> Any:
    return browser.execute_script(code, *arguments)


def lines(browser: WebDriver) -> list[int]:
    """How many points each curve has."""
    code = "return [...document.querySelectorAll('#curves path[data-points]')].map((p) => +p.dataset.points)"
    found: list[int] = script(browser, code)
    return found


def rows(browser: WebDriver, selector: str = "#runs tbody tr") -> list[str]:
    code = (
        "return [...document.querySelectorAll(arguments[0])].map((row) => row.innerText.replace(/\\s+/g, ' ').trim())"
    )
    found: list[str] = script(browser, code, selector)
    return found


def choose(browser: WebDriver, *names: str) -> None:
    """Have these runs chosen, and no others."""
    browser.find_element(By.ID, "none").click()
    code = """
    const named = [...document.querySelectorAll('#runs label')].find((label) => label.textContent === arguments[0]);
    named.querySelector('input').click();
    """
    for name in names:
        script(browser, code, name)


def test_a_run_in_progress_appears_and_its_curve_grows(browser: WebDriver, tmp_path: Path) -> None:
    look(browser, 1280)
    with served(tmp_path) as address:
        browser.get(address)
        until(browser, lambda: "0 runs" in browser.find_element(By.ID, "counts").text)
        words = [sys.executable, "-m", "fedstill", "run", "fedavg", *short(rounds=100_000, out=tmp_path / "live")]
        process = start(*words)
        try:
            until(browser, lambda: any("live running" in row for row in rows(browser)))
            first = until(browser, lambda: lines(browser) and lines(browser)[0] > 0 and lines(browser))
            until(browser, lambda: lines(browser)[0] > first[0])
        finally:
            process.kill()
            process.wait()
        until(browser, lambda: any("live interrupted" in row for row in rows(browser)))
        assert complaints(browser) == []


def test_two_runs_are_compared_and_the_reader_chooses_what_is_drawn(browser: WebDriver, tmp_path: Path) -> None:
    write_run(tmp_path / "one", [0.2, 0.4, 0.5])
    write_run(tmp_path / "two", [0.3, 0.5, 0.7], method="fedprox", served={"ward 7": (9, 0.25)})
    with served(tmp_path) as address:
        browser.get(address)
        until(browser, lambda: len(rows(browser)) == 2)
        choose(browser, "one", "two")
        until(browser, lambda: lines(browser) == [3, 3])
        until(browser, lambda: rows(browser, "#tables tbody tr"))
        assert rows(browser, "#tables tbody tr")[0].startswith("fedavg 1 50.00 % 50.00 %")
        assert rows(browser, "#tables tbody tr")[2].startswith("fedprox fedavg 1 +20.00 (1/1)")
        assert script(browser, "return document.querySelector('#tables strong').innerText") == "70.00 %"
        browser.find_element(By.CSS_SELECTOR, "#curves .legend button").click()
        until(browser, lambda: lines(browser) == [3])
        browser.find_element(By.CSS_SELECTOR, "#details > details:last-child > summary").click()
        until(browser, lambda: any("ward 7 9 25.0 %" in row for row in rows(browser, "#details .clients tr")))
        script(browser, "document.querySelector('#filter').value = 'fedprox'")
        script(browser, "document.querySelector('#filter').dispatchEvent(new Event('input'))")
        assert len(rows(browser)) == 1
        assert complaints(browser) == []


def test_keys_read_the_values_of_a_curve(browser: WebDriver, tmp_path: Path) -> None:
    write_run(tmp_path / "one", [0.2, 0.4])
    with served(tmp_path) as address:
        browser.get(address)
        until(browser, lambda: lines(browser) == [2])
        chart = browser.find_element(By.CSS_SELECTOR, "#curves svg[role=img]")
        script(browser, "arguments[0].focus()", chart)
        chart.send_keys("\ue010")  # End
        tip = browser.find_element(By.CSS_SELECTOR, "#curves .tip")
        assert "round 2" in tip.text
        assert "40.0 %" in tip.text


def test_a_torn_line_of_metrics_breaks_nothing(browser: WebDriver, tmp_path: Path) -> None:
    path = write_run(tmp_path / "torn", [0.2, 0.4], rounds=9)
    with (path / "metrics.jsonl").open("a") as file, served(tmp_path) as address:
        file.write('{"round": 3, "accu')
        file.flush()
        browser.get(address)
        until(browser, lambda: lines(browser) == [2])
        file.write(round_line(3, 0.5)[len('{"round": 3, "accu') :])
        file.flush()
        until(browser, lambda: lines(browser) == [3])
        assert complaints(browser) == []


def test_hostile_names_settings_and_log_lines_are_text(browser: WebDriver, tmp_path: Path) -> None:
    path = write_run(
        tmp_path / HOSTILE, [0.5], method=HOSTILE, data=HOSTILE, served={HOSTILE.replace('"', ""): (1, 0.5)}
    )
    write_run(tmp_path / "other", [0.5], method="fedavg", data=HOSTILE)
    (path / "log.txt").write_text(f"{HOSTILE}/script>\n")
    with served(tmp_path) as address:
        browser.get(address)
        until(browser, lambda: len(rows(browser)) == 2)
        choose(browser, HOSTILE, "other")
        until(browser, lambda: len(rows(browser, "#tables tbody tr")) >= 2)
        browser.find_element(By.CSS_SELECTOR, "#details summary").click()
        until(browser, lambda: HOSTILE in browser.find_element(By.CSS_SELECTOR, "#details .log").text)
        browser.find_element(By.CSS_SELECTOR, "#details button").click()
        until(browser, lambda: "Not shown" in browser.find_element(By.ID, "details").text)
        assert script(browser, "return document.querySelectorAll('img, body script').length") == 0
        assert script(browser, "return window.broken") is None
        assert complaints(browser) == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_board_fits_the_screen_and_can_be_read(browser: WebDriver, tmp_path: Path, width: int, dark: bool) -> None:
    write_run(tmp_path / ("a-run-of-a-very-long-name-" * 4), [0.2, 0.4, 0.5])
    write_run(tmp_path / "cut", [0.3], method="fedprox", rounds=4)
    look(browser, width, dark=dark)
    with served(tmp_path) as address:
        browser.get(address)
        until(browser, lambda: lines(browser))
        browser.find_element(By.CSS_SELECTOR, "#details summary").click()
        until(browser, lambda: rows(browser, "#details .clients tr") or rows(browser, "#details .clients p"))
        assert overflow(browser) == 0
        ratio, where = lowest_contrast(browser)
        assert ratio >= 4.5, where


def test_a_name_that_was_made_to_point_here_gets_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "secret-run", [0.5])
    with served(tmp_path) as address, chromium("--host-resolver-rules=MAP evil.example 127.0.0.1") as other:
        seen = {}
        for name in ("127.0.0.1", "evil.example"):
            other.get(address.replace("127.0.0.1", name) + "api/runs")
            seen[name] = other.find_element(By.TAG_NAME, "body").text
    assert "secret-run" in seen["127.0.0.1"]
    assert seen["evil.example"] == "this host is not served; see fedstill board --host"
