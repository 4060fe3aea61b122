"""A corpus of Python source from permissively licensed installed packages and the standard library.

The same installation gives the same corpus: everything that is chosen is chosen by hashes of names and texts. Generated files,
tables and near copies are left out, no package has much more than its share, and whole packages are held out. Knows files and
metadata; knows no tokens.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samebit.core.errors import ConfigError

STANDARD_LIBRARY = "python-stdlib"

_PERMISSIVE = re.compile(
    r"\b(MIT(-0|-CMU)?|BSD|Apache|PSF|Python Software Foundation|ISC|Zlib|Unlicense|0BSD|HPND|CC0|Public Domain)\b",
    re.IGNORECASE,
)
_OTHER = re.compile(
    r"\b([AL]?GPL|GNU|MPL|Mozilla|EPL|EUPL|CeCILL|SSPL|BUSL|Commercial|Proprietary|NVIDIA)", re.IGNORECASE
)
# Vendored copies have licences of their own; generated tables and the packages' own tests teach little.
_SKIPPED = re.compile(
    r"(^|/)(_?vendor(ed)?|_vendor|extern|third_party|3rdparty|pydoc_data|__pycache__|site-packages|dist-packages)(/|$)|"
    r"_pb2(_grpc)?\.py$|/encodings/|/locales?/|pygments/lexers/_|unicode.?data|emoji|entities\.py$|_tables?\.py$|"
    r"(^|/)_?tests?/|(^|/)(test_[^/]*|conftest)\.py$",
    re.IGNORECASE,
)
_GENERATED = re.compile(
    r"auto-?generated|@generated|file (is |was )?(automatically )?generated|generated (automatically|by the |from )|do(n't| not) edit",
    re.IGNORECASE,
)
# Packages hold single files under licences that their metadata doesn't name.
_NAMES_COPYLEFT = re.compile(r"GNU (\w+ )?General\s+Public|\b[AL]?GPL|Mozilla\s+Public", re.IGNORECASE)
_HEAD_CHARS = (800, 3000)
# A line of a table: it begins with a value or a bracket and ends an entry.
_DATA_LINE = re.compile(r"""\s*[bru]?["'\d(\[{-].*["'\d)\]}](,|: ?[\[({]?)?$""")
_DATA_SHARE = 0.5
_FILE_BYTES = (200, 200_000)
_READ_CHARS = 14_000_000
# A package's part of all text: one in fifty where there are hundreds, a few times its equal share where there are few.
_MOST_SHARE = 0.02
_MOST_EQUAL_SHARES = 4
_HELD_OUT_SHARE = 0.03
_MANY_HELD_OUT = 24
_HELD_OUT_CHARS = (60_000, 1_200_000)
_LONG_LINE = 30
# The part of a file's long lines that others have too: strict towards held-out files, lenient among files to train on.
_LIKE_HELD_OUT = 0.4
_LIKE_OTHERS = 0.6


@dataclass(frozen=True, slots=True)
class Package:
    """An installed distribution, its licence as its metadata states it, and its cleaned texts in the order of their paths."""

    name: str
    version: str
    licence: str
    texts: tuple[str, ...]

    @property
    def num_chars(self) -> int:
        """Characters of all texts."""
        return sum(map(len, self.texts))


@dataclass(frozen=True, slots=True)
class Corpus:
    """Packages to train on and packages held out, each sorted by name."""

    train: tuple[Package, ...]
    held_out: tuple[Package, ...]
    num_near_copies: int

    def manifest(self) -> dict[str, object]:
        """What the corpus is made of, as JSON; `digest` tells two corpora apart."""
        digest = hashlib.sha256()
        for package in (*self.train, *self.held_out):
            for text in (package.name, *package.texts):
                digest.update(hashlib.sha256(text.encode()).digest())
        return {
            "digest": digest.hexdigest(),
            "near_copies_dropped": self.num_near_copies,
            "packages": [_entry(p, is_held_out=False) for p in self.train],
            "held_out": [_entry(p, is_held_out=True) for p in self.held_out],
        }


def collect(sites: Sequence[Path] = (), only: Iterable[str] = (), *, max_files: int | None = None) -> Corpus:
    """The corpus of the standard library and of `sites`, site-packages folders; of this interpreter's environment without any.

    `only` keeps packages of these (normalised) names; `max_files` cuts each package. Raises ConfigError if fewer than two
    packages with usable text are left, since whole packages must be held out.
    """
    wanted = {_normalised(name) for name in only}
    seen: set[bytes] = set()
    packages = []
    for name, (version, licence, files) in sorted(_installed(sites).items()):
        if not wanted or name in wanted:
            texts = _texts(files, seen, max_files)
            if texts:
                packages.append(Package(name, version, licence, texts))
    if len(packages) < 2:
        raise ConfigError(f"{len(packages)} packages with usable source found, at least 2 are needed")
    distinct, num_dropped = _without_near_copies(packages)
    corpus = _hold_out(_evened(distinct))
    return replace(corpus, num_near_copies=corpus.num_near_copies + num_dropped)


def is_permissive(licence: str) -> bool:
    """Whether a licence expression, classifier list or name is permissive in all its parts, as far as names tell."""
    return bool(_PERMISSIVE.search(licence)) and not _OTHER.search(licence)


def clean(data: bytes) -> str | None:
    """A file's text without its leading comments and with spaces for tabs; None for what is not to be learned from.

    That is what looks generated, is a table, names a copyleft licence in its head, or is not text.
    """
    if not _FILE_BYTES[0] <= len(data) <= _FILE_BYTES[1]:
        return None
    try:
        text = data.decode("utf-8").replace("\r\n", "\n").expandtabs(4)
    except UnicodeDecodeError:
        return None
    lines = text.split("\n")
    has_odd_lines = max(map(len, lines)) > 1000 or len(text) / len(lines) > 80
    has_odd_chars = sum(c.isdigit() for c in text) > 0.2 * len(text) or sum(c > "\x7f" for c in text) > 0.02 * len(text)
    is_table = sum(_DATA_LINE.match(line) is not None for line in lines) > _DATA_SHARE * len(lines)
    near, far = _HEAD_CHARS
    is_unfit = _GENERATED.search(text[:near]) or _NAMES_COPYLEFT.search(text[:far])
    # Text that spells a control token would be ambiguous.
    if has_odd_lines or has_odd_chars or is_table or is_unfit or "<|" in text:
        return None
    first = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    cleaned = "\n".join(line.rstrip() for line in lines[first:]).strip("\n") + "\n"
    return cleaned if len(cleaned) >= _FILE_BYTES[0] else None


def _installed(sites: Sequence[Path]) -> dict[str, tuple[str, str, list[Path]]]:
    """Version, licence and source files of each permissively licensed distribution; the first one of a name counts.

    The environment is read only where no sites are named, so that a corpus of pinned packages is the same everywhere.
    """
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    found = {
        STANDARD_LIBRARY: (
            platform.python_version(),
            "PSF-2.0",
            [p for p in stdlib.rglob("*.py") if not _SKIPPED.search(str(p.relative_to(stdlib)))],
        )
    }
    paths = [str(site) for site in sites] or sys.path
    for distribution in importlib.metadata.distributions(path=paths):
        name = _normalised(distribution.metadata["Name"] or "")
        licence = _licence(distribution.metadata)
        # Our own source would teach the tests' answers.
        if not name or name in found or name == "samebit" or not is_permissive(licence):
            continue
        files = [
            Path(str(distribution.locate_file(file)))
            for file in distribution.files or []
            if file.suffix == ".py" and ".." not in file.parts and not _SKIPPED.search(str(file))
        ]
        found[name] = (distribution.version, licence, files)
    return found


def _licence(metadata: importlib.metadata.PackageMetadata) -> str:
    """The licence expression, else the classifiers, else the first words of the licence field."""
    stated = metadata.json
    classifiers = stated.get("classifier") or []
    parts = [c.rpartition(" :: ")[2] for c in classifiers if c.startswith("License ::")]
    if stated.get("license_expression"):
        return str(stated["license_expression"])
    return " AND ".join(parts) or " ".join(str(stated.get("license") or "").split())[:80]


def _texts(files: Iterable[Path], seen: set[bytes], max_files: int | None) -> tuple[str, ...]:
    """Cleaned texts that no package had before, at most so many files and characters."""
    texts: dict[Path, str] = {}
    total = 0
    # A fixed order that has nothing to do with folders, so that the cut takes from all of them.
    for path in sorted(files, key=lambda p: _hash(p.name + str(len(p.parts)) + p.parent.name)):
        if total > _READ_CHARS or (max_files is not None and len(texts) >= max_files):
            break
        try:
            text = clean(path.read_bytes())
        except OSError:  # listed, but not installed here
            continue
        if text is None:
            continue
        identity = _hash("".join(text.split()))
        if identity not in seen:
            seen.add(identity)
            texts[path] = text
            total += len(text)
    return tuple(texts[path] for path in sorted(texts))


def _without_near_copies(packages: Iterable[Package]) -> tuple[list[Package], int]:
    """Packages without files most of whose long lines stood in files before, and the number of such files."""
    known: set[str] = set()
    distinct, num_dropped = [], 0
    for package in packages:
        kept = []
        for text in package.texts:
            if not _is_near_copy(text, known, _LIKE_OTHERS):
                kept.append(text)
                known.update(_long_lines(text))
        num_dropped += len(package.texts) - len(kept)
        if kept:
            distinct.append(replace(package, texts=tuple(kept)))
    return distinct, num_dropped


def _evened(packages: list[Package]) -> list[Package]:
    """Packages of which none has more than its share of all text: files leave the large ones, in the order of their hashes."""
    most = _most_chars([p.num_chars for p in packages])
    evened = []
    for package in packages:
        kept: set[str] = set()
        total = 0
        for text in sorted(package.texts, key=_hash):
            if not kept or total + len(text) <= most:
                kept.add(text)
                total += len(text)
        evened.append(replace(package, texts=tuple(text for text in package.texts if text in kept)))
    return evened


def _most_chars(sizes: Sequence[int]) -> float:
    """The size to which larger ones have to be cut for none to be more than a package's share of the sum after the cut."""
    share = max(_MOST_SHARE, _MOST_EQUAL_SHARES / len(sizes))
    most = float(max(sizes))
    while (limit := share * sum(min(size, most) for size in sizes)) < most - 1:
        most = limit
    return most


def _hold_out(packages: list[Package]) -> Corpus:
    """Packages of moderate size, chosen by name, are held out; files much like theirs leave the others."""
    low, high = _HELD_OUT_CHARS
    eligible = [p for p in packages if low <= p.num_chars <= high] or packages
    wanted = max(_MANY_HELD_OUT, round(_HELD_OUT_SHARE * len(packages)))
    # Few packages are mostly to train on.
    count = min(wanted, max(3, len(packages) // 8), len(eligible), len(packages) - 1)
    held_out = sorted(eligible, key=lambda p: _hash(f"held out: {p.name}"))[:count]
    known = {line for package in held_out for text in package.texts for line in _long_lines(text)}
    train, num_dropped = [], 0
    for package in packages:
        if package in held_out:
            continue
        kept = tuple(text for text in package.texts if not _is_near_copy(text, known, _LIKE_HELD_OUT))
        num_dropped += len(package.texts) - len(kept)
        if kept:
            train.append(replace(package, texts=kept))
    return Corpus(tuple(train), tuple(sorted(held_out, key=lambda p: p.name)), num_dropped)


def _is_near_copy(text: str, known: set[str], share: float) -> bool:
    lines = _long_lines(text)
    return bool(lines) and sum(line in known for line in lines) > share * len(lines)


def _long_lines(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n") if len(line.strip()) >= _LONG_LINE]


def _entry(package: Package, *, is_held_out: bool) -> dict[str, object]:
    return {
        "name": package.name,
        "version": package.version,
        "licence": package.licence,
        "files": len(package.texts),
        "chars": package.num_chars,
        "held_out": is_held_out,
    }


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
