"""Compiles the C sources once per host into a per-user cache and loads them.

The cache key holds the sources, the flags and the compiler's version. A library is written under a temporary name and
renamed, so engines that start at the same time cannot see half a file. Knows nothing of tensors.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
ISA_FLAGS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"),
    "avx2": ("-mavx2", "-mfma"),
    "portable": (),
}
_NEEDED = {"avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"}, "avx2": {"avx2", "fma"}}
COMPILE_SECONDS = 120


class NativeUnavailableError(RuntimeError):
    """The C kernels cannot be built or loaded on this host; the message says why."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """A loaded library, and what its bits may depend on."""

    functions: ctypes.CDLL
    build: str
    compiler: str


def host_isas() -> tuple[str, ...]:
    """Instruction sets this host can run, best first."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ("portable",)
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    return (*(isa for isa, needed in _NEEDED.items() if needed <= set(flags)), "portable")


def _compiler() -> tuple[str, str]:
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path is None:
            continue
        found = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)  # noqa: S603  a compiler found on PATH
        version = found.stdout.strip()
        if found.returncode == 0 and version:
            return path, version.splitlines()[0]
    raise NativeUnavailableError("no C compiler found (looked for cc, gcc and clang)")


def _cache_folder(key: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"  # noqa: TID251  where a file lies, not what it computes
    folder = Path(base) / "samebit" / "native" / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    return folder if usable else Path(tempfile.mkdtemp(prefix="samebit-native-"))


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        sources = sorted(str(path) for path in SOURCES.glob("*.c"))
        command = [compiler, *flags, *sources, "-o", str(made)]
        try:
            done = subprocess.run(  # noqa: S603  our own sources and flags
                command, capture_output=True, text=True, check=False, timeout=COMPILE_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NativeUnavailableError(f"{compiler} did not finish: {error}") from error
        if done.returncode != 0:
            raise NativeUnavailableError(f"{compiler} failed: {done.stderr.strip()[:500]}")
        made.replace(target)


@functools.cache
def load_library(isa: str) -> NativeLibrary:
    """Build (or find) and load the kernels for ``isa``. Raises NativeUnavailableError."""
    compiler, version = _compiler()
    flags = (*FLAGS, *ISA_FLAGS[isa])
    digest = hashlib.sha256("\0".join((version, *flags)).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    build = digest.hexdigest()[:16]
    target = _cache_folder(build) / "kernels.so"
    functions = _load(target)
    if functions is None:
        _compile(compiler, flags, target)
        functions = _load(target)
    if functions is None:
        raise NativeUnavailableError(f"cannot load {target}, although it has just been compiled")
    return NativeLibrary(functions, build, version)


def _load(path: Path) -> ctypes.CDLL | None:
    """The library, or None if it is not there or damaged."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None
