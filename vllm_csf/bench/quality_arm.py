"""One arm of the quality measurement, in a process of its own: what the real engine answers.

    python -m vllm_csf.bench.quality_arm JOB.json RESULT.json

JOB: {"flags": [...], "prompts": [[token, ...]], "scored": [[token, ...]], "tokens": n, "top": k}.
RESULT: {"answers": [[token, ...]], "answer_logprobs": [[float, ...]], "scored": [[{token: logprob}, ...]],
"seconds": of starting the engine}; a scored sequence has an entry for each of its tokens but the first, with
the token itself and the top k.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    began = time.perf_counter()
    llm = engine(job["flags"])
    seconds = time.perf_counter() - began
    answers, logprobs = generate(llm, job["prompts"], job["tokens"])
    result = {
        "answers": answers,
        "answer_logprobs": logprobs,
        "scored": score(llm, job["scored"], job["top"]),
        "seconds": round(seconds, 1),
    }
    Path(sys.argv[2]).write_text(json.dumps(result))
    return 0


def engine(flags: list[str]) -> Any:
    import vllm
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = vllm.EngineArgs.add_cli_args(FlexibleArgumentParser())
    return vllm.LLM(**vars(parser.parse_args(flags)))


def generate(llm: Any, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy answers and the log probability of each of their tokens."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=tokens, temperature=0, logprobs=1, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
    answers, logprobs = [], []
    for output in outputs:
        chosen = output.outputs[0]
        ids = list(chosen.token_ids)
        answers.append(ids)
        logprobs.append([step[token].logprob for step, token in zip(chosen.logprobs, ids, strict=True)])
    return answers, logprobs


def score(llm: Any, sequences: list[list[int]], top: int) -> list[list[dict[int, float]]]:
    """Log probabilities at every place of given sequences: all arms see the same tokens before it."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=top)
    outputs = llm.generate([{"prompt_token_ids": s} for s in sequences], parameters, use_tqdm=False)
    return [
        [{token: entry.logprob for token, entry in place.items()} for place in output.prompt_logprobs[1:]]
        for output in outputs
    ]


if __name__ == "__main__":
    sys.exit(main())
