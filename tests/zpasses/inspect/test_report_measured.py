"""The page with a trace: measured times stand beside the predicted ones."""

from tests.zpasses.inspect.browsing import (
    all_of,
    needs_browser,
    one,
)
from tests.zpasses.inspect.graphs import small_dump
from tests.zpasses.inspect.test_measured import gloo_run
from tests.zpasses.inspect.traces import memory, write
from zpasses.inspect import Inspection


@needs_browser
def test_measured_times_stand_beside_the_predicted_ones(browser, tmp_path):
    trace = write(tmp_path / "trace.json", [*gloo_run(), memory(500, 1 << 20)])
    path = tmp_path / "report.html"
    pieces = Inspection(small_dump()).html_pieces(trace=trace)
    path.write_text("".join(pieces), encoding="utf-8")
    browser.get(f"{path.as_uri()}#0/forward/2/collectives/")
    headings = [each.text for each in all_of(browser, ".grid-head [role=columnheader]")]
    assert headings[-2:] == ["measured", "its exposed"]
    assert [each.text for each in all_of(browser, ".grid-row .col-measured")] == [
        "140 µs",
        "230 µs",
    ]
    one(browser, ".grid-row").click()
    assert "140 µs, 130 µs exposed" in one(browser, "dl.boxed").text
    browser.get(f"{path.as_uri()}#0/forward/2/overview/")
    assert "Measured in 1 run: 1 ms" in one(browser, ".measured").text
    assert "Memory rises by 1 MiB" in one(browser, ".measured").text
    joined = one(browser, ".joined").text
    assert "100.0% of the measured time of collectives is that of nodes" in joined
    browser.get(f"{path.as_uri()}#0/forward/2/timeline/")
    assert "1 ms measured in 1 run" in one(browser, ".measured-split").text
    (row,) = [each.text for each in all_of(browser, ".measured-modules tbody tr")[:1]]
    assert "140 µs" in one(browser, ".measured-modules").text, row
    assert "100.0% of" in one(browser, ".joined").text
    browser.get(f"{path.as_uri()}#0/forward/0/collectives/")
    assert one(browser, ".grid-row")
    assert not all_of(browser, ".grid-row .col-measured")
    assert [entry["message"] for entry in browser.get_log("browser")] == []
