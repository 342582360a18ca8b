"""One of the two products of SGLang's BF16 experts, launched under a division of the work that we choose.

`tune_experts` builds on it: which divisions are worth trying for so many tokens, compiling them on many
processes, running one, and what the result has to be.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Product = Literal["up", "down"]
"""Hidden to gate and up, `[2 * width, hidden]`, or back, `[hidden, width]`."""

SHARED_MEMORY = 226 << 10
"""Bytes that a program may have on sm90, less what barriers take."""
EARLY_ROWS = 512
"""SGLang compiles a kernel of its own for inputs with more rows than that."""


@dataclass(frozen=True)
class Experts:
    """The routed experts of one rank.

    Attributes:
        local: experts on the rank.
        width: intermediate size of an expert on the rank.
        model: experts of the model, over all ranks.
        choices: experts that a token chooses.
    """

    local: int
    width: int
    model: int = 128
    choices: int = 4
    hidden: int = 6144

    def shape(self, product: Product) -> tuple[int, int]:
        """Rows and columns of an expert's weight."""
        return (2 * self.width, self.hidden) if product == "up" else (self.hidden, self.width)

    def rows_each(self, tokens: int) -> float:
        """Tokens that an expert receives on average."""
        return tokens * self.choices / self.model


@dataclass(frozen=True)
class Division:
    """How a product is cut into programs, in the terms of SGLang's configuration files.

    Attributes:
        rows, columns, depth: BLOCK_SIZE_M, BLOCK_SIZE_N and BLOCK_SIZE_K.
        group: GROUP_SIZE_M, blocks of rows that walk the weight together.
        descriptor: USE_TMA. For the second product it also says that rows between the two are in the order of
            the experts, and those of other ranks' experts are neither written nor read.
    """

    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int
    descriptor: bool = False

    def launch_options(self) -> dict[str, int]:
        """What SGLang hands its kernel."""
        return {
            "BLOCK_SIZE_M": self.rows,
            "BLOCK_SIZE_N": self.columns,
            "BLOCK_SIZE_K": self.depth,
            "GROUP_SIZE_M": self.group,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }

    def entry(self) -> dict[str, int | bool]:
        """Its entry in a configuration file."""
        return {**self.launch_options(), **({"USE_TMA": True} if self.descriptor else {})}

    @property
    def shared_memory(self) -> int:
        """Bytes of the blocks in flight; Hopper's matrix instructions read the last one from there, too."""
        in_flight = self.stages if self.rows >= 64 else self.stages - 1
        return 2 * self.depth * (self.rows + self.columns) * in_flight


FEW = (  # columns, depth, warps, stages
    (32, 128, 4, 4),
    (32, 128, 4, 6),
    (32, 256, 4, 3),
    (32, 256, 4, 5),
    (64, 64, 4, 6),
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (64, 128, 4, 5),
    (64, 128, 4, 6),
    (64, 128, 8, 5),
    (64, 256, 4, 3),
    (64, 256, 8, 3),
    (64, 256, 4, 4),
    (64, 256, 8, 5),
    (128, 64, 4, 4),
    (128, 64, 4, 6),
    (128, 64, 8, 5),
    (128, 128, 4, 3),
    (128, 128, 4, 4),
    (128, 128, 8, 3),
    (128, 128, 8, 4),
    (128, 128, 8, 5),
    (128, 256, 8, 3),
    (256, 64, 8, 4),
    (256, 64, 8, 5),
    (256, 128, 8, 3),
)
"""Up to half a block of rows for each expert: reading weights is all that counts."""
VERY_FEW = tuple(cut for cut in FEW if cut[0] <= 64)
"""One or two tokens, which touch an expert or none."""
SOME = (
    (64, 64, 4, 4),
    (64, 128, 4, 4),
    (64, 128, 4, 5),
    (128, 64, 4, 4),
    (128, 64, 4, 5),
    (128, 64, 8, 5),
    (128, 128, 4, 3),
    (128, 128, 8, 3),
    (128, 128, 8, 4),
    (256, 64, 8, 4),
    (256, 64, 8, 5),
)
"""About a block of rows for each expert."""
MANY = {
    64: (
        (128, 64, 4, 3),
        (128, 64, 4, 4),
        (128, 64, 4, 5),
        (128, 128, 4, 3),
        (128, 128, 8, 3),
        (256, 64, 8, 3),
        (256, 64, 8, 4),
        (256, 64, 8, 5),
    ),
    128: (
        (128, 64, 4, 3),
        (128, 64, 4, 4),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (128, 128, 8, 3),
        (256, 64, 8, 3),
        (256, 64, 8, 4),
    ),
}
"""By height of a block: enough rows for Hopper's matrix instructions."""


def divisions(experts: Experts, tokens: int) -> Iterator[Division]:
    """What to try for so many tokens, in no order."""
    each = experts.rows_each(tokens)
    tried: list[tuple[int, int, tuple[tuple[int, int, int, int], ...]]] = []
    if tokens * experts.choices < 16:
        tried.append((16, 1, VERY_FEW))
    elif each <= 8:
        tried.append((16, 1, FEW))
    if 8 <= each <= 32:
        tried.append((32, 8, SOME))
    if 12 <= each <= 16:
        tried.append((16, 8, FEW[5:9] + FEW[14:22]))
    if each >= 16:
        tried.append((64, 8, MANY[64]))
    if each >= 64:
        tried += [(128, 8, MANY[128]), (128, 32, MANY[128][3:])]
    for rows, group, cuts in tried:
        for (columns, depth, warps, stages), descriptor in itertools.product(cuts, (False, True)):
            division = Division(rows, columns, depth, group, warps, stages, descriptor)
            if division.shared_memory <= SHARED_MEMORY:
                yield division


@dataclass(frozen=True)
class Kernel:
    """What SGLang compiles once.

    Attributes:
        aligned: the number of choices is a multiple of 16.
        early: the input has up to `EARLY_ROWS` rows.
        ordered: rows between the products are in the order of the experts.
    """

    product: Product
    division: Division
    aligned: bool
    early: bool
    ordered: bool


def kernel_of(experts: Experts, product: Product, division: Division, tokens: int, ordered: bool) -> Kernel:
    """The compiled kernel that a product takes for so many tokens."""
    choices = tokens * experts.choices
    rows = tokens
    if product == "down":
        rows = choices + (min(choices, experts.local + 1) * (division.rows - 1) if ordered else 0)
    return Kernel(product, division, choices % 16 == 0, rows <= EARLY_ROWS, ordered)


@dataclass(frozen=True)
class Blocks:
    """A step's choices, sorted by expert and padded to blocks; ids and weights `[tokens, choices]`."""

    order: Tensor
    experts: Tensor
    padded: Tensor
    ids: Tensor
    weights: Tensor


def run_product(
    kernel: Kernel, experts: Experts, blocks: Blocks, given: Tensor, weight: Tensor, out: Tensor
) -> Tensor:
    """Launch SGLang's kernel. `given` and `out` are as `_fused_moe_kernel_sequence` passes them."""
    import triton.language as tl
    from sglang.kernels.ops.moe.fused_moe_triton_kernels import invoke_fused_moe_kernel

    up = kernel.product == "up"
    descriptor = kernel.division.descriptor
    invoke_fused_moe_kernel(
        given,
        weight,
        None,
        out,
        None,
        None,
        None,
        blocks.weights,
        blocks.ids,
        blocks.order,
        blocks.experts,
        blocks.padded,
        not up,
        experts.choices if up else 1,
        kernel.division.launch_options(),
        compute_type=tl.bfloat16,
        use_fp8_w8a8=False,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        use_int4_w4a16=False,
        per_channel_quant=False,
        a_use_tma=descriptor and not up,
        b_use_tma=descriptor,
        c_sorted=kernel.ordered and up,
        filter_expert=experts.local < experts.model,
        router_topk=1 if up else experts.choices,
    )
    return out


def compile_kernel(experts: Experts, kernel: Kernel) -> str | None:
    """Launch it with nothing to do, so that the cache on disk has it; returns what went wrong."""
    rows, columns = experts.shape(kernel.product)
    choices = 32 if kernel.aligned else 8
    given = torch.empty(
        EARLY_ROWS if kernel.early else 2 * EARLY_ROWS, columns, device="cuda", dtype=torch.bfloat16
    )
    weight = torch.empty(1, rows, columns, device="cuda", dtype=torch.bfloat16)
    order = torch.zeros(kernel.division.rows, device="cuda", dtype=torch.int32)
    none = torch.zeros(1, device="cuda", dtype=torch.int32)
    ids = torch.full((choices // experts.choices, experts.choices), -1, device="cuda", dtype=torch.int32)
    blocks = Blocks(order, none, none, ids, torch.zeros(ids.shape, device="cuda"))
    try:
        run_product(kernel, experts, blocks, given, weight, given.new_empty(choices, rows))
        torch.cuda.synchronize()
    except Exception as error:  # A division that Triton cannot compile is a result of the search.
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def expected_product(kernel: Kernel, blocks: Blocks, given: Tensor, weight: Tensor, choices: int) -> Tensor:
    """The product in float64, a row for each choice; zero for choices of other ranks' experts."""
    ids = blocks.ids.flatten()
    out = torch.zeros(ids.numel(), weight.shape[1], device=given.device, dtype=torch.float64)
    for expert in ids[ids >= 0].unique().tolist():
        (chosen,) = torch.where(ids == expert)
        rows = chosen // choices if kernel.product == "up" else chosen
        out[chosen] = given[rows].double() @ weight[expert].double().T
        if kernel.product == "down":
            out[chosen] *= blocks.weights.flatten()[chosen].double()[:, None]
    return out


def in_order(rows: Tensor, order: Tensor) -> Tensor:
    """Rows of choices, in the order of the experts' blocks; zeros where a block is padded."""
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return padded[order.long().clamp(0, len(rows))]
