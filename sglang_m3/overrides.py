"""Server arguments for M3: page size 128, and the checks that stop a start which cannot work."""

from __future__ import annotations

import logging
import os
from typing import Any

from m3_kernels.rows import BLOCK_TOKENS

from sglang_m3 import hardware
from sglang_m3.architectures import M3_ARCHITECTURES

logger = logging.getLogger(__name__)


SERVED_BY_SGLANG = ("minimax_m3_nvfp4", "modelopt_mixed")
"""Quantisations of M3 that SGLang serves on Hopper itself; the plugin stays out of their way."""


class UnsupportedError(ValueError):
    """A flag, or a combination, that cannot serve M3 here; the message says what to do instead."""


def register() -> None:
    """Register the provider after SGLang's own for M3, so that it has the last word."""
    import sglang.srt.arg_groups.overrides  # noqa: F401
    from sglang.srt.arg_groups.model_override_base import register_model_override

    for architecture in M3_ARCHITECTURES:
        register_model_override(architecture)(provide)


def provide(server_args: Any, hf_config: Any) -> dict[str, Any]:
    """Model override provider (`register_model_override`): resolved server arguments for M3.

    Raises:
        UnsupportedError: with the flag and the way out. SGLang lets it propagate, so the server stops before
            weights load.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view

    target = hardware.target()
    if target is None:
        logger.info("sglang-m3: neither a Hopper GPU nor a machine without a GPU; SGLang is left as it is.")
        return {}
    args = resolving_view(server_args)
    if target == "sm90" and args.quantization in SERVED_BY_SGLANG:
        logger.info(
            "sglang-m3: %s checkpoints are SGLang's own on Hopper, and left to it.", args.quantization
        )
        return {}
    from sglang_m3.attention.parameters import SelectionParameters

    try:
        SelectionParameters.from_hf_config(hf_config)
    except ValueError as error:
        raise UnsupportedError(f"this checkpoint's config.json: {error}") from error
    _check(args, target)
    resolved: dict[str, Any] = {"page_size": BLOCK_TOKENS}
    if target == "cpu":
        resolved |= _without_gpu(server_args)
    return resolved


def _check(args: Any, target: hardware.Target) -> None:
    if args.page_size not in (None, BLOCK_TOKENS):
        raise UnsupportedError(
            f"--page-size {args.page_size}: a page is a block of {BLOCK_TOKENS} tokens in MiniMax-M3; "
            f"leave the flag out or pass {BLOCK_TOKENS}"
        )
    chunk = args.chunked_prefill_size
    if chunk is not None and chunk > 0 and chunk % BLOCK_TOKENS:
        raise UnsupportedError(
            f"--chunked-prefill-size {chunk} is not a multiple of {BLOCK_TOKENS}; "
            f"pass {max(1, chunk // BLOCK_TOKENS) * BLOCK_TOKENS}"
        )
    if args.quantization is not None:
        raise UnsupportedError(
            f"quantization {args.quantization} is not supported on {_name(target)} yet; "
            "serve the BF16 checkpoint without --quantization"
        )
    if args.speculative_algorithm is not None:
        raise UnsupportedError(
            f"--speculative-algorithm {args.speculative_algorithm} is not supported with MiniMax-M3 yet; "
            "leave the flag out"
        )
    if args.enable_hisparse:
        raise UnsupportedError("--enable-hisparse is not supported with sglang-m3; leave the flag out")


def _without_gpu(args: Any) -> dict[str, Any]:
    # What the user gave: by now SGLang has filled in its own CPU engine's backend where nothing was given.
    for flag in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        value = getattr(args, flag)
        if value not in (None, "torch_native"):
            raise UnsupportedError(
                f"--{flag.replace('_', '-')} {value} needs a GPU, and there is none; leave the flag out"
            )
    if args.kv_cache_dtype not in ("auto", "bfloat16", "bf16"):
        raise UnsupportedError(
            f"--kv-cache-dtype {args.kv_cache_dtype} is not supported without a GPU; leave the flag out"
        )
    if args.tp_size != 1 or args.pp_size != 1 or args.ep_size != 1:
        raise UnsupportedError(
            "more than one rank (--tp-size, --pp-size, --ep-size) is not supported without a GPU; "
            "leave the flags out"
        )
    from sglang.srt.environ import envs

    # torch.mm with an output dtype exists on CUDA only; the router is then computed in float32.
    if not envs.SGLANG_OPT_USE_BF16_ROUTER_GEMM.is_set():
        envs.SGLANG_OPT_USE_BF16_ROUTER_GEMM.set(False)
    # Small functions that SGLang compiles cost minutes of compiler time and are not worth it here. The
    # variable is read by the processes that SGLang is about to start.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    return {"attention_backend": "torch_native"}


def _name(target: hardware.Target) -> str:
    return "Hopper GPUs" if target == "sm90" else "a machine without a GPU"
