"""The check of served answers: rounding passes, near-tied routing is explained, all else fails.

The servers here are transformers models whose routing is turned by code of this file.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[2] / "examples"))

import agreement
import serve_check
from agreement import Answer, compare
from routed_reference import SIGMAS, Decision, Reference
from transformers import AutoModelForCausalLM

TOKENS = 12
PROMPTS = [list(prompt) for prompt in serve_check.PROMPTS]


class Server:
    """turned: (layer, position) where the last chosen expert gives way to the next one."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.routers = [m for n, m in self._model.named_modules() if n.endswith("mlp.gate")]
        self._turned: set[tuple[int, int]] = set()
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(lambda m, i, out, layer=layer: self._turn(m, out, layer))

    def _turn(self, router, out, layer: int):
        """Softmax routers: without its last choice, a router chooses the next."""
        logits, *_ = out
        positions = [p for at, p in self._turned if at == layer and p < len(logits)]
        if not positions:
            return out
        logits = logits.clone()
        for position in positions:
            logits[position, logits[position].topk(router.top_k).indices[-1]] = -torch.inf
        weights, ids = logits.softmax(-1).topk(router.top_k)
        return logits, weights / weights.sum(-1, keepdim=True), ids

    def answer(self, prompt: list[int], turned: tuple[tuple[int, int], ...] = ()) -> Answer:
        self._turned = set(turned)
        tokens, logprobs = list(prompt), []
        with torch.no_grad():
            for _ in range(TOKENS):
                row = self._model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
                tokens.append(int(row.argmax()))
                logprobs.append(float(row.max()))
        return Answer(list(prompt), tokens[len(prompt) :], logprobs)


@pytest.fixture(scope="module")
def folder(checkpoint) -> Path:
    return checkpoint("qwen3-moe", "dequantized")


@pytest.fixture(scope="module")
def reference(folder) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def server(folder) -> Server:
    return Server(folder)


@pytest.fixture(scope="module")
def answers(server) -> list[Answer]:
    return [server.answer(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def decisions(reference, answers) -> list[tuple[int, Decision]]:
    """Those that the tokens of the answers depend on most, with their prompts."""
    found = []
    for number, answer in enumerate(answers):
        first = len(answer.prompt) - 1
        routed = reference.run(answer.prompt + answer.tokens)
        rows = range(first, first + TOKENS)
        found += [(number, decision) for decision in routed.decisions if decision.position in rows]
    return found


def short(answers: list[Answer]) -> list[Answer]:
    return [answer for answer in answers if len(answer.prompt) < 20]


def changed(answer: Answer, token: int, **values) -> list[Answer]:
    fields = {name: list(getattr(answer, name)) for name in ("tokens", "logprobs")}
    for name, value in values.items():
        fields[name][token] = value
    return [dataclasses.replace(answer, **fields)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_arithmetic_agrees(folder, answers, dtype):
    found = compare(Reference(folder, dtype), answers)
    assert found.ok
    assert (found.tokens, found.equal, found.explained) == (TOKENS * len(PROMPTS),) * 2 + (0,)
    assert found.largest_difference < 5e-5


@pytest.mark.parametrize("family", ["qwen3-moe", "glm4-moe"])
def test_bfloat16_agrees_within_the_bounds_that_are_derived(checkpoint, family):
    """Errors of logprobs, in the sigmas that the reference says, have a root mean square of about one."""
    model = checkpoint(family, "dequantized")
    server, reference = Server(model, torch.bfloat16), Reference(model)
    answers = [server.answer(prompt) for prompt in PROMPTS]
    assert compare(reference, answers).ok
    ratios = []
    for answer in answers:
        routed = reference.run(answer.prompt + answer.tokens)
        for n, (token, logprob) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
            position = len(answer.prompt) - 1 + n
            sigma = routed.logprob_bound(position, token) / SIGMAS
            ratios.append((float(routed.logprobs[position, token]) - logprob) / sigma)
    size = torch.tensor([r for r in ratios if abs(r) < 10]).square().mean().sqrt()
    assert 0.4 < size < 2
    assert len([r for r in ratios if abs(r) < 10]) > 0.95 * len(ratios)


def test_turned_near_ties_are_explained_and_named(reference, server, decisions):
    near = sorted((d.margin / d.bound, n, d.place, d) for n, d in decisions if d.near_tied)
    explained = 0
    for _, number, place, decision in near[:6]:
        answer = server.answer(PROMPTS[number], turned=(place,))
        found = compare(reference, [*(server.answer(p) for p in PROMPTS[:2]), answer])
        assert found.ok
        assert found.explained == len(found.turned)
        for turned in found.turned:
            assert (turned.prompt, turned.decisions) == (2, [decision])
            assert turned.token == place[1] - len(PROMPTS[number]) + 1
            assert turned.logprob == pytest.approx(turned.reference_turned, abs=1e-4)
            explained += abs(turned.logprob - turned.reference) > 1
    assert explained >= 2


def test_turned_decisions_that_are_no_ties_fail(reference, server, decisions):
    clear = sorted((d.margin / d.bound, n, d.place) for n, d in decisions if d.margin > 1.2 * d.bound)
    failed = 0
    for _, number, place in [c for c in clear if len(PROMPTS[c[1]]) < 20][:8]:
        answer = server.answer(PROMPTS[number], turned=(place,))
        plain = reference.run(answer.prompt + answer.tokens)
        row, token = place[1], answer.tokens[place[1] - len(answer.prompt) + 1]
        moved = abs(float(plain.logprobs[row, token]) - answer.logprobs[row - len(answer.prompt) + 1])
        found = compare(reference, [answer])
        if moved > 0.02 + plain.logprob_bound(row, token):
            assert not found.ok
            assert found.wrong + found.apart
            failed += 1
    assert failed >= 4


def test_one_near_tie_does_not_excuse_another_error(reference, server, decisions):
    _, number, place = min((d.margin / d.bound, n, d.place) for n, d in decisions if d.near_tied)
    answer = server.answer(PROMPTS[number], turned=(place,))
    token = TOKENS - 1
    (answer,) = changed(answer, token, logprobs=answer.logprobs[token] - 1)
    assert not compare(reference, [answer]).ok


def test_few_tokens_may_be_explained(reference, server, decisions, monkeypatch):
    near = sorted((d.margin / d.bound, n, d.place) for n, d in decisions if d.near_tied)
    for _, number, place in near:
        answer = server.answer(PROMPTS[number], turned=(place,))
        if compare(reference, [answer]).explained:
            break
    found = compare(reference, [answer])
    assert not found.wrong
    assert not found.apart
    assert not found.ok  # one of 12
    monkeypatch.setattr(agreement, "EXPLAINED_SHARE", 1 / TOKENS)
    assert found.ok


@pytest.mark.parametrize("token", [0, 5, TOKENS - 1])
def test_a_wrong_token_fails(reference, answers, token):
    for answer in short(answers):
        other = (answer.tokens[token] + 7) % 256 + 3
        found = compare(reference, changed(answer, token, tokens=other))
        assert found.wrong
        assert not found.ok


@pytest.mark.parametrize("off", [0.5, -0.5, float("nan"), float("-inf")])
def test_a_wrong_logprob_fails(reference, answers, off):
    for answer in short(answers):
        routed = reference.run(answer.prompt + answer.tokens)
        bounds = [routed.logprob_bound(len(answer.prompt) - 1 + n, t) for n, t in enumerate(answer.tokens)]
        token = bounds.index(min(bounds))  # where the model is sure, far less than 0.5 is too much
        found = compare(reference, changed(answer, token, logprobs=answer.logprobs[token] + off))
        assert (found.apart, found.ok) == (1, False)


def test_a_missing_logprob_is_refused(reference, answers):
    short = dataclasses.replace(answers[1], logprobs=answers[1].logprobs[:-1])
    with pytest.raises(ValueError, match="prompt 1 has 11 log probabilities, expected 12"):
        compare(reference, [answers[0], short])


def test_nothing_to_compare_is_no_success(reference):
    assert not compare(reference, []).ok


def test_float32_has_no_near_ties(folder, answers):
    routed = Reference(folder, "float32").run(answers[2].prompt + answers[2].tokens)
    assert not [d for d in routed.decisions if d.near_tied and d.margin > 1e-5]


@pytest.mark.parametrize("family", ["qwen3-moe", "glm4-moe"])
def test_routers_that_do_something_else_are_refused(checkpoint, family):
    reference = Reference(checkpoint(family, "dequantized"))
    reference.run([5, 6, 7])
    forward = reference._routers[1].forward

    def other(hidden):
        logits, weights, ids = forward(hidden)
        return logits, weights.square(), ids

    reference._routers[1].forward = other
    with pytest.raises(ValueError, match="Router routes in a way that is not known"):
        reference.run([5, 6, 7])


def test_records_are_compared_again(folder, answers, tmp_path, capsys):
    path = tmp_path / "record.json"
    fields = {"dtype": "bfloat16", "plugin_lines": ["csf_nvfp4: served"]}
    serve_check.Record("a model", answers={"first": answers, "again": answers}, **fields).write(path)
    again = tmp_path / "again.json"
    words = [str(folder), "--recheck", str(path), "--record", str(again)]
    assert serve_check.main(words) == 0
    assert serve_check.Record.read(again).answers == {"first": answers, "again": answers}
    assert '"ok": true' in again.read_text()
    bad = [answers[0], *changed(answers[1], 3, tokens=(answers[1].tokens[3] + 7) % 256), *answers[2:]]
    serve_check.Record("a model", answers={"first": answers, "again": bad}, **fields).write(path)
    assert serve_check.main(words) == 1
    serve_check.Record("a model", dtype="bfloat16", answers={"first": answers}).write(path)
    assert serve_check.main(words) == 1  # no line of the plugin: something else was served


def test_usage(folder, capsys):
    with pytest.raises(SystemExit, match="2"):
        serve_check.main([str(folder)])
    assert "1 checkpoints, expected 2" in capsys.readouterr().err
