"""Which part of a forward step a kernel or an operator belongs to, by its name."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from pathlib import Path

GAPS = "launch gaps"
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
    "store": "cache writes",
}
"""How the name of a file `kernels/m3_kernels/triton/sm90_<name>.py` begins -> the part of its Triton kernels;
the longest counts."""

PARTS = (
    ("collectives", r"nccl|all_?reduce|all_?gather|cross_device"),
    ("selection", r"score|topk_index|sort_ids|merge_candidates|index_block"),
    (
        "MoE",
        r"moe|expert|topk_?(gating|softmax|sigmoid)|act_and_mul|swiglu|clamp_mul_sigmoid|silu|gate_topk|router"
        r"|m_?grouped|grouped_gemm|GemmType\)[12]|gelu_and_mul|kernel_ep_|masked_slab|gateup|reorder|src2dst",
    ),
    ("norms and rope", r"norm|rope|rotary"),
    (
        "attention",
        r"gqa_share_sparse|attn|attention|flash(?!infer)|_fwd_kernel|_fwd_grouped|kernel_stage[12]|kv_indices"
        r"|num_kv_splits|merge_?states?|softmax|(decode|prefill)with",
    ),
    (
        "linears",
        r"gemm|gemv|cublas|nvjet|cutlass|xmma|splitk|linear|matmul|scaled_mm|addmm|::b?mm\b|dot_kernel|quant",
    ),
    ("cache writes", r"store_|set_kv|reshape_and_cache|index_put"),
    ("embedding and sampling", r"embedding|argmax|sampl|multinomial|logits"),
    (
        "copies and elementwise",
        r"memcpy|memset|copy|elementwise|fill|cat_?array|vectorized|reduce_kernel|triton_poi",
    ),
)
"""Part of a step -> names of its kernels or operators; the first that matches."""

PART_NAMES = (*(name for name, _ in PARTS), OTHER, GAPS)
_PATTERNS = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in PARTS)


def part_of(kernel: str) -> str:
    """The part that a kernel's or an operator's name belongs to: our kernels' by their file."""
    own = own_kernels().get(kernel)
    return own or next((name for name, pattern in _PATTERNS if pattern.search(kernel)), OTHER)


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
