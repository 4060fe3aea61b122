"""A corpus of Python source from permissively licensed packages that are installed here, and the standard library.

The same installation gives the same corpus: everything that is chosen is chosen by hashes of names and texts. Whole packages
are held out. Knows files and metadata; knows no tokens.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
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
# Vendored copies have licences of their own; generated tables teach nothing.
_SKIPPED = re.compile(
    r"(^|/)(_?vendor(ed)?|_vendor|extern|third_party|3rdparty|pydoc_data|__pycache__|site-packages|dist-packages)(/|$)|"
    r"_pb2(_grpc)?\.py$|/encodings/|/locales?/|pygments/lexers/_|unicode.?data|emoji|entities\.py$|_tables?\.py$",
    re.IGNORECASE,
)
_FILE_BYTES = (200, 200_000)
_PACKAGE_CHARS = 14_000_000
_HELD_OUT_SHARE = 0.03
_MIN_HELD_OUT = 3
_HELD_OUT_CHARS = (60_000, 4_000_000)
_LONG_LINE = 30
_NEAR_COPY = 0.4


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
    """The corpus of this interpreter's environment and standard library; `sites` adds further site-packages folders.

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
    return _hold_out(packages)


def is_permissive(licence: str) -> bool:
    """Whether a licence expression, classifier list or name is permissive in all its parts, as far as names tell."""
    return bool(_PERMISSIVE.search(licence)) and not _OTHER.search(licence)


def clean(data: bytes) -> str | None:
    """A file's text without its leading comments and with spaces for tabs; None for what looks generated or is not text."""
    if not _FILE_BYTES[0] <= len(data) <= _FILE_BYTES[1]:
        return None
    try:
        text = data.decode("utf-8").replace("\r\n", "\n").expandtabs(4)
    except UnicodeDecodeError:
        return None
    lines = text.split("\n")
    has_odd_lines = max(map(len, lines)) > 1000 or len(text) / len(lines) > 80
    has_odd_chars = sum(c.isdigit() for c in text) > 0.2 * len(text) or sum(c > "\x7f" for c in text) > 0.02 * len(text)
    # Text that spells a control token would be ambiguous.
    if has_odd_lines or has_odd_chars or "<|" in text:
        return None
    first = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    cleaned = "\n".join(line.rstrip() for line in lines[first:]).strip("\n") + "\n"
    return cleaned if len(cleaned) >= _FILE_BYTES[0] else None


def _installed(sites: Sequence[Path]) -> dict[str, tuple[str, str, list[Path]]]:
    """Version, licence and source files of each permissively licensed distribution; the first one of a name counts."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    found = {
        STANDARD_LIBRARY: (
            platform.python_version(),
            "PSF-2.0",
            [p for p in stdlib.rglob("*.py") if not _SKIPPED.search(str(p.relative_to(stdlib)))],
        )
    }
    extra = importlib.metadata.distributions(path=[str(site) for site in sites])
    for distribution in (*importlib.metadata.distributions(), *extra):
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
        if total > _PACKAGE_CHARS or (max_files is not None and len(texts) >= max_files):
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


def _hold_out(packages: list[Package]) -> Corpus:
    """Packages of moderate size, chosen by name, are held out; files much like theirs leave the others."""
    low, high = _HELD_OUT_CHARS
    eligible = [p for p in packages if low <= p.num_chars <= high] or packages
    count = min(max(_MIN_HELD_OUT, round(_HELD_OUT_SHARE * len(packages))), len(eligible), len(packages) - 1)
    held_out = sorted(eligible, key=lambda p: _hash(f"held out: {p.name}"))[:count]
    known = {line for package in held_out for text in package.texts for line in _long_lines(text)}
    train, num_dropped = [], 0
    for package in packages:
        if package in held_out:
            continue
        kept = tuple(text for text in package.texts if not _is_near_copy(text, known))
        num_dropped += len(package.texts) - len(kept)
        if kept:
            train.append(replace(package, texts=kept))
    return Corpus(tuple(train), tuple(sorted(held_out, key=lambda p: p.name)), num_dropped)


def _is_near_copy(text: str, known: set[str]) -> bool:
    lines = _long_lines(text)
    return bool(lines) and sum(line in known for line in lines) > _NEAR_COPY * len(lines)


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
