"""Server arguments for M3: page size 128, and the checks that stop a start which cannot work."""

from __future__ import annotations

import logging
import os
from typing import Any

from m3_kernels.rows import BLOCK_TOKENS

from sglang_m3 import checkpoint, hardware, settings
from sglang_m3.architectures import M3_ARCHITECTURES
from sglang_m3.config import ConfigError, M3Config

logger = logging.getLogger(__name__)

SERVED_BY_SGLANG = ("minimax_m3_nvfp4", "modelopt_mixed")
"""Quantisations of M3 that SGLang serves on Hopper itself; the plugin stays out of their way."""

SERVED = ("mxfp8", "m3_mxfp8")
"""Quantisations that the plugin serves: what users say, and what it is resolved to."""

WITH_MXFP8 = {
    "moe_runner_backend": ("auto", "deep_gemm", "triton"),
    "moe_a2a_backend": ("none",),
}
"""Server argument -> the values that work with MXFP8 weights; all MoE runners mean the plugin's."""

NOT_YET = {
    "enable_hisparse": (False,),
    "enable_two_batch_overlap": (False,),
    "enable_pdmux": (False,),
    "enable_single_batch_overlap": (False,),
    "enable_lora": (None, False),
    "lora_paths": (None,),
    "moe_a2a_backend": ("none",),
    "moe_dense_tp_size": (None,),
    "moe_dp_size": (1,),
    "dwdp_size": (1,),
    "enable_eplb": (False,),
    "ep_num_redundant_experts": (0,),
    "init_expert_location": ("trivial",),
    "expert_distribution_recorder_mode": (None,),
    "enable_dp_attention": (False,),
    "attn_dp_size": (1,),
    "attn_cp_size": (1,),
    "dcp_size": (1,),
    "enable_prefill_cp": (False,),
    # A sum of attention may differ in its last bit with the batch; blocks and their scores do not.
    "enable_deterministic_inference": (False,),
    "is_embedding": (False,),
    # SGLang loads no plugins in further tokenizer processes.
    "tokenizer_worker_num": (1,),
}
"""Server argument -> the values that work with the plugin."""

NOT_WITHOUT_GPU = {
    "attention_backend": (None, "torch_native"),
    "prefill_attention_backend": (None, "torch_native"),
    "decode_attention_backend": (None, "torch_native"),
    "kv_cache_dtype": ("auto", "bfloat16", "bf16"),
    "speculative_algorithm": (None,),
    "dp_size": (1,),
}

NOT_ON_HOPPER_YET = {
    # It makes chunks larger than the flag says, which workspaces are sized by.
    "enable_dynamic_chunking": (False,),
    "dtype": ("auto", "bfloat16", "bf16"),
    "kv_cache_dtype": ("auto", "bfloat16", "bf16", "fp8_e4m3"),
    "speculative_algorithm": (None, "NGRAM"),
}


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
        CheckpointError: a weight file is missing or cut short.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view

    target = hardware.target()
    if target is None:
        logger.info("sglang-m3: neither a Hopper GPU nor a machine without a GPU; SGLang is left as it is.")
        return {}
    args = resolving_view(server_args)
    quantization = _quantization(server_args, hf_config)
    if target == "sm90" and quantization in SERVED_BY_SGLANG:
        logger.info("sglang-m3: on Hopper %s is SGLang's own, and left to it.", quantization)
        return {}
    _check_declared(quantization, hf_config)
    answer = _serve_mxfp8(args) if quantization in SERVED else {}
    if quantization is not None and not answer:
        raise UnsupportedError(
            f"quantization {quantization} of MiniMax-M3 is not supported on {_name(target)}; "
            "serve the BF16 checkpoint, without --quantization or with --quantization mxfp8"
        )
    _check_checkpoint(hf_config)
    checkpoint.check_local(args.model_path, args.load_format)
    _check_chunks(args, target)
    _refuse(args, NOT_YET, "with sglang-m3 yet")
    _check_ranks(args)
    if target == "sm90":
        _refuse(args, NOT_ON_HOPPER_YET, "on Hopper with sglang-m3 yet")
        _check_graphs(args)
        _check_speculation(args)
        return answer | {"page_size": BLOCK_TOKENS}
    # What the user gave: by now SGLang has filled in its own CPU engine's backend where nothing was given.
    _refuse(server_args, NOT_WITHOUT_GPU, "without a GPU, and there is none")
    if settings.read().index_dtype != "bfloat16":
        raise UnsupportedError(
            "SGLANG_M3_INDEX_DTYPE has no effect without a GPU, and there is none; unset it"
        )
    _prepare_environment(args.tp_size * args.pp_size)
    return answer | {"page_size": BLOCK_TOKENS, "attention_backend": "torch_native"}


def _serve_mxfp8(args: Any) -> dict[str, Any]:
    """MXFP8 under the name of the plugin's own method, to which SGLang's rules for `mxfp8` do not apply.

    SGLang's rules would replace most MoE runners by one for Blackwell.
    """
    from sglang_m3.quantization.config import METHOD
    from sglang_m3.quantization.layout import has_deep_gemm

    _refuse(args, WITH_MXFP8, "for MXFP8 weights with sglang-m3")
    if settings.read().mxfp8 == "fast" and hardware.target() == "sm90" and not has_deep_gemm():
        raise UnsupportedError("SGLANG_M3_MXFP8=fast needs DeepGEMM (sgl-deep-gemm); install it or use exact")
    return {"quantization": METHOD}


def _quantization(server_args: Any, hf_config: Any) -> str | None:
    """What the flag says, else what the checkpoint declares, as SGLang's own provider for M3 decides it.

    SGLang's decision is not visible yet: all providers are asked before any answer counts.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.model_overrides.minimax_m3 import _resolve_quant_method

    given = resolving_view(server_args).quantization
    if given is not None or server_args._quantization_explicitly_unset:
        return given
    return _resolve_quant_method(hf_config)


def _check_declared(quantization: str | None, hf_config: Any) -> None:
    from sglang.srt.arg_groups.model_overrides.minimax_m3 import _resolve_quant_method

    declared = _resolve_quant_method(hf_config)
    if quantization in SERVED and declared in SERVED_BY_SGLANG:
        raise UnsupportedError(
            f"--quantization {quantization}: this checkpoint's weights are {declared}; leave the flag out"
        )


def _check_checkpoint(hf_config: Any) -> None:
    try:
        M3Config.read(hf_config)
    except ConfigError as error:
        raise UnsupportedError(f"this checkpoint's config.json: {error}") from error


def _check_chunks(args: Any, target: hardware.Target) -> None:
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
    if target == "sm90" and chunk is not None and chunk <= 0:
        # SGLang admits a prompt of any length then, and the workspaces are sized for the largest chunk.
        raise UnsupportedError(
            f"--chunked-prefill-size {chunk}: prefill without chunks is not supported on Hopper with "
            "sglang-m3; pass 8192"
        )


def _check_ranks(args: Any) -> None:
    if args.tp_size > 1 and args.pp_size > 1:
        raise UnsupportedError(
            f"--tp-size {args.tp_size} with --pp-size {args.pp_size} has not been tried with sglang-m3 yet; "
            "use one of them"
        )


def _check_graphs(args: Any) -> None:
    decode, prefill = args.cuda_graph_config.decode, args.cuda_graph_config.prefill
    if prefill.backend == "full":
        raise UnsupportedError(
            "--cuda-graph-backend-prefill full is not supported with sglang-m3 yet; leave the flag out"
        )
    chunk, largest = args.chunked_prefill_size, max([prefill.max_bs or 0, *(prefill.bs or ())])
    if prefill.backend != "disabled" and chunk is not None and largest > chunk:
        raise UnsupportedError(
            f"a prefill graph of {largest} tokens is larger than any step, --chunked-prefill-size {chunk}; "
            f"pass --cuda-graph-max-bs-prefill {chunk}, or no larger --cuda-graph-bs-prefill"
        )
    if settings.read().record_blocks is not None and {decode.backend, prefill.backend} != {"disabled"}:
        raise UnsupportedError("SGLANG_M3_RECORD_BLOCKS needs --disable-cuda-graph on a GPU; add the flag")


def _check_speculation(args: Any) -> None:
    breadth = args.speculative_ngram_max_bfs_breadth
    if args.speculative_algorithm == "NGRAM" and breadth > 1:
        raise UnsupportedError(
            f"--speculative-ngram-max-bfs-breadth {breadth}: sglang-m3 verifies drafts that are chains, not "
            "trees; pass --speculative-ngram-max-bfs-breadth 1"
        )


def _refuse(args: Any, working: dict[str, tuple[Any, ...]], where: str) -> None:
    for name, values in working.items():
        value = getattr(args, name)
        if value not in values:
            raise UnsupportedError(
                f"--{name.replace('_', '-')} {value} is not supported {where}; leave the flag out"
            )


def _prepare_environment(ranks: int) -> None:
    """Environment of the processes that SGLang is about to start on a machine without a GPU."""
    from sglang.srt.environ import envs

    # torch.mm with an output dtype exists on CUDA only; the router is then computed in float32.
    if not envs.SGLANG_OPT_USE_BF16_ROUTER_GEMM.is_set():
        envs.SGLANG_OPT_USE_BF16_ROUTER_GEMM.set(False)
    # Small functions that SGLang compiles cost minutes of compiler time and are not worth it here.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if ranks > 1:
        # SGLang wants a NUMA node for each rank, or to be told which cores each may use.
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // ranks)
        shares = [cores[rank * share % len(cores) :][:share] for rank in range(ranks)]
        bound = "|".join(",".join(map(str, own)) for own in shares)
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", bound)


def _name(target: hardware.Target) -> str:
    return "Hopper GPUs" if target == "sm90" else "a machine without a GPU"
