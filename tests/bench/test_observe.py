"""What is read from a server's metrics and log."""

from __future__ import annotations

from vllm_csf.kernels.compiled.build import Account

from vllm_csf.bench import observe
from vllm_csf.bench.observe import Counters

METRICS = """
# HELP vllm:iteration_tokens_total Histogram
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 5.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 10.0
vllm:iteration_tokens_total_count{engine="1",model_name="m"} 2.0
vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 99.0
vllm:generation_tokens_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 8.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100",quoted="a\\"b"} 1.0
"""


def test_counters_add_up_the_engines():
    assert Counters.of(METRICS) == Counters(steps=12, generated=40, drafts=8, accepted=12)


def test_a_window_is_the_difference():
    window = Counters(20, 60, 10, 15).since(Counters.of(METRICS))
    assert window == Counters(8, 20, 2, 3)
    assert window.acceptance_length == 2.5


def test_without_drafts_there_is_no_acceptance():
    assert Counters.of("").acceptance_length is None


def test_kv_tokens_are_blocks_times_their_size():
    assert observe.kv_tokens(METRICS) == 1600
    assert observe.kv_tokens("") is None


LOG = """
(EngineCore pid=3) INFO 12-02 [nvfp4.py:250] Using 'MARLIN' NvFp4 MoE backend out of potential backends.
(Worker pid=9) INFO 12-02 [gpu_model_runner.py:1] Model loading took 31.52 GiB memory and 12.345678 seconds
(Worker pid=9) INFO 12-02 csf_nvfp4: 2 expert layers, block scales 1 KiB native
(EngineCore pid=3) INFO 12-02 [kv_cache_utils.py:1] GPU KV cache size: 1,234,560 tokens
(EngineCore pid=3) INFO 12-02 [x.py:1] Graph capturing finished in 9 secs, took 0.50 GiB
(EngineCore pid=3) INFO 12-02 [core.py:1] init engine (profile, create kv cache, warmup model) took 45.20 s
"""


def test_facts_of_a_log():
    assert observe.facts(LOG) == {
        "kv_tokens": 1234560,
        "weights_gib": 31.52,
        "load_seconds": 12.345678,
        "graph_seconds": 9.0,
        "engine_seconds": 45.2,
        "backend": "MARLIN",
        "plugin": ["csf_nvfp4: 2 expert layers, block scales 1 KiB native"],
    }


def test_a_start_says_what_was_compiled_and_what_came_from_the_cache():
    """As the plugin writes it, whatever stands before it."""
    lines = [f"csf_nvfp4: {Account(compiled=c, from_cache=12 - c).line()}" for c in (5, 0)]
    found = observe.facts("\n".join(f"(Worker pid=9) INFO 12-02 [report.py:1] {line}" for line in lines))
    assert found == {"plugin": lines}
    assert "5 compiled" in lines[0]
    assert "7 from cache" in lines[0]


def test_the_cpu_build_tells_of_weights_alone():
    assert observe.facts("Loading weights took 0.25 seconds")["load_seconds"] == 0.25


def test_a_log_without_numbers_has_no_facts():
    assert observe.facts("nothing") == {}
