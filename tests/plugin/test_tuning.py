"""Tuning: what wins, what it may take, what is kept of it. Timers and programs are made up."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from vllm_csf.kernels.activation import SILU
from vllm_csf.kernels.compiled import build, cache
from vllm_csf.kernels.compiled.build import Build, ProgramSet, UndeclaredProgramError
from vllm_csf.kernels.compiled.cache import ProgramCache
from vllm_csf.kernels.moe import candidates, programs
from vllm_csf.kernels.moe.candidates import Trial
from vllm_csf.kernels.moe.programs import Choice, Geometry, PrefillChoice

pytest.importorskip("cutlass")

from vllm_csf import tuning
from vllm_csf.planning import Limits, Plan, make_plan
from vllm_csf.startup import Startup
from vllm_csf.tuning import Budget, ChoiceCache, Race, Tuner, Tuning, parse_budget, trials_of

GEOMETRY = Geometry(128, 128, 4096, 1536, 8, SILU, False, False, "sm_90a", 132)
TUNING = Tuning(Budget(10, 1024), "a device")


class FakeTimer:
    """Calls take what `cost` says, on a clock of their own."""

    def __init__(self, cost: Callable[[Choice, int], float] = lambda choice, tokens: 1e-3) -> None:
        self.now = 0.0
        self.calls: list[tuple[Choice, int, int]] = []
        self.unfit: set[Choice] = set()
        self._cost = cost

    def ready(self, choice: Choice) -> bool:
        return choice not in self.unfit

    def __call__(self, choice: Choice, tokens: int, number: int) -> float:
        self.calls.append((choice, tokens, number))
        seconds = self._cost(choice, tokens)
        self.now += seconds
        return seconds


def race(timer: FakeTimer, deadline: float = 100.0) -> Race:
    return Race(timer, deadline, clock=lambda: timer.now)


def prefill(tokens: int, stages: int = 4) -> PrefillChoice:
    return PrefillChoice(tokens, 132, tile=128, stages=stages, per_sm=1)


def plan_of(tokens: int = 8192, geometry: Geometry = GEOMETRY) -> Plan:
    return make_plan(geometry, Limits(tokens))


def least_stages(choice: Choice, tokens: int) -> float:
    return 1e-3 * (1 + choice.stages)


# ---- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "budget"),
    [
        (None, None),
        (False, None),
        (True, Budget()),
        ({}, Budget()),
        ({"seconds": 5}, Budget(seconds=5.0)),
        ({"seconds": 0.5, "memory_mib": 64}, Budget(0.5, 64)),
    ],
)
def test_budgets(value, budget):
    assert parse_budget(value) == budget


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (30, "tuning is 30, expected true, false or an object with seconds and memory_mib"),
        ("yes", "tuning is 'yes'"),
        ({"second": 5}, "tuning has 'second', expected seconds and memory_mib"),
        ({"seconds": 0}, "tuning.seconds is 0, expected a number of seconds above 0"),
        ({"seconds": True}, "tuning.seconds is True"),
        ({"seconds": float("inf")}, "tuning.seconds is inf"),
        ({"memory_mib": 0.5}, "tuning.memory_mib is 0.5, expected a whole number of MiB above 0"),
        ({"memory_mib": None}, "tuning.memory_mib is None"),
    ],
)
def test_what_is_no_budget_is_refused(value, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_budget(value)


# ---- candidates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
@pytest.mark.parametrize("topk", [1, 8])
@pytest.mark.parametrize("most", [1, 5, 100, 8192, 20000])
def test_trials_begin_with_the_tables_choice(arch, topk, most):
    g = replace(GEOMETRY, arch=arch, topk=topk)
    table, found = programs.choices(g), candidates.trials(g, most)
    counts = [trial.tokens for trial in found]
    assert counts == sorted(set(counts))
    assert (counts[0], counts[-1]) == (1, min(most, table[-1].tokens))
    for trial in found:
        own, *others = trial.choices
        assert own == replace(programs.choice_for(table, trial.tokens), tokens=trial.tokens)
        assert len({own, *others}) == len(trial.choices)
        for choice in trial.choices:
            assert choice.tokens == trial.tokens <= candidates.most_tokens(g, choice)
            assert choice.ctas <= 2 * g.multiprocessors  # the flags of a layer are for so many
    assert (
        make_plan(g, Limits(most), candidates.merged([t.choices[0] for t in found])).steps[-1].last
        == counts[-1]
    )
    lasts = [step.last for step in plan_of(most, g).steps]
    assert [c.tokens for c in candidates.merged([t.choices[0] for t in found])] == lasts


def test_candidates_find_the_shared_memory_they_need():
    deep = replace(programs.choices(GEOMETRY)[-1], stages=9)
    assert not candidates.fits(GEOMETRY, deep)
    own = {replace(choice, tokens=0) for choice in programs.choices(GEOMETRY)}
    others = {replace(c, tokens=0) for t in candidates.trials(GEOMETRY, 8192) for c in t.choices} - own
    assert len(others) >= 10
    assert all(candidates.fits(GEOMETRY, choice) for choice in {*own, *others})


# ---- which is fastest ------------------------------------------------------------------------------


def test_the_fastest_wins_where_it_is_faster():
    fast = {100: prefill(100, 3), 200: prefill(200, 5), 300: prefill(300, 4)}
    timer = FakeTimer(lambda choice, tokens: 1e-3 if choice == fast[tokens] else 2e-3)
    trials = [Trial(t, tuple(prefill(t, s) for s in (4, 3, 5))) for t in fast]
    found = race(timer)
    assert found.run(trials) == list(fast.values())
    assert (found.tried, found.timely) == (9, True)
    assert len(timer.calls) == 9 * tuning.ROUNDS


def test_a_candidate_that_is_hardly_faster_does_not_win():
    timer = FakeTimer(lambda choice, tokens: 1.0 - 0.9 * tuning.GAIN * (choice.stages == 5))
    trial = Trial(100, (prefill(100), prefill(100, 5)))
    assert race(timer, 1e9).run([trial]) == [trial.choices[0]]


def test_the_budget_of_time_is_kept_to():
    """One call more than fits, and the table's choice for all that was not decided."""
    timer = FakeTimer(lambda choice, tokens: 2.0 - (choice.stages == 3))
    trials = [Trial(t, (prefill(t), prefill(t, 3))) for t in (1, 2, 3)]
    full = 3 * tuning.ROUNDS
    found = race(timer, full + 5)
    assert found.run(trials) == [trials[0].choices[1], trials[1].choices[0], trials[2].choices[0]]
    assert (found.tried, found.timely) == (2, False)
    assert full + 5 <= timer.now <= full + 5 + 2


def test_no_time_no_calls():
    timer = FakeTimer()
    trial = Trial(1, (prefill(1), prefill(1, 3)))
    assert race(timer, 0.0).run([trial]) == [trial.choices[0]]
    assert not timer.calls


def test_a_candidate_that_fails_is_left_out_with_one_line(caplog):
    def cost(choice: Choice, tokens: int) -> float:
        if choice.stages == 3:
            raise RuntimeError("too many resources requested for launch")
        return 2.0 - (choice.stages == 5)

    timer = FakeTimer(cost)
    trials = [Trial(t, tuple(prefill(t, s) for s in (4, 3, 5))) for t in (10, 20)]
    assert race(timer).run(trials) == [trial.choices[2] for trial in trials]
    assert len([call for call in timer.calls if call[0].stages == 3]) == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert "stages=3" in line
    assert "too many resources" in line


def test_what_is_not_ready_is_not_called():
    timer = FakeTimer(least_stages)
    trial = Trial(10, tuple(prefill(10, s) for s in (4, 3)))
    timer.unfit = {trial.choices[1]}
    found = race(timer)
    assert found.run([trial]) == [trial.choices[0]]
    assert found.tried == 1
    assert {call[0] for call in timer.calls} == {trial.choices[0]}


def test_without_the_tables_choice_nothing_is_compared():
    timer = FakeTimer(least_stages)
    trial = Trial(10, tuple(prefill(10, s) for s in (4, 3)))
    timer.unfit = {trial.choices[0]}
    assert race(timer).run([trial]) == [trial.choices[0]]
    assert not timer.calls


# ---- what is kept ----------------------------------------------------------------------------------


def outcome(plan: Plan, tried: int = 10, wanted: int = 10) -> tuning.Outcome:
    winners = [trial.choices[-1] for trial in trials_of(plan)]
    return tuning.Outcome(candidates.merged(winners), tried, wanted, True, 1.0)


def test_a_choice_is_kept_and_found(tmp_path):
    plan = plan_of()
    kept = ChoiceCache(ProgramCache(tmp_path), plan, "a device")
    assert kept.find(TUNING.budget) is None
    kept.store(outcome(plan), TUNING.budget)
    found = ChoiceCache(ProgramCache(tmp_path), plan, "a device").find(TUNING.budget)
    assert found is not None
    assert (found.choices, found.source) == (outcome(plan).choices, "cache")
    assert json.loads(kept.path.read_bytes().partition(b"\n")[2])["device"] == "a device"


@pytest.mark.parametrize(
    "what", ["device", "geometry", "multiprocessors", "limits", "candidates", "rule", "sources"]
)
def test_a_choice_made_for_something_else_is_not_taken(tmp_path, monkeypatch, what):
    plan, device = plan_of(), "a device"
    ChoiceCache(ProgramCache(tmp_path), plan, device).store(outcome(plan), TUNING.budget)
    if what == "device":
        device = "another one"
    elif what == "geometry":
        plan = plan_of(geometry=replace(GEOMETRY, inner=1024))
    elif what == "multiprocessors":
        plan = plan_of(geometry=replace(GEOMETRY, multiprocessors=78))
    elif what == "limits":
        plan = plan_of(4096)
    elif what == "candidates":
        monkeypatch.setattr(candidates, "RUN", candidates.RUN[:1])
    elif what == "rule":
        monkeypatch.setattr(tuning, "GAIN", 0.5)
    else:
        monkeypatch.setattr(tuning, "environment", lambda: "other sources")
    assert ChoiceCache(ProgramCache(tmp_path), plan, device).find(TUNING.budget) is None


def rewritten(data: bytes, **changes) -> bytes:
    entry = json.loads(data.partition(b"\n")[2]) | changes
    body = json.dumps({k: v for k, v in entry.items() if v is not None}, sort_keys=True).encode()
    return cache.hashlib.sha256(body).hexdigest().encode() + b"\n" + body


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data.replace(b"decode", b"DECODE"),
        lambda data: b"\xff" + data,
        lambda data: rewritten(data, key="of another plan"),
        lambda data: rewritten(data, choices=[]),
        lambda data: rewritten(data, choices=None),
        lambda data: rewritten(data, choices=[{"kind": "prefill", "tokens": 8192}]),
        lambda data: rewritten(data, choices=[{"kind": "prefill"} | dataclasses.asdict(prefill(4096))]),
        lambda data: rewritten(
            data, choices=[{"kind": "prefill"} | dataclasses.asdict(prefill(8192)) | {"ctas": "132"}]
        ),
        lambda data: rewritten(data, tried=None),
    ],
)
def test_a_damaged_entry_is_not_taken(tmp_path, caplog, damage):
    plan = plan_of()
    kept = ChoiceCache(ProgramCache(tmp_path), plan, "a device")
    kept.store(outcome(plan), TUNING.budget)
    kept.path.write_bytes(damage(kept.path.read_bytes()))
    assert kept.find(TUNING.budget) is None
    assert "is damaged" in caplog.text
    kept.store(outcome(plan), TUNING.budget)
    assert kept.find(TUNING.budget) is not None


def test_a_larger_budget_goes_on_where_a_smaller_one_stopped(tmp_path):
    plan = plan_of()
    kept = ChoiceCache(ProgramCache(tmp_path), plan, "a device")
    kept.store(outcome(plan, tried=4), Budget(10, 100))
    assert kept.find(Budget(10, 100)) is not None
    assert kept.find(Budget(5, 50)) is not None
    assert kept.find(Budget(20, 100)) is None
    assert kept.find(Budget(10, 200)) is None
    kept.store(outcome(plan), Budget(10, 100))
    assert kept.find(Budget(60, 2000)) is not None


# ---- a start ---------------------------------------------------------------------------------------


@pytest.fixture
def fakes(monkeypatch):
    """Programs that do nothing, in place of compiled ones. `uncompiled`: those that never get ready."""

    class Fakes:
        uncompiled: frozenset = frozenset()
        asked: list = []  # noqa: RUF012 - of this test alone

    def finish(self) -> ProgramSet:
        Fakes.asked.append(set(self._programs))
        made = {p: (lambda *_: None) for p in self._programs}
        with build._lock:
            build._loaded.update(made)
        return ProgramSet(made, self._owner)

    def take(self, seconds: float) -> ProgramSet:
        assert self._optional
        assert seconds <= TUNING.budget.seconds
        self._programs = tuple(p for p in self._programs if p not in Fakes.uncompiled)
        return finish(self)

    gc.collect()
    build.reclaim()
    monkeypatch.setattr(Build, "start", lambda self, after=None: None)
    monkeypatch.setattr(Build, "finish", finish)
    monkeypatch.setattr(Build, "take", take)
    yield Fakes
    gc.collect()
    build.reclaim()


class LayerFake(FakeTimer):
    """Of a layer: only what was compiled can be called."""

    def __call__(self, choice: Choice, tokens: int, number: int) -> float:
        assert self.ready(choice)
        return super().__call__(choice, tokens, number)

    def made(self, geometry: Geometry, own: ProgramSet, others: ProgramSet, nbytes: int) -> LayerFake:
        assert nbytes == TUNING.budget.memory_mib << 20
        there = own.programs | others.programs
        self.ready = lambda choice: programs.declared(geometry, choice) in there  # type: ignore[method-assign]
        return self


def start(folder, timer: LayerFake, plan: Plan | None = None, budget: Tuning | None = TUNING):
    startup, plan, tried = Startup(), plan or plan_of(), []
    served = startup.declare(plan, ProgramCache(folder), budget)
    startup.try_with(plan, lambda: tried.append(served.plan), timer.made)
    assert startup.finish() is not None
    assert tried == [served.plan]
    return served, startup.tuning_lines()


def test_a_start_serves_by_what_won_and_unloads_the_rest(tmp_path, fakes):
    served, (line,) = start(tmp_path, LayerFake(least_stages))
    table = plan_of()
    assert served.plan != table
    assert served.plan.limits == table.limits
    assert served.plan.piece == table.piece
    for trial in trials_of(table):
        least = min(choice.stages for choice in trial.choices)
        assert served.plan.step_for(trial.tokens).choice.stages == least
    for tokens in (1, 8, 300, served.plan.piece):
        step, _ = served.program(tokens, True)
        assert step.first <= tokens <= step.last
    assert build.loaded() == len(set(served.plan.programs()))
    assert line.startswith("tuning: tuned in ")
    assert "stopped" not in line
    wanted = sum(len(trial.choices) for trial in trials_of(table))
    assert f"{wanted} of {wanted} candidates timed" in line


def test_equal_candidates_leave_the_plan_as_it_is(tmp_path, fakes):
    served, (line,) = start(tmp_path, LayerFake())
    assert served.plan == plan_of()
    assert build.loaded() == len(set(plan_of().programs()))
    assert ", 0 steps not the table's" in line


def test_the_next_start_times_and_compiles_no_candidate(tmp_path, fakes):
    first, _ = start(tmp_path, LayerFake(least_stages))
    plan = first.plan
    del first
    timer = LayerFake()
    fakes.asked.clear()
    second, (line,) = start(tmp_path, timer)
    assert second.plan == plan
    assert not timer.calls
    assert fakes.asked == [set(plan.programs())]
    assert line.startswith("tuning: from cache in 0.0")


def test_without_tuning_a_kept_choice_is_not_looked_at(tmp_path, fakes):
    start(tmp_path, LayerFake(least_stages))
    served, lines = start(tmp_path, LayerFake(), budget=None)
    assert served.plan == plan_of()
    assert not lines


def test_undeclared_sizes_are_refused_after_tuning(tmp_path, fakes):
    served, _ = start(tmp_path, LayerFake(least_stages), plan_of(300))
    served.plan.check(300, 8, False)
    with pytest.raises(UndeclaredProgramError, match="301 tokens"):
        served.plan.check(301, 8, False)
    with pytest.raises(UndeclaredProgramError, match="301 tokens"):
        served.plan.step_for(301)


def test_candidates_that_are_not_compiled_are_done_without(tmp_path, fakes):
    fakes.uncompiled = frozenset(tuning.candidate_programs(plan_of()))
    served, (line,) = start(tmp_path, LayerFake(least_stages))
    assert set(served.plan.programs()) <= set(plan_of().programs())
    assert f"of {sum(len(trial.choices) for trial in trials_of(plan_of()))} candidates" in line


def test_nothing_is_kept_of_a_tuning_that_timed_nothing(tmp_path, fakes):
    timer = LayerFake()
    timer.made = lambda *_: timer  # type: ignore[method-assign]
    timer.ready = lambda choice: False  # type: ignore[method-assign]
    served, (line,) = start(tmp_path, timer)
    assert served.plan == plan_of()
    assert "tuned in" in line
    assert not list(tmp_path.glob("tuning-*.json"))


def test_another_rank_waits_and_takes_the_same(tmp_path, fakes):
    """Both find nothing kept; the one that comes second neither times nor chooses."""
    began, may_go_on = threading.Event(), threading.Event()

    def slow(choice: Choice, tokens: int) -> float:
        began.set()
        assert may_go_on.wait(30)
        return least_stages(choice, tokens)

    found: dict[str, Plan] = {}
    timers = {"one": LayerFake(slow), "two": LayerFake()}

    def rank(name: str) -> None:
        tuner = Tuner(plan_of(), TUNING, ProgramCache(tmp_path))
        tuner.begin(Build([], ProgramCache(tmp_path)))
        own = ProgramSet({p: (lambda *_: None) for p in plan_of().programs()})
        found[name] = tuner.plan(tuner.tune(own, timers[name].made)[0])

    ranks = [threading.Thread(target=rank, args=(name,)) for name in timers]
    ranks[0].start()
    assert began.wait(30)
    ranks[1].start()
    ranks[1].join(0.3)
    assert ranks[1].is_alive()
    may_go_on.set()
    for one in ranks:
        one.join(30)
    assert found["one"] == found["two"] != plan_of()
    assert not timers["two"].calls


def test_equal_layers_of_a_draft_share_the_tuned_plan(tmp_path, fakes):
    startup, timer = Startup(), LayerFake(least_stages)
    served = startup.declare(plan_of(), ProgramCache(tmp_path), TUNING)
    startup.try_with(plan_of(), lambda: None, timer.made)
    startup.finish()
    assert startup.declare(plan_of(), ProgramCache(tmp_path), TUNING) is served
    assert startup.finish() is None


@pytest.fixture(autouse=True)
def _heard(caplog):
    caplog.set_level(logging.INFO, "vllm.csf")
