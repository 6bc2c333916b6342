"""What two other engines did on the same work, on one H200 each, on 2026-11-21 and 22 (bf16, random weights).

vLLM 0.26.0 (torch 2.11, FlashAttention 3, CUDA graphs, torch.compile, asynchronous scheduling) and
SGLang 0.5.17 (torch 2.11, FlashAttention 3, overlap scheduling, radix cache), engine defaults.
"""

from __future__ import annotations

DEVICE = "NVIDIA H200"  # that they ran on

# (test, model, case, metric) → (vLLM, SGLang); None: not measured.
FIGURES: dict[tuple[str, str, str, str], tuple[float | None, float | None]] = {
    ("T1", "qwen3-0.6b", "round=0", "output_tok_s"): (23798, 21928),
    ("T1", "qwen3-0.6b", "round=1", "output_tok_s"): (24724, 21907),
    ("T1", "llama-3.1-8b", "round=0", "output_tok_s"): (10194, 9743),
    ("T1", "llama-3.1-8b", "round=1", "output_tok_s"): (10253, 9746),
    ("T1b", "qwen3-0.6b", "", "output_tok_s"): (26973, 28473),
    ("T1b", "llama-3.1-8b", "", "output_tok_s"): (10250, 10063),
    ("T2", "qwen3-0.6b", "batch=1", "step_ms"): (1.622, 1.545),
    ("T2", "qwen3-0.6b", "batch=8", "step_ms"): (1.481, 1.519),
    ("T2", "qwen3-0.6b", "batch=64", "step_ms"): (2.300, 2.301),
    ("T2", "llama-3.1-8b", "batch=1", "step_ms"): (4.872, 4.815),
    ("T2", "llama-3.1-8b", "batch=8", "step_ms"): (5.016, 5.089),
    ("T2", "llama-3.1-8b", "batch=64", "step_ms"): (6.153, 6.139),
    ("T3", "qwen3-0.6b", "1x1024", "ttft_ms"): (15.9, 8.2),
    ("T3", "qwen3-0.6b", "1x8192", "ttft_ms"): (35.7, 32.7),
    ("T3", "qwen3-0.6b", "1x32768", "ttft_ms"): (276.1, 269.4),
    ("T3", "qwen3-0.6b", "16x4096", "ttft_ms"): (193.9, 192.8),
    ("T3", "llama-3.1-8b", "1x1024", "ttft_ms"): (27.5, 28.9),
    ("T3", "llama-3.1-8b", "1x8192", "ttft_ms"): (212.1, 218.1),
    ("T3", "llama-3.1-8b", "1x32768", "ttft_ms"): (1190.6, 1184.8),
    ("T3", "llama-3.1-8b", "16x4096", "ttft_ms"): (1590.7, 1584.3),
    ("T1", "qwen3-30b-a3b", "round=0", "output_tok_s"): (5819, None),
    ("T1", "qwen3-30b-a3b", "round=1", "output_tok_s"): (6146, None),
    ("T1b", "qwen3-30b-a3b", "", "output_tok_s"): (7981, None),
    ("T2", "qwen3-30b-a3b", "batch=1", "step_ms"): (4.12, None),
    ("T2", "qwen3-30b-a3b", "batch=8", "step_ms"): (9.17, None),
    ("T2", "qwen3-30b-a3b", "batch=64", "step_ms"): (17.7, None),
    ("T3", "qwen3-30b-a3b", "1x1024", "ttft_ms"): (54, None),
    ("T3", "qwen3-30b-a3b", "1x8192", "ttft_ms"): (155, None),
    ("T3", "qwen3-30b-a3b", "1x32768", "ttft_ms"): (1099, None),
    ("T3", "qwen3-30b-a3b", "16x4096", "prefill_tok_s"): (64200, None),
    ("T4", "qwen3-30b-a3b", "round=1", "seconds"): (2.9, None),
    ("T6", "qwen3-30b-a3b", "cold", "first_token_s"): (181, None),
    ("T6", "qwen3-30b-a3b", "warm", "first_token_s"): (68, None),
    ("T4", "qwen3-0.6b", "round=0", "seconds"): (1.71, 1.59),
    ("T4", "qwen3-0.6b", "round=1", "seconds"): (1.72, 1.50),
    ("T4", "llama-3.1-8b", "round=0", "seconds"): (2.78, 2.68),
    ("T4", "llama-3.1-8b", "round=1", "seconds"): (2.69, 2.69),
    ("T5", "llama-3.1-8b", "rate=4", "output_tok_s"): (735, None),
    ("T5", "llama-3.1-8b", "rate=4", "done_req_s"): (3.4, None),
    ("T5", "llama-3.1-8b", "rate=4", "ttft_p50_ms"): (23, None),
    ("T5", "llama-3.1-8b", "rate=4", "ttft_p99_ms"): (44, None),
    ("T5", "llama-3.1-8b", "rate=4", "gap_p50_ms"): (5.0, None),
    ("T5", "llama-3.1-8b", "rate=4", "gap_p99_ms"): (10.2, None),
    ("T5", "llama-3.1-8b", "rate=4", "mean_p50_ms"): (5.1, None),
    ("T5", "llama-3.1-8b", "rate=4", "mean_p99_ms"): (5.5, None),
    ("T5", "llama-3.1-8b", "rate=16", "output_tok_s"): (2924, None),
    ("T5", "llama-3.1-8b", "rate=16", "done_req_s"): (14.8, None),
    ("T5", "llama-3.1-8b", "rate=16", "ttft_p50_ms"): (30, None),
    ("T5", "llama-3.1-8b", "rate=16", "ttft_p99_ms"): (97, None),
    ("T5", "llama-3.1-8b", "rate=16", "gap_p50_ms"): (5.7, None),
    ("T5", "llama-3.1-8b", "rate=16", "gap_p99_ms"): (25.9, None),
    ("T5", "llama-3.1-8b", "rate=16", "mean_p50_ms"): (6.6, None),
    ("T5", "llama-3.1-8b", "rate=16", "mean_p99_ms"): (7.9, None),
    ("T5", "llama-3.1-8b", "rate=32", "output_tok_s"): (5845, None),
    ("T5", "llama-3.1-8b", "rate=32", "done_req_s"): (29.8, None),
    ("T5", "llama-3.1-8b", "rate=32", "ttft_p50_ms"): (52, None),
    ("T5", "llama-3.1-8b", "rate=32", "ttft_p99_ms"): (130, None),
    ("T5", "llama-3.1-8b", "rate=32", "gap_p50_ms"): (7.8, None),
    ("T5", "llama-3.1-8b", "rate=32", "gap_p99_ms"): (41.0, None),
    ("T5", "llama-3.1-8b", "rate=32", "mean_p50_ms"): (11.0, None),
    ("T5", "llama-3.1-8b", "rate=32", "mean_p99_ms"): (15.5, None),
    ("T5", "llama-3.1-8b", "rate=64", "output_tok_s"): (8279, None),
    ("T5", "llama-3.1-8b", "rate=64", "done_req_s"): (43.1, None),
    ("T5", "llama-3.1-8b", "rate=64", "ttft_p50_ms"): (467, None),
    ("T5", "llama-3.1-8b", "rate=64", "ttft_p99_ms"): (1926, None),
    ("T5", "llama-3.1-8b", "rate=64", "gap_p50_ms"): (51.8, None),
    ("T5", "llama-3.1-8b", "rate=64", "gap_p99_ms"): (226.2, None),
    ("T5", "llama-3.1-8b", "rate=64", "mean_p50_ms"): (78.0, None),
    ("T5", "llama-3.1-8b", "rate=64", "mean_p99_ms"): (165.9, None),
    ("T5", "llama-3.1-8b", "rate=inf", "output_tok_s"): (7922, None),
    ("T5", "llama-3.1-8b", "rate=inf", "done_req_s"): (40.8, None),
    ("T5", "llama-3.1-8b", "rate=inf", "ttft_p50_ms"): (6220, None),
    ("T5", "llama-3.1-8b", "rate=inf", "ttft_p99_ms"): (12798, None),
    ("T5", "llama-3.1-8b", "rate=inf", "gap_p50_ms"): (46.9, None),
    ("T5", "llama-3.1-8b", "rate=inf", "gap_p99_ms"): (213.6, None),
    ("T5", "llama-3.1-8b", "rate=inf", "mean_p50_ms"): (76.0, None),
    ("T5", "llama-3.1-8b", "rate=inf", "mean_p99_ms"): (198.4, None),
    ("T6", "qwen3-0.6b", "cold", "first_token_s"): (149.8, 68.4),
    ("T6", "qwen3-0.6b", "warm", "first_token_s"): (41.1, 33.1),
    ("T6", "llama-3.1-8b", "cold", "first_token_s"): (143.9, 64.5),
    ("T6", "llama-3.1-8b", "warm", "first_token_s"): (51.1, None),
}


def best(test: str, model: str, case: str, metric: str) -> float | None:
    """The better peer's figure: the larger for rates, the smaller for times."""
    figures = [f for f in FIGURES.get((test, model, case, metric), ()) if f is not None]
    if not figures:
        return None
    return max(figures) if is_rate(metric) else min(figures)


def is_rate(metric: str) -> bool:
    """Whether more is better."""
    return metric.endswith(("tok_s", "req_s"))
