"""Times calls on the device: each captured as a graph, replayed with other inputs every time, arms in turn.

A round replays every arm once with the same fresh inputs; the arm that begins changes from round to round.
So what drifts (clocks, temperature, a neighbour) meets all arms alike, and what one arm leaves in the
caches is not its own weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# The device waits so long before each replay that the host has enqueued it: 0.1 ms at 2 GHz.
AHEAD_CYCLES = 200_000
WARM_ROUNDS = 3


@dataclass(frozen=True)
class Inputs:
    """x bfloat16 [T, H]; ids int32 [T, k]; weights float32 [T, k]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def clone(self) -> Inputs:
        return Inputs(self.x.clone(), self.ids.clone(), self.weights.clone())

    def copy_from(self, other: Inputs) -> None:
        self.x.copy_(other.x)
        self.ids.copy_(other.ids)
        self.weights.copy_(other.weights)


@dataclass(frozen=True)
class Rounds:
    """How long to go on: until `seconds` are over, but at least `least` and at most `most` rounds."""

    seconds: float = 1.0
    least: int = 7
    most: int = 200


def capture(call: Call, inputs: Inputs, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """One call on `inputs`, which later hold what is copied into them. The output is the graph's."""
    with torch.cuda.stream(stream):
        for _ in range(2):
            call(inputs.x, inputs.ids, inputs.weights)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call(inputs.x, inputs.ids, inputs.weights)
    return graph


def measure(calls: Mapping[str, Call], fresh: Sequence[Inputs], rounds: Rounds) -> dict[str, list[float]]:
    """Microseconds of each replay, by arm, one a round."""
    stream = torch.cuda.Stream()
    static = fresh[0].clone()
    stream.wait_stream(torch.cuda.current_stream())
    graphs = {name: capture(call, static, stream) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    deadline = time.perf_counter() + rounds.seconds
    number = 0
    with torch.cuda.stream(stream):
        while number < rounds.least + WARM_ROUNDS or (
            number < rounds.most + WARM_ROUNDS and time.perf_counter() < deadline
        ):
            inputs = fresh[number % len(fresh)]
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                static.copy_from(inputs)
                elapsed = _replay(graphs[name], stream)
                if number >= WARM_ROUNDS:
                    times[name].append(elapsed)
            number += 1
    torch.cuda.current_stream().wait_stream(stream)
    return times


def _replay(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD_CYCLES)
    begin.record(stream)
    graph.replay()
    end.record(stream)
    stream.synchronize()
    return begin.elapsed_time(end) * 1e3


def floor() -> float:
    """Microseconds that this way of timing shows for a graph that does next to nothing."""
    tiny = torch.zeros(1, 1, dtype=torch.bfloat16, device="cuda")
    inputs = Inputs(tiny, tiny.int(), tiny.float())
    found = measure({"nothing": lambda x, ids, weights: x + 1}, [inputs], Rounds(0.2, 20, 50))["nothing"]
    return sorted(found)[len(found) // 2]
