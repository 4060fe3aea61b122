"""Reports: their JSON keeps its names, their page needs nothing else, their text says what was found."""

import io
import re
from html.parser import HTMLParser

import msgspec
import pytest
from rich.console import Console

from samebit.audit.page import render_page
from samebit.audit.text import print_report
from samebit.audit.values import SCHEMA, BlackBoxReport, Check, Difference, Report, WhiteBoxReport
from tests.audit.test_white_box import LosesConvRows

# Who reads reports relies on these; a name that changes or goes needs another SCHEMA.
WHITE_BOX_KEYS = [
    "kind", "schema", "model", "system_fingerprint", "profile", "environment", "seed", "status", "seconds", "observations",
    "mismatches", "positions", "counts", "requests", "guesses", "first_difference", "problems", "scenarios_left", "scenarios",
]  # fmt: skip
BLACK_BOX_KEYS = [
    "kind", "schema", "url", "model", "system_fingerprint", "abilities", "environment", "seed", "status", "seconds",
    "num_requests", "comparisons", "checks",
]  # fmt: skip
SCENARIO_KEYS = ["name", "axes", "counts", "seconds", "cells", "problems"]
CELL_KEYS = [
    "request", "observations", "mismatches", "positions", "runs", "hits", "preempted", "batched", "cached_tokens",
    "guessed", "accepted", "first_difference",
]  # fmt: skip
DIFFERENCE_KEYS = ["request", "position", "layer", "component", "element", "expected", "observed"]


@pytest.fixture(scope="module")
def broken(audit_small):
    return audit_small("off/solo/whole/eager", "cold/solo/whole/eager", make_engine=LosesConvRows)


@pytest.fixture(scope="module")
def black(broken):
    checks = [
        Check(name=name, promise="<claim> & more", verdict=verdict, comparisons=2, detail="'<script>'", reproduce=lines)
        for name, verdict, lines in (
            ("batch", "broken", ['curl -d \'{"prompt": "[bold]<b>"}\'']),
            ("repeat", "holds", []),
            ("seed", "not checkable", []),
        )
    ]
    return BlackBoxReport(
        url="http://x/v1?<a>", model="m", system_fingerprint="", abilities={"seed": False, "echo": True},
        environment=broken.environment, seed=0, status=1, seconds=1.0, num_requests=9, comparisons=6, checks=checks,
    )  # fmt: skip


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.opened = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta", "rect"):
            self.opened.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.opened.pop() == tag


def texts_of(report):
    console = Console(width=100, file=io.StringIO())
    print_report(report, console)
    return console.file.getvalue()


def test_the_json_of_a_white_box_report_keeps_its_names(broken):
    report = msgspec.json.decode(msgspec.json.encode(broken))
    assert SCHEMA == 1
    assert list(report) == WHITE_BOX_KEYS
    assert list(report["scenarios"][0]) == SCENARIO_KEYS
    assert list(report["scenarios"][0]["cells"][0]) == CELL_KEYS
    assert list(report["first_difference"]) == DIFFERENCE_KEYS


def test_the_json_of_a_black_box_report_keeps_its_names(black):
    report = msgspec.json.decode(msgspec.json.encode(black))
    assert list(report) == BLACK_BOX_KEYS
    assert list(report["checks"][0]) == ["name", "promise", "verdict", "comparisons", "detail", "reproduce"]


def test_reports_can_be_read_back(broken, black):
    for report in (broken, black):
        assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_the_page_is_whole_and_fetches_nothing(broken, black):
    for report in (broken, black):
        text = render_page(report)
        page = Page(text)
        assert page.opened == []
        assert not {"script", "link", "img", "iframe", "object", "use", "image"} & set(page.tags)
        assert not {"src", "href", "xlink:href", "srcset", "data"} & {name for name, _ in page.attributes}
        assert not re.search(r"url\(|@import", text)


def test_the_grid_has_a_square_for_each_scenario_and_prompt(broken):
    text = render_page(broken)
    cells = [cell for result in broken.scenarios for cell in result.cells]
    colours = re.findall(r'<rect [^>]*fill="(#\w+)"', text)
    assert len(colours) == len(cells)
    assert len(set(colours)) == 2
    assert colours.count(colours[next(n for n, c in enumerate(cells) if c.mismatches)]) == sum(
        cell.mismatches > 0 for cell in cells
    )


def test_the_page_tells_totals_and_where_they_come_from(broken):
    text = render_page(broken)
    for fact in (f"{broken.observations:,}", broken.system_fingerprint, broken.environment.python, "First difference"):
        assert fact in text


def test_the_text_names_the_first_difference(broken):
    text = texts_of(broken)
    first = broken.first_difference
    assert f"position {first.position}, layer {first.layer}, {first.component}[{first.element}]" in text
    assert f"expected {first.expected}, observed {first.observed}" in text
    assert f"{broken.mismatches:,} mismatches" in text


def test_the_text_of_a_server_shows_the_requests_as_they_are(black):
    text = texts_of(black)
    assert 'curl -d \'{"prompt": "[bold]<b>"}\'' in text
    assert "lacks seed" in text
    assert re.search(r"repeat +│ holds", text)


def test_a_difference_of_the_whole_answer_has_no_position():
    first = Difference(
        request="r", position=-1, layer="", component="text", element=-1, expected="'a'", observed="'[b]'"
    )
    assert msgspec.json.decode(msgspec.json.encode(first), type=Difference) == first
    assert WhiteBoxReport.__struct_config__.tag == "white-box"
