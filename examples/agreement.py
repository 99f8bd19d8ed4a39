"""Whether a server's greedy answers are those of the reference, up to rounding.

Every token has to be the one that the reference prefers, or one that rounding can have put before it, and
every log probability has to be no farther off than rounding can have moved it (`Reference` says how far that
is, in the data type that the server computes in). Where a token fails, rounding may have sent it to another
expert. That is accepted as the reason only if the reference itself, with near-tied routing decisions turned,
agrees with the server there and with all that the server said before: one routing has to explain an answer
as a whole. Decisions of the token itself are tried first, then one at an earlier position, whose keys and
values the token sees. Few tokens may need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from routed_reference import NONE, Decision, Flips, Reference, Routed

# A token's bounds are raised by the least one, and cut off at the most.
LEAST_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.02}
MOST_TOLERANCE = 0.7
EXPLAINED_SHARE = 0.05  # of a run's tokens, at most
OWN_TRIES, EARLIER_TRIES = 64, 24


@dataclass(frozen=True)
class Answer:
    """Tokens that a server chose after a prompt and the log probability that it gave to each."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Turned:
    """Decisions whose turning makes the reference agree at token `token` of the answer to `prompt`, and the
    log probability of that token: the server's, the reference's, the reference's with them turned."""

    prompt: int
    token: int
    logprob: float
    reference: float
    reference_turned: float
    decisions: list[Decision]


@dataclass
class Comparison:
    """Of one run with the reference. Tokens are `equal` to the reference's choice, `undecided` within
    rounding, or `wrong`; `apart`: their log probability is; `explained`: agree with turned decisions alone.

    differences: the largest of a log probability, and the largest as a share of what is allowed.
    """

    tokens: int = 0
    equal: int = 0
    undecided: int = 0
    wrong: int = 0
    apart: int = 0
    explained: int = 0
    largest_difference: float = 0.0
    largest_share: float = 0.0
    turned: list[Turned] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        few = self.explained <= EXPLAINED_SHARE * self.tokens
        return bool(self.tokens and few and not self.wrong and not self.apart)


def compare(reference: Reference, answers: Sequence[Answer]) -> Comparison:
    """Raises ValueError for an answer that has not a log probability for each token."""
    result = Comparison()
    for number, answer in enumerate(answers):
        if len(answer.tokens) != len(answer.logprobs):
            raise ValueError(
                f"the answer to prompt {number} has {len(answer.logprobs)} log probabilities, "
                f"expected {len(answer.tokens)}"
            )
        _Explanation(reference, number, answer, result).add()
    return result


@dataclass(frozen=True)
class _Verdict:
    """Of one token: how far the reference prefers another, how far the log probabilities are apart, and how
    far either may be."""

    regret: float
    regret_limit: float
    difference: float
    difference_limit: float

    @property
    def right(self) -> bool:
        return self.regret <= self.regret_limit

    @property
    def near(self) -> bool:
        return self.difference <= self.difference_limit  # false for a NaN too

    @property
    def agrees(self) -> bool:
        return self.right and self.near


class _Explanation:
    """Of one answer, from its first token to its last."""

    def __init__(self, reference: Reference, number: int, answer: Answer, result: Comparison) -> None:
        self._reference, self._number, self._answer, self._result = reference, number, answer, result
        self._tokens = answer.prompt + answer.tokens
        self._first = len(answer.prompt) - 1  # the position whose row tells the first token
        self._least = LEAST_TOLERANCE[reference.dtype]
        self._lost: set[int] = set()

    def add(self) -> None:
        plain = routed = self._reference.run(self._tokens)
        flips = NONE
        for token in range(len(self._answer.tokens)):
            if self._verdict(routed, token).agrees:
                continue
            if (found := self._search(routed, flips, token)) is None:
                self._lost.add(token)
                continue
            routed, flips, decisions = found
            values = (self._answer.logprobs[token], self._logprob(plain, token), self._logprob(routed, token))
            self._result.turned.append(Turned(self._number, token, *values, decisions))
        for token in range(len(self._answer.tokens)):
            verdict = self._verdict(routed, token)
            self._count(verdict)
            self._result.explained += verdict.agrees and not self._verdict(plain, token).agrees

    def _logprob(self, routed: Routed, token: int) -> float:
        return float(routed.logprobs[self._first + token, self._answer.tokens[token]])

    def _verdict(self, routed: Routed, token: int) -> _Verdict:
        position, chosen = self._first + token, self._answer.tokens[token]
        best = int(routed.logprobs[position].argmax())
        return _Verdict(
            float(routed.logprobs[position, best]) - self._logprob(routed, token),
            min(MOST_TOLERANCE, self._least + routed.lead_bound(position, best, chosen)),
            abs(self._logprob(routed, token) - self._answer.logprobs[token]),
            min(MOST_TOLERANCE, self._least + routed.logprob_bound(position, chosen)),
        )

    def _count(self, verdict: _Verdict) -> None:
        result = self._result
        result.tokens += 1
        result.equal += verdict.regret == 0
        result.undecided += verdict.regret != 0 and verdict.right
        result.wrong += not verdict.right
        result.apart += not verdict.near
        result.largest_difference = max(result.largest_difference, verdict.difference)
        result.largest_share = max(result.largest_share, verdict.difference / verdict.difference_limit)

    def _search(
        self, routed: Routed, flips: Flips, token: int
    ) -> tuple[Routed, Flips, list[Decision]] | None:
        """With more decisions turned than `flips`, all tokens up to this one agree."""
        before = [k for k in range(token) if k not in self._lost]
        for turned in self._candidates(routed, flips, self._first + token):
            wanted = flips | {d.place for d in turned}
            quick = self._verdict(self._reference.run(self._tokens, wanted, samples=0), token)
            if not max(quick.regret, quick.difference) <= MOST_TOLERANCE:
                continue
            found = self._reference.run(self._tokens, wanted)
            if all(self._verdict(found, k).agrees for k in (token, *before)):
                return found, wanted, turned
        return None

    def _candidates(self, routed: Routed, flips: Flips, position: int) -> Iterator[list[Decision]]:
        yield from self._own(flips, position)
        near = [d for d in routed.decisions if d.position < position and d.near_tied]
        near = _nearest_first(d for d in near if d.place not in flips)
        yield from ([d] for d in near[:EARLIER_TRIES])

    def _own(self, flips: Flips, position: int) -> Iterator[list[Decision]]:
        """Near ties of a position, few before many. What deeper layers decide depends on the turned ones."""
        waiting: list[list[Decision]] = [[]]
        for _ in range(OWN_TRIES):
            if not waiting:
                return
            turned = waiting.pop(0)
            if turned:
                yield turned
            routed = self._reference.run(self._tokens, flips | {d.place for d in turned})
            below = turned[-1].layer if turned else -1
            waiting += [[*turned, d] for d in _nearest_first(routed.near_ties(position, below))]


def _nearest_first(decisions: Iterable[Decision]) -> list[Decision]:
    return sorted(decisions, key=lambda d: d.margin / d.bound)
