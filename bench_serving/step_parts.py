"""Which part of a forward step a kernel or an operator belongs to, by its name."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from pathlib import Path

ANONYMOUS = "(anonymous namespace)"
GAPS = "launch gaps"
GRAPH_GAPS = "gaps inside graphs"
"""From one kernel of a CUDA graph's launch to the next one's start: the GPU's own, no host is waited for."""
OTHER = "other"

OURS = {
    "plan": "selection",
    "score": "selection",
    "select": "selection",
    "choose": "selection",
    "attend": "attention",
    "mxfp8": "linears",
    "mxfp8_experts": "MoE",
    "mxfp8_grouped": "MoE",
    "store": "cache and page tables",
}
"""How the name of a file `kernels/m3_kernels/triton/sm90_<name>.py` begins -> the part of its Triton kernels;
the longest counts."""

PART_NAMES = (
    "collectives",
    "selection",
    "MoE",
    "norms and rope",
    "attention",
    "linears",
    "cache and page tables",
    "embedding and sampling",
    "copies and elementwise",
    OTHER,
    GRAPH_GAPS,
    GAPS,
)
"""In the order of tables and plots."""

RULES = (
    ("collectives", r"nccl|all_?reduce|all_?gather|reduce_?scatter|cross_device|multimem|lamport"),
    # Before norms, whose name "renorm" holds.
    ("embedding and sampling", r"sampling::|renorm_?prob"),
    ("selection", r"score|topk_index|decode_topk|sort_ids|merge_candidates|index_block"),
    (
        "MoE",
        r"moe|expert|topk_?(gating|softmax|sigmoid|ids|sum)|act_and_mul|swiglu|clamp_mul_sigmoid|silu|gate_topk"
        r"|router|routed|route_|m_?grouped|grouped_gemm|GemmType\)[12]|gelu_and_mul|kernel_ep_|masked_slab"
        r"|gateup|reorder|src2dst|align_single_token|deepep|shuffle_?(rows|weighted|mul_sum)",
    ),
    ("norms and rope", r"norm|rope|rotary|rsqrt"),
    (
        "attention",
        r"gqa_share_sparse|attn|attention|flash(?!infer)|_fwd_kernel|_fwd_grouped|kernel_stage[12]|kv_indices"
        r"|num_kv_splits|kv_lens|metadata|merge_?states?|(decode|prefill)with|aten::_?(log_)?softmax",
    ),
    (
        "linears",
        r"gemm(?!a)|gemv|cublas|nvjet|cutlass|xmma|split_?k|linear|matmul|scaled_mm|addmm|::b?mm\b|dot_kernel"
        r"|quant|marlin|ue8m0|transpose_fp32",
    ),
    (
        "cache and page tables",
        r"store_|set_kv|kv_buffer|reshape_and_cache|appendpagedkv|index_put|page_table|alloc_(extend|decode)"
        r"|last_loc|req_to_token|copy_pages|zero_pages",
    ),
    (
        "embedding and sampling",
        r"embedding|vectorized_gather|indexselect|argmax|sampl|multinomial|logits|softmax|sumexp|murmur",
    ),
    (
        "copies and elementwise",
        r"memcpy|memset|copy|elementwise|(?<!pre)fill|cat_?array|vectorized|reduce_kernel|triton_(poi|red|per)_"
        r"|add3_kernel|(compute|clamp)_position|devicescan|compute_cuda_kernel|^aten::",
    ),
)
"""Part of a step -> names of its kernels or operators; the first that matches."""

_PATTERNS = tuple((part, re.compile(pattern, re.IGNORECASE)) for part, pattern in RULES)


@functools.cache
def part_of(kernel: str) -> str:
    """The part that a kernel's or an operator's name belongs to: our kernels' by their file."""
    own = own_kernels().get(kernel)
    head = without_parameters(kernel)
    return own or next((part for part, pattern in _PATTERNS if pattern.search(head)), OTHER)


def without_parameters(kernel: str) -> str:
    """A C++ kernel's name and template arguments, without its return type and what it is called with, which
    is named after other things; any other name as it is."""
    depth = 0
    for place, character in enumerate(kernel):
        if character == "(" and depth == 0 and not kernel.startswith(ANONYMOUS, place):
            return kernel[:place].removeprefix("void ").rstrip()
        depth += (character == "<") - (character == ">")
    return kernel.removeprefix("void ")


@functools.cache
def own_kernels() -> dict[str, str]:
    """The part of every Triton function in `m3_kernels`, by name; needs no Triton."""
    package = importlib.util.find_spec("m3_kernels")
    assert package is not None and package.origin is not None, "m3_kernels is installed with the plugin"
    found = {}
    for path in sorted((Path(package.origin).parent / "triton").glob("sm90_*.py")):
        part = part_of_file(path.stem.removeprefix("sm90_"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if part and isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list)):
                found[node.name] = part
    return found


def part_of_file(name: str) -> str | None:
    """The part that the kernels of an operator's file belong to."""
    known = [beginning for beginning in OURS if f"{name}_".startswith(f"{beginning}_")]
    return OURS[max(known, key=len)] if known else None


def _is_jit(decorator: ast.expr) -> bool:
    """`@jit`, `@triton.jit` and either with arguments."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called).rpartition(".")[2] == "jit"
