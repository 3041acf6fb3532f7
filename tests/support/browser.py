"""Debian's Chromium without a window, for tests of pages as a reader sees them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.webdriver import WebDriver

# The lowest ratio of the contrasts of all texts that are shown, as WCAG 2 computes it, and where it is. A background
# that is not opaque is mixed with what is behind it; text in an SVG has its fill for a colour.
_CONTRAST = """
const rgba = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return [n[0], n[1], n[2], n[3] ?? 1]; };
const over = (a, b) => [0, 1, 2].map((i) => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
const behind = (e) => {
  if (!e || e === document) return [255, 255, 255, 1];
  const own = rgba(getComputedStyle(e).backgroundColor);
  return own[3] === 1 ? own : over(own, behind(e.parentElement));
};
const light = (c) => {
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = c.slice(0, 3).map((v) => linear(v / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
let worst = [21, "nothing"];
for (const e of document.querySelectorAll("body *")) {
  const shown = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) && e.checkVisibility();
  if (!shown || ["SCRIPT", "OPTION", "NOSCRIPT"].includes(e.tagName)) continue;
  const style = getComputedStyle(e);
  const back = behind(e), text = over(rgba(e.namespaceURI.endsWith("svg") ? style.fill : style.color), back);
  const [a, b] = [light(text), light(back)];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < worst[0]) worst = [ratio, e.tagName + ": " + e.textContent.slice(0, 40)];
}
return worst;
"""


@contextmanager
def chromium(*words: str) -> Iterator[WebDriver]:
    """A browser, with further words of its command line; the tests are skipped where there is none."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip("there is no chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *words):
        options.add_argument(word)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield browser
    finally:
        browser.quit()


def look(browser: WebDriver, width: int, *, dark: bool = False) -> None:
    """See the page at a width in pixels, on a phone if it is narrow, in the light or the dark."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def overflow(browser: WebDriver) -> int:
    """By how many pixels the page is wider than the screen."""
    found: int = browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
    return max(0, found)


def lowest_contrast(browser: WebDriver) -> tuple[float, str]:
    """The lowest contrast of a text to what is behind it, and which text that is."""
    ratio, where = browser.execute_script(_CONTRAST)
    return ratio, where


def complaints(browser: WebDriver) -> list[str]:
    """What the browser's console says: errors of scripts, and what the page's policy kept from running."""
    entries: list[dict[str, Any]] = browser.get_log("browser")  # type: ignore[no-untyped-call]
    return [entry["message"] for entry in entries]
