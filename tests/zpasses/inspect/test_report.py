"""Tests of report.html: nothing from a dump is executed, and colors are readable."""

import json
import re
from pathlib import Path

from tests.zpasses.inspect.browsing import ESCAPED, HOSTILE, all_of, needs_browser, one
from tests.zpasses.inspect.graphs import hostile_dump
from zpasses.inspect import report


def test_data_cannot_end_its_html_element():
    text = hostile_dump(HOSTILE).html()
    element = r'<script type="application/json" id="data">(.*?)</script>'
    data = re.search(element, text, re.DOTALL)[1]
    assert not set("<>&") & set(data)
    options = {ESCAPED: ESCAPED, "limit": "inf"}  # JSON in browsers has no infinity
    assert json.loads(data)["compiles"][0]["options"] == options
    assert text.count("<script") == 2
    # The namespace of SVG is no address.
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text.replace(data, ""))


@needs_browser
def test_hostile_names_are_shown_as_text_and_never_run(page):
    browser = page(hostile_dump(HOSTILE))
    for tab in ("overview", "diff", "memory", "timeline", "collectives", "listing", "source"):
        browser.execute_script(f"go({{graph: 'joint', step: 1, tab: '{tab}', node: 1}})")
        assert '<img src=x onerror="window.hacked=1">' in one(browser, ".detail h2").text
        assert browser.execute_script(
            "return window.hacked === undefined && document.querySelectorAll('img').length === 0"
        )
        assert len(all_of(browser, "script")) == 2
    assert HOSTILE[:20] in one(browser, ".nav").text


def luminance(color):
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def mixed(color, ground, share):
    pairs = [(int(color[at : at + 2], 16), int(ground[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in pairs)


def themes():
    """Name of a color -> the color, of the light page and of the dark one."""
    style = (Path(report.__file__).parent / "style.css").read_text()
    found = re.findall(r"--([a-z-]+): light-dark\((#\w{6}), (#\w{6})\)", style)
    return [{name: pair[theme] for name, *pair in found} for theme in (0, 1)]


def test_exposed_times_are_readable_on_every_ground():
    for color in themes():
        for ground in ("page", "panel", "raised"):
            assert contrast(color["exposed-text"], color[ground]) >= 4.5
            bar = mixed(color["exposed"], color[ground], 0.2)  # the bar behind the figure
            assert contrast(color["exposed-text"], bar) >= 4.5
        assert contrast(color["on-fill"], color["exposed"]) >= 4.5


CHANGES = ("inserted", "removed", "moved", "rewired", "retagged", "retyped")


def test_changes_are_readable_on_their_ground():
    for theme, color in enumerate(themes()):
        for change in CHANGES:
            for ground in ("page", "panel", "raised"):
                chip = mixed(color[change], color[ground], 0.14)
                assert contrast(color[change], chip) >= 4.5, (theme, change, ground)
            cell = mixed(color[change], color["panel"], 0.13)
            for text in ("text", "muted", "compute-text", "gather-text"):
                assert contrast(color[text], cell) >= 4.5, (theme, change, text)
        chosen = mixed(color["accent"], color["panel"], 0.16)
        for text in ("text", "muted", "compute-text", "gather-text"):
            assert contrast(color[text], chosen) >= 4.5, (theme, text)
