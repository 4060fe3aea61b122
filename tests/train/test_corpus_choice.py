"""Which packages and files a corpus takes: sites alone, no tables, tests or copies, even shares, and whole packages held out."""

import re
from importlib import resources

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from samebit.train import corpus

CODE = "def area(width, height):\n    return width * height\n\n\nclass Shape:\n    def __init__(self, width):\n        self.width = width\n"
TABLE = "SIZES = {\n" + "".join(f'    "{chr(97 + i)}": "size {i}",\n' for i in range(26)) + "}\n"


def numbered(number, lines=20):
    return "\n".join(f"result_{number}_{i} = compute_something_of_its_own({number}, {i})" for i in range(lines)) + "\n"


def install(site, name, files, licence="MIT"):
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\nLicense-Expression: {licence}\n"
    )
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))


def packages(sizes):
    return [
        corpus.Package(f"p{i}", "1", "MIT", tuple(f"{i} {j:8d}".ljust(1000) for j in range(n)))
        for i, n in enumerate(sizes)
    ]


def test_named_sites_are_read_instead_of_the_environment(tmp_path):
    install(tmp_path, "one", {"one/a.py": numbered(1)})
    install(tmp_path, "Other.Name", {"other/a.py": numbered(2)})
    install(tmp_path, "forbidden", {"forbidden/a.py": numbered(3)}, "GPL-3.0-only")
    found = corpus._installed([tmp_path])
    assert set(found) == {corpus.STANDARD_LIBRARY, "one", "other-name"}
    assert found["one"] == ("1.0", "MIT", [tmp_path / "one/a.py"])
    assert "pytest" in corpus._installed([])


@pytest.mark.parametrize(
    "path", ["p/tests/a.py", "p/test/a.py", "test_a.py", "p/conftest.py", "p/_vendor/a.py", "p/a_pb2.py"]
)
def test_tests_vendored_and_protocol_files_are_passed_by(tmp_path, path):
    install(tmp_path, "p", {path: numbered(1), "p/testing/latest.py": numbered(2)})
    assert corpus._installed([tmp_path])["p"][2] == [tmp_path / "p/testing/latest.py"]


@pytest.mark.parametrize(
    "unfit",
    [
        "# This file is auto-generated.\n" + CODE * 3,
        '"""Models.\n\nDO NOT EDIT: made from the schema."""\n' + CODE * 3,
        "# Adapted from a demo, licensed under LGPL 2.1\n" + CODE * 3,
        '"""Free under the GNU Affero General\nPublic License."""\n' + CODE * 3,
        TABLE,
    ],
)
def test_generated_files_tables_and_files_that_name_copyleft_licences_are_nothing(unfit):
    assert corpus.clean(unfit.encode()) is None


@pytest.mark.parametrize(
    "fit", [CODE * 3, CODE * 3 + TABLE[:150] + "\n", '"""Edits what others generated."""\n' + CODE * 3]
)
def test_code_with_a_small_table_or_a_word_about_generation_is_text(fit):
    assert corpus.clean(fit.encode()) == fit


def test_a_file_much_like_one_before_it_is_dropped_and_the_first_stays():
    common = numbered(1, 20)
    first = corpus.Package("a", "1", "MIT", (common, numbered(2)))
    second = corpus.Package("b", "1", "MIT", (common + numbered(3, 10), common + numbered(4, 20), numbered(5)))
    distinct, num_dropped = corpus._without_near_copies([first, second])
    assert distinct[0] == first
    assert distinct[1].texts == second.texts[1:]
    assert num_dropped == 1
    assert corpus._without_near_copies([first, first]) == ([first], 2)


@example([1] * 60 + [40, 30])
@given(st.lists(st.integers(1, 60), min_size=1, max_size=80))
def test_no_package_has_more_than_its_share_and_small_ones_lose_nothing(sizes):
    before = packages(sizes)
    after = corpus._evened(before)
    most = corpus._most_chars([p.num_chars for p in before])
    share = max(corpus._MOST_SHARE, corpus._MOST_EQUAL_SHARES / len(sizes))
    assert most <= share * sum(min(p.num_chars, most) for p in before) + 1 or most == max(p.num_chars for p in before)
    for old, new in zip(before, after, strict=True):
        assert new.num_chars <= max(most, 1000)
        assert new.num_chars > min(old.num_chars, most) - 1000
        assert [text for text in old.texts if text in new.texts] == list(new.texts)
        assert new == old or old.num_chars > most


@pytest.mark.parametrize(("count", "held_out"), [(2, 1), (3, 2), (65, 8), (200, 24), (549, 24), (1000, 30)])
def test_an_eighth_of_few_packages_and_a_small_part_of_many_are_held_out(count, held_out):
    found = corpus._hold_out([corpus.Package(f"p{i}", "1", "MIT", (numbered(i, 3),)) for i in range(count)])
    assert len(found.held_out) == held_out
    assert len(found.train) == count - held_out


def test_packages_of_moderate_size_are_held_out_before_others():
    found = corpus._hold_out(packages([10, 20, 30, 40, 50, 100, 1000, 80, 5000]))
    assert {p.name for p in found.held_out} == {"p5", "p6", "p7"}


def test_the_list_of_packages_pins_several_hundred_in_order():
    lines = resources.files("samebit.train").joinpath("packages.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    names = [pin.partition("==")[0] for pin in pins]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][a-z0-9.]*", pin) for pin in pins)
    assert names == sorted(set(names))
    assert len(names) > 400
    assert "samebit" not in names
