"""One browser for all tests of the report page that a process runs."""

import pytest

from tests.zpasses.inspect.browsing import BROWSER, DRIVER, FLAGS

MOST = 25
"""Quick tests of the report page. `make test` draws two other pages, too."""


_NEW_ADDRESS = (
    "openFolds.clear(); openGaps.clear(); document.activeElement?.blur();"
    "history.replaceState(null, '', '#' + arguments[0]); fromAddress(); redraw();"
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    quick = [
        item.nodeid
        for item in items
        if "browser" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("slow")
    ]
    if len(quick) > MOST:
        raise pytest.UsageError(
            f"{len(quick)} tests of the report page in a browser are quick; at most {MOST} may be: "
            f"mark others as slow. They are {', '.join(quick)}"
        )


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(300)
    driver.set_script_timeout(300)
    yield driver
    driver.quit()


@pytest.fixture
def page(browser, tmp_path_factory):
    """Opens an inspection's page. Any error that the browser logs fails the test.

    A page that is open already only gets the new address, if there is one.
    """

    def show(inspection, address="", *others, width=None):
        given = inspection if isinstance(inspection, str) else inspection.html(*others)
        if width is not None:
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        if address and _open.get("page") == given:
            browser.execute_script(_NEW_ADDRESS, address)
            return browser
        path = tmp_path_factory.mktemp("page") / "report.html"
        path.write_text(given, encoding="utf-8")
        browser.get("about:blank")
        browser.get(f"{path.as_uri()}{address and '#' + address}")
        _open["page"] = given
        return browser

    browser.get_log("browser")
    yield show
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert [entry["message"] for entry in browser.get_log("browser")] == []


_open: dict[str, str] = {}
