"""The ways in which `gpu_engine` serves, and what their answers may differ by."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without a GPU `--modes eager shadow` still run, to try the script itself."""

PREFIX_TOKENS, TAIL_TOKENS, NEW_TOKENS, BRANCHES = (5000, 60, 64, 8) if DEVICE == "cuda" else (600, 9, 3, 2)

LARGEST_MEAN_ERROR, LARGEST_MEDIAN_ERROR = 0.06, 0.025
"""The tolerance of bfloat16, in nats: what a mode's log-probabilities may be from float32's over all tokens.

Stock SGLang's own modes lie at 0.030 to 0.045 and 0.014 to 0.016; a wrong block moves single tokens by 1.
"""

FLAGS = {
    "dtype": "bfloat16",
    "chunked_prefill_size": 2048,
    "max_total_tokens": 65536,
    "max_running_requests": 16,
    "context_length": 16384,
    "log_level": "info",
    "skip_tokenizer_init": True,
    "random_seed": 1,
    "page_size": 128,
    "enable_fp32_lm_head": True,
} | (
    {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "cuda_graph_max_bs_decode": 8,
        "mem_fraction_static": 0.9,
    }
    if DEVICE == "cuda"
    else {}
)
NGRAM = {
    "speculative_algorithm": "NGRAM",
    "speculative_ngram_max_bfs_breadth": 1,
    "speculative_num_draft_tokens": 6,
}
EAGER = {"disable_cuda_graph": True}
FLOAT32 = {
    "SHADOW_CHECK": "float32",
    "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
    "SGLANG_OPT_USE_BF16_ROUTER_GEMM": "0",
}
"""SGLang's and the plugin's CUDA kernels are for half precision; their plain forms take their places."""
STOCK = {"SGLANG_PLUGINS": "none"}
DECODE_GRAPHS = {"cuda_graph_backend_prefill": "disabled"}
SMALL_CHUNKS = {"chunked_prefill_size": 1024}


@dataclass(frozen=True)
class Mode:
    """One way to serve.

    Attributes:
        flags: of `sglang.Engine`, besides the common ones.
        environ: environment variables.
        records: whether the chosen blocks are recorded.
        alone: whether requests are sent one after the other, not together.
    """

    flags: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    records: bool = False
    alone: bool = False


MODES = {
    "graph": Mode(),
    "eager": Mode(EAGER, records=True),
    "graph-small-chunks": Mode(SMALL_CHUNKS),
    "decode-graph": Mode(DECODE_GRAPHS),
    "decode-graph-small-chunks": Mode(DECODE_GRAPHS | SMALL_CHUNKS),
    "stock": Mode(environ=STOCK),
    "stock-small-chunks": Mode(SMALL_CHUNKS, STOCK),
    "stock-decode-graph": Mode(DECODE_GRAPHS, STOCK),
    "stock-eager": Mode(EAGER, STOCK),
    "stock-fa3": Mode({"attention_backend": "fa3"}, STOCK),
    "shadow": Mode(EAGER, {"SHADOW_CHECK": "1"}),
    "reference": Mode(EAGER, {"SHADOW_CHECK": "reference"}, records=True),
    "graph-alone": Mode(alone=True),
    "float32": Mode(EAGER | {"dtype": "float32"}, FLOAT32),
    "ngram-float32": Mode(NGRAM | EAGER | {"dtype": "float32"}, FLOAT32),
    "ngram": Mode(NGRAM),
    "ngram-decode-graph": Mode(NGRAM | DECODE_GRAPHS),
    "ngram-eager": Mode(NGRAM | EAGER, {"SHADOW_CHECK": "1"}),
    "flashinfer": Mode({"attention_backend": "flashinfer"}),
    "fa3": Mode({"attention_backend": "fa3"}),
    "index-fp8": Mode(EAGER, {"SGLANG_M3_INDEX_DTYPE": "fp8_e4m3"}, records=True),
    "kv-fp8": Mode(EAGER | {"kv_cache_dtype": "fp8_e4m3"}, records=True),
    "kv-fp8-stock": Mode({"kv_cache_dtype": "fp8_e4m3"}, STOCK),
}

COMPARED = {
    "ngram": "graph",
    "ngram-eager": "shadow",
    "ngram-decode-graph": "ngram-eager",
    "ngram-float32": "float32",
    "graph-alone": "graph",
}
"""A mode -> the mode whose tokens its own are compared with.

In bfloat16 a token's sums are rounded otherwise with other numbers of rows, so answers part where two tokens
are about equally likely, those of `graph-alone` as well. In float32 nothing parts them.
"""

LARGEST_MEAN_ERROR_FLOAT32 = 1e-5
"""The tolerance of a model in float32. There a mode in `COMPARED` must generate the same tokens, too."""


def prompts() -> list[list[int]]:
    """One prefix, eight tails: token ids of the standard library's source."""
    import inspect
    import random

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(os.environ["M3_CHECKPOINT"])
    ids = tokenizer(inspect.getsource(inspect) + inspect.getsource(random))["input_ids"]
    tails = [ids[9000 + TAIL_TOKENS * i : 9000 + TAIL_TOKENS * (i + 1)] for i in range(BRANCHES)]
    return [ids[:PREFIX_TOKENS] + tail for tail in tails]
