"""Compiled programs on disk, shared by every process of a user.

An entry is one line of JSON (what it is, the checksum of what follows) and the object file. Its name is a
hash of everything that the object depends on: the sources of the kernels, the versions and the CUDA flavour
of the compiler, the host's instruction set, the architecture and every field of the configuration.
Entries appear by renaming, so that a reader sees a whole one or none; what is damaged all the same is
found by its checksum and counts as missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .program import Program

try:
    import fcntl
except ImportError:  # no POSIX: processes that start at once may compile a program twice
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("vllm.csf")

FORMAT = 1
COMPILERS = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "apache-tvm-ffi")
_X86_LEVELS = {"x86-64-v4": "avx512vl", "x86-64-v3": "avx2", "x86-64-v2": "sse4_2"}


def default_folder() -> Path:
    """`vllm-csf/programs` in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root, "vllm-csf", "programs")


@functools.cache
def environment() -> str:
    """Hash of what all programs of this installation depend on."""
    facts = {
        "format": FORMAT,
        "sources": _hash_of_sources(Path(__file__).resolve().parents[1]),
        "versions": {name: _version(name) for name in COMPILERS},
        "cuda": _cuda_flavour(),
        "host": _host(),
        # The compiler's own switches (line information, for one) change what it makes.
        "switches": {n: v for n, v in sorted(os.environ.items()) if n.startswith("CUTE_DSL_")},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _hash_of_sources(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)}\0".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _cuda_flavour() -> str:
    """The compiler comes for CUDA 12 and 13 and picks by the driver; either makes its own objects."""
    import cutlass

    return str(cutlass.CUDA_VERSION)


def _host() -> str:
    """Instruction set of the host part of an object: the compiler uses what the machine has."""
    machine = platform.machine()
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return machine
    levels = [level for level, flag in _X86_LEVELS.items() if flag in flags]
    return levels[0] if levels else machine


class ProgramCache:
    """Entries in `folder`, made when it is first written to. Whatever cannot be kept there (no space, no
    permission: one warning) is kept in this object instead."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Path(folder).expanduser() if folder is not None else default_folder()
        self._kept: dict[str, bytes] = {}
        self._warned = False

    def key(self, program: Program) -> str:
        return hashlib.sha256(f"{environment()}\n{program.to_json()}".encode()).hexdigest()

    def path(self, program: Program) -> Path:
        return self.folder / f"{program.kind.name}-{program.arch}-{self.key(program)[:32]}.program"

    def find(self, program: Program) -> bytes | None:
        """The object of a program, None where there is none or a damaged one."""
        if (kept := self._kept.get(self.key(program))) is not None:
            return kept
        path = self.path(program)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        header, _, found = data.partition(b"\n")
        if header == self._header(program, found):
            return found
        logger.warning("csf_nvfp4: %s is damaged or of another program, it is made anew", path)
        return None

    def store(self, program: Program, data: bytes) -> None:
        if not self.write(self.path(program), self._header(program, data) + b"\n" + data):
            self._kept[self.key(program)] = data

    def discard(self, program: Program) -> None:
        """Forget an entry that could not be loaded."""
        self._kept.pop(self.key(program), None)
        with contextlib.suppress(OSError):
            self.path(program).unlink(missing_ok=True)

    def lock(self, program: Program, wait: bool) -> contextlib.AbstractContextManager[bool]:
        """Whether this process may compile the program; another one may be at it. Ends with its holder."""
        return self.lock_path(self.path(program), wait)

    def write(self, path: Path, data: bytes) -> bool:
        """A file of the folder, whole or not at all; whether it could be kept."""
        try:
            self._make_folder()
            with _replacing(path) as file:
                file.write(data)
        except OSError as error:
            self._warn(error)
            return False
        return True

    @contextlib.contextmanager
    def lock_path(self, path: Path, wait: bool) -> Iterator[bool]:
        """Whether this process alone may make the file; without `wait`, False where another one is at it."""
        try:
            self._make_folder()
            handle = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            self._warn(error)
            yield True
            return
        try:
            yield _lock(handle, wait)
        finally:
            os.close(handle)

    def _make_folder(self) -> None:
        # Code is loaded from here: nobody else may write.
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _header(self, program: Program, data: bytes) -> bytes:
        digest = hashlib.sha256(data).hexdigest()
        facts = {
            "program": program.name,
            "key": self.key(program),
            "bytes": len(data),
            "sha256": digest,
            "config": dataclasses.asdict(program.config),
        }
        return json.dumps(facts, sort_keys=True).encode()

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            logger.warning("csf_nvfp4: compiled programs are not kept for the next start: %s", error)
        self._warned = True


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _lock(handle: int, wait: bool) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: better compiled twice than not at all
        return True
    return True
