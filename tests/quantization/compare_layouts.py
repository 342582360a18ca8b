"""What coarser scales cost, on the CPU: `fast`, re-quantising by the maximum, and FP8 activations.

    python -m tests.quantization.compare_layouts

One expert at M3's size, for weights of several distributions, and the log-probabilities of a small checkpoint
in transformers' own model. Prints two Markdown tables.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from m3_kernels import dequantize_mxfp8, quantize_mxfp8
from m3_kernels.reference.coarsen_mxfp8 import BLOCK, coarsen_mxfp8
from torch import Tensor
from transformers import AutoTokenizer

from sglang_m3.quantize import quantize_checkpoint
from sglang_m3.quantize.names import is_quantized
from sglang_m3.tiny import TinyConfig, build
from tests import oracle
from tests.quantization.edited import dequantise, edited

HIDDEN, WIDTH, TOKENS = 6144, 3072, 32
ALPHA, LIMIT = 1.702, 7.0
Numbers = Callable[[Tensor, Tensor], Tensor]
"""MXFP8 values and scales -> float32 numbers that a layout multiplies by."""


def exact(value: Tensor, scale: Tensor) -> Tensor:
    return dequantize_mxfp8(value, scale, torch.float32)


def coarsened(value: Tensor, scale: Tensor) -> Tensor:
    value, scale = value.clone(), scale.clone()
    coarsen_mxfp8(value, scale)
    return exact(value, scale)


def by_maximum(value: Tensor, scale: Tensor) -> Tensor:
    """128 x 128 blocks divided by their largest magnitude over 448 and rounded again, as SGLang converts."""
    rows, columns = value.shape
    blocks = exact(value, scale).view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    unit = blocks.abs().amax((1, 3), keepdim=True) / 448
    return ((blocks / unit).to(torch.float8_e4m3fn).float() * unit).view(rows, columns)


def fp8_rows(x: Tensor) -> Tensor:
    """Activations rounded to E4M3 with one scale per row and 128 columns."""
    groups = x.unflatten(-1, (-1, 128))
    unit = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return ((groups / unit).to(torch.float8_e4m3fn).float() * unit).flatten(-2)


def expert(x: Tensor, w13: Tensor, w2: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = (rounded(x) @ w13.T).chunk(2, -1)
    gate = gate.clamp(max=LIMIT)
    hidden = (up.clamp(-LIMIT, LIMIT) + 1) * gate * torch.sigmoid(ALPHA * gate)
    return rounded(hidden) @ w2.T


def distributions() -> dict[str, Callable[[int, int], Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def channels(rows: int, columns: int) -> Tensor:
        spread = torch.exp(torch.randn(columns, generator=generator)) / torch.e**0.5
        return normal(rows, columns) * spread

    def tailed(rows: int, columns: int) -> Tensor:
        return normal(rows, columns) / torch.rand(rows, columns, generator=generator).clamp(min=1e-3).sqrt()

    return {"normal": normal, "columns of unequal size": channels, "heavy tails": tailed}


def compare_expert() -> None:
    print("| weights | values changed | weight error, `fast` | by the maximum | layer error, `fast` weights "
          "| by the maximum | FP8 activations alone | `fast` with FP8 activations |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    for name, draw in distributions().items():
        given = [quantize_mxfp8(draw(*shape)) for shape in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))]
        numbers = {how: [how(*pair) for pair in given] for how in (exact, coarsened, by_maximum)}
        changed = sum(int((a != b).sum()) for a, b in zip(numbers[exact], numbers[coarsened]))
        total = sum(value.numel() for value, _ in given)
        want = expert(x, *numbers[exact], lambda v: v)

        def weight_error(how: Numbers) -> float:
            pairs = zip(numbers[how], numbers[exact])  # noqa: B023
            return max(float((got - right).norm() / right.norm()) for got, right in pairs)

        def layer_error(how: Numbers, rounded: Callable[[Tensor], Tensor] = lambda v: v) -> float:
            got = expert(x, *numbers[how], rounded)  # noqa: B023
            return float((got - want).norm() / want.norm())  # noqa: B023

        cells = [
            name,
            f"{100 * changed / total:.3f}%",
            f"{weight_error(coarsened):.1e}",
            f"{weight_error(by_maximum):.1e}",
            f"{layer_error(coarsened):.1e}",
            f"{layer_error(by_maximum):.1e}",
            f"{layer_error(exact, fp8_rows):.1e}",
            f"{layer_error(coarsened, fp8_rows):.1e}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


def compare_logits() -> None:
    scratch = Path(tempfile.mkdtemp())
    generator = torch.Generator().manual_seed(2)

    def spread(tensors: dict[str, Tensor]) -> None:
        for name in filter(is_quantized, tensors):
            factor = torch.exp(torch.randn(tensors[name].shape[1], generator=generator)) / torch.e
            tensors[name] = (tensors[name].float() * factor).bfloat16()

    plain = edited(build(scratch / "m3", TinyConfig(hidden=256)), scratch / "spread", spread)
    checkpoint = quantize_checkpoint(plain, scratch / "mxfp8")
    ids = AutoTokenizer.from_pretrained(checkpoint)(inspect.getsource(inspect))["input_ids"][:1500]

    def variant(how: Numbers) -> Tensor:
        def edit(tensors: dict[str, Tensor]) -> None:
            for name in [name for name in tensors if f"{name}_scale_inv" in tensors]:
                value, scale = tensors[name], tensors[f"{name}_scale_inv"]
                if value.shape[0] % BLOCK == 0 and value.shape[1] % BLOCK == 0:
                    tensors[name] = how(value, scale)
                    del tensors[f"{name}_scale_inv"]
            dequantise(tensors)

        folder = edited(checkpoint, scratch / how.__name__, edit, declared=False)
        return oracle.logprobs(oracle.load_oracle(folder), ids)

    want = variant(exact)
    print("\n| weights | log-probabilities: mean difference | largest | same most likely token |")
    print("|---|---|---|---|")
    for name, how in (("`fast`", coarsened), ("by the maximum", by_maximum)):
        got = variant(how)
        taken = torch.tensor(ids[1:])[:, None]
        difference = (got[:-1].gather(1, taken) - want[:-1].gather(1, taken)).abs()
        same = float((got.argmax(-1) == want.argmax(-1)).float().mean())
        print(
            f"| {name} | {float(difference.mean()):.1e} | {float(difference.max()):.1e} | {100 * same:.1f}% |"
        )


if __name__ == "__main__":
    compare_expert()
    compare_logits()
