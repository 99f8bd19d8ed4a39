"""From wanted programs to loaded ones: of this process, of the disk cache, or compiled.

Loaded programs are shared by everything in the process that wants the same ones, and stay until nothing
living does *and* somebody plans anew: unloading device code is for quiet moments, never for the garbage
collector's, which may fall into the capture of a graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .cache import ProgramCache
from .objects import LoadedObject, compile_object
from .program import CompileError, Program
from .workers import MOST_WORKERS, compile_in_workers

logger = logging.getLogger("vllm.csf")

_lock = threading.RLock()
_loaded: dict[Program, Callable] = {}
_unload: dict[Program, Callable[[], None]] = {}
_holders: weakref.WeakSet[ProgramSet] = weakref.WeakSet()


class UndeclaredProgramError(LookupError):
    """A program was asked for that no plan has declared."""


class ProgramSet:
    """Loaded programs. They stay loaded while the set lives; nothing else can be had of it."""

    def __init__(self, functions: dict[Program, Callable], owner: str = "") -> None:
        self._functions = functions
        self._owner = owner
        _holders.add(self)

    @property
    def programs(self) -> frozenset[Program]:
        return frozenset(self._functions)

    def __getitem__(self, program: Program) -> Callable:
        """Raises UndeclaredProgramError naming the program and whose set it is."""
        try:
            return self._functions[program]
        except KeyError:
            raise UndeclaredProgramError(
                f"{program.name} is not declared by {self._owner or 'this set of programs'}"
            ) from None

    def add(self, functions: dict[Program, Callable]) -> None:
        self._functions.update(functions)


@dataclass
class Account:
    """How programs were come by, and the seconds that it took: compiling, and waiting for it and loading."""

    compiled: int = 0
    from_cache: int = 0
    in_process: int = 0
    reclaimed: int = 0
    compile_seconds: float = 0.0
    seconds: float = 0.0

    def add(self, other: Account) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def line(self) -> str:
        return (
            f"programs: {self.compiled} compiled in {self.compile_seconds:.1f} s, {self.from_cache} from "
            f"cache, {self.in_process} already loaded, {self.reclaimed} reclaimed; "
            f"the start waited {self.seconds:.2f} s for them"
        )


class Build:
    """Programs on their way. Compiling starts with `start`, in the background; `finish` loads.

    optional: those that do not compile are left out, with a warning each.
    """

    def __init__(
        self,
        programs: Iterable[Program],
        cache: ProgramCache,
        owner: str = "",
        workers: int = MOST_WORKERS,
        optional: bool = False,
    ) -> None:
        self.account = Account()
        self._programs = tuple(dict.fromkeys(programs))
        self._cache = cache
        self._owner = owner
        self._workers = workers
        self._objects: dict[Program, bytes] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._compiled: set[Program] = set()
        self._optional = optional
        self._failed: set[Program] = set()
        self._stop = threading.Event()
        self._after: threading.Thread | None = None

    def start(self, after: Build | None = None) -> None:
        """Look up and compile while the caller does other things; once `after` has compiled, if given."""
        self._after = after._thread if after is not None else None
        self._thread = threading.Thread(target=self._in_background, name="csf programs", daemon=True)
        self._thread.start()

    def _in_background(self) -> None:
        if self._after is not None:
            self._after.join()
        try:
            self._obtain(alone=False)
        except BaseException as error:  # raised where the programs are needed
            self._error = error

    def finish(self) -> ProgramSet:
        """The loaded programs. Raises CompileError naming one that does not compile."""
        began = time.perf_counter()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        self._obtain(alone=True)
        with _lock:
            functions = {p: self._load(p) for p in self._programs if p not in self._failed}
            found = ProgramSet(functions, self._owner)
        self._objects.clear()
        self.account.seconds += time.perf_counter() - began
        return found

    def take(self, seconds: float) -> ProgramSet:
        """Of a started, optional build: those loaded programs that are there after so long. Nothing more is
        begun then; what is being compiled still goes to the cache."""
        assert self._optional
        if self._thread is not None:
            self._thread.join(max(0.0, seconds))
        self._stop.set()
        if self._error is not None:
            logger.warning("csf_nvfp4: %s: %s", self._owner, self._error)
        with _lock:
            here = [p for p in self._programs if p in _loaded or p in self._objects]
            functions = {p: f for p in here if (f := self._load_if_it_does(p)) is not None}
            return ProgramSet(functions, self._owner)

    # ---- objects -----------------------------------------------------------------------------------

    def _missing(self) -> list[Program]:
        with _lock:
            found = {*_loaded, *self._objects, *self._failed}
            wanted = [p for p in self._programs if p not in found]
        for program in wanted:
            if (data := self._cache.find(program)) is not None:
                self._objects[program] = data
        return [p for p in wanted if p not in self._objects]

    def _obtain(self, alone: bool) -> None:
        """Until every object is there: compile what nobody else compiles, wait for the rest.

        alone: nothing else runs in this process, so that it may compile itself where it has to.
        """
        began = time.perf_counter()
        while not self._stop.is_set() and (missing := self._missing()):
            with contextlib.ExitStack() as locks:
                mine = [p for p in missing if locks.enter_context(self._cache.lock(p, wait=False))]
                # Somebody may have finished one between the look and the lock.
                still = self._missing()
                mine = [p for p in mine if p in still]
                lost = self._compile(mine, alone)
            if lost:
                return  # to be compiled in this process, by `finish`
            if not mine:
                logger.info("csf_nvfp4: another process compiles %s", missing[0].name)
                with self._cache.lock(missing[0], wait=True):
                    pass
        self.account.compile_seconds += (time.perf_counter() - began) if self._compiled else 0.0

    def _compile(self, programs: Sequence[Program], alone: bool) -> list[Program]:
        if not programs:
            return []
        in_process = list(programs) if alone and (len(programs) == 1 or self._workers == 0) else []
        if not in_process:
            failed = self._leave_out if self._optional else None
            in_process = compile_in_workers(programs, self._keep, self._workers, failed, self._stop)
        if not alone:
            return in_process
        for program in in_process:
            try:
                self._keep(program, compile_object(program))
            except CompileError as error:
                if not self._optional:
                    raise
                self._leave_out(program, error)
        return []

    def _leave_out(self, program: Program, error: CompileError) -> None:
        logger.warning("csf_nvfp4: done without: %s", error)
        self._failed.add(program)

    def _keep(self, program: Program, data: bytes) -> None:
        self._objects[program] = data
        self._compiled.add(program)
        self._cache.store(program, data)

    # ---- functions ---------------------------------------------------------------------------------

    def _load_if_it_does(self, program: Program) -> Callable | None:
        try:
            return self._load(program)
        except CompileError as error:
            self._leave_out(program, error)
            return None

    def _load(self, program: Program) -> Callable:
        if program in _loaded:
            self.account.in_process += 1
            return _loaded[program]
        try:
            found = LoadedObject(self._objects[program])
        except Exception as error:
            # Its checksum was right, yet it does not load: of another make of compiler, it may be.
            logger.warning("csf_nvfp4: %s: the cached object does not load: %s", program.name, error)
            self._cache.discard(program)
            self._keep(program, compile_object(program))
            found = _load_new(program, self._objects[program])
        if program in self._compiled:
            self.account.compiled += 1
        else:
            self.account.from_cache += 1
        _loaded[program], _unload[program] = found.function, found.unload
        return found.function


def _load_new(program: Program, data: bytes) -> LoadedObject:
    try:
        return LoadedObject(data)
    except Exception as error:
        raise CompileError(f"{program.name}: compiled, but it does not load: {error}") from error


def reclaim() -> int:
    """Unload the programs that nothing living holds; returns how many. Not while a graph is captured."""
    with _lock:
        held = frozenset[Program]().union(*(holder.programs for holder in _holders))
        dead = [program for program in _loaded if program not in held]
        if dead:
            _settle()
        for program in dead:
            del _loaded[program]
            if (unload := _unload.pop(program, None)) is not None:
                unload()
        return len(dead)


def _settle() -> None:
    """Until no kernel runs any more: none may be one that is unloaded."""
    torch = sys.modules.get("torch")  # without it nothing was called
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def loaded() -> int:
    """Programs that are loaded in this process."""
    return len(_loaded)
