"""What must hold for every file in the repository."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120

# In pieces, so that this file does not hold what it looks for.
FORBIDDEN = {
    "an absolute path of a machine": r"(?<![\w.~-])/(work|root|home|Users|mnt)/[\w.-]+",
    "a package registry": r"py[p]i\.org|pythonhoste[d]\.org|download\.pytorc[h]\.org|npmj[s]\.(org|com)|"
    r"debia[n]\.org|--(extra-)?index-ur[l]",
}


def tracked_files():
    """Files in git; without git (an unpacked archive) everything but hidden folders."""
    try:
        names = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.split("\0")
        return [ROOT / name for name in names if name and (ROOT / name).is_file()]
    except (OSError, subprocess.CalledProcessError):
        paths = (path for path in ROOT.rglob("*") if path.is_file())
        return [p for p in paths if not any(part[0] == "." for part in p.relative_to(ROOT).parts)]


def text_of(path):
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def functions(tree):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def test_there_is_something_to_check():
    assert len(SOURCES) > 5
    assert ROOT / "pyproject.toml" in tracked_files()


def test_no_source_file_is_longer_than_400_lines():
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in SOURCES}
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_functions_fit_on_a_screen():
    long = {}
    for path in SOURCES:
        limit = MAX_KERNEL_LINES if "kernels" in path.parts else MAX_FUNCTION_LINES
        for node in functions(ast.parse(path.read_text())):
            # A signature that declares a command's flags or a kernel's sizes is a table, not code.
            lines = node.end_lineno - node.body[0].lineno + 1
            if lines > limit:
                long[f"{path.relative_to(ROOT)}:{node.name}"] = lines
    assert long == {}


def test_every_module_says_what_it_does():
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []


def test_package_files_below_the_root_hold_no_code_but_the_entry_point():
    source = ROOT / "src" / "samebit"
    inits = sorted(set(source.glob("*/**/__init__.py")) - {source / "cli" / "__init__.py"})
    assert inits
    for path in inits:
        body = ast.parse(path.read_text()).body
        assert [node for node in body if not isinstance(node, ast.Expr)] == [], path


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what):
    found = {}
    for path in tracked_files():
        for number, line in enumerate(text_of(path).splitlines(), start=1):
            if re.search(FORBIDDEN[what], line):
                found[f"{path.relative_to(ROOT)}:{number}"] = line.strip()[:100]
    assert found == {}


def test_the_search_for_forbidden_text_finds_it():
    path, registry = FORBIDDEN.values()
    assert re.search(path, "see " + "/ro" + "ot/x.txt")
    assert not re.search(path, "GET /v1/home/x")
    assert re.search(registry, "https://py" + "pi.org/simple")


def test_every_lint_exception_has_its_reason():
    bare = {}
    for path in [*SOURCES, *(ROOT / "tests").rglob("*.py")]:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            found = re.search(r"#\s*(noqa(: [A-Z0-9, ]+)?|type: ignore(\[[^]]+\])?)(.*)$", line)
            if found and len(found[4].strip(" -#")) < 8 and path != Path(__file__):
                bare[f"{path.relative_to(ROOT)}:{number}"] = line.strip()
    assert bare == {}
