"""What tests of the report page do in a browser. conftest.py has the browser itself."""

import importlib.util
import shutil
import time

import pytest

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    BROWSER is None or DRIVER is None or importlib.util.find_spec("selenium") is None,
    reason="needs Chromium and its driver (Debian: apt install chromium chromium-driver) and selenium (pip install -e '.[dev]')",  # noqa: E501
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,800",
)
HOSTILE = '<img src=x onerror="window.hacked=1"></script><script>window.hacked=1</script>${window.hacked=1}\'"\u202e'  # noqa: E501

ESCAPED = HOSTILE.replace("\u202e", r"\u202e")


def all_of(browser, selector):
    return browser.find_elements("css selector", selector)


def texts(browser, selector):
    return [each.text for each in all_of(browser, selector)]


def one(browser, selector, text=None):
    """The first visible element with this text. Waits for it up to 60 seconds."""
    from selenium.common.exceptions import StaleElementReferenceException

    deadline = time.monotonic() + 60
    while True:
        try:
            found = [
                each
                for each in all_of(browser, selector)
                if each.is_displayed() and (text is None or text in each.text)
            ]
        except StaleElementReferenceException:  # the page draws a list again
            found = []
        if found:
            return found[0]
        assert time.monotonic() < deadline, f"no {selector} with {text!r}"
        time.sleep(0.05)


def wait_for(browser, script, *arguments):
    deadline = time.monotonic() + 60
    while not (value := browser.execute_script(f"return {script}", *arguments)):
        assert time.monotonic() < deadline, script
        time.sleep(0.05)
    return value


def keys(browser, *pressed):
    from selenium.webdriver import ActionChains, Keys

    chain_ = ActionChains(browser)
    for key in pressed:
        chain_.send_keys(getattr(Keys, key) if len(key) > 1 else key)
    chain_.perform()
