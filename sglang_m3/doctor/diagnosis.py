"""Puts together what the doctor says: flags, operators, memory, problems with their remedies."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from sglang_m3 import settings
from sglang_m3.architectures import M3_ARCHITECTURES
from sglang_m3.config import M3Config
from sglang_m3.doctor.machine import Machine
from sglang_m3.doctor.memory import (
    ELEMENT_BYTES,
    Parallel,
    RankMemory,
    StepSizes,
    WeightFormat,
    check_division,
    rank_memory,
)
from sglang_m3.doctor.resolve import Resolution
from sglang_m3.experts import tuned
from sglang_m3.overrides import SERVED, SERVED_BY_SGLANG
from sglang_m3.ports import PortTakenError, check_port

DEFAULT_REQUESTS = 4096
"""Running requests that workspaces are sized for where `--max-running-requests` is not given."""


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found. `problems` stop a server, `notes` do not.

    Attributes:
        machine, model: what was asked about.
        flags: server argument -> its value and what it resolves to, where given or changed.
        operators: part of the model -> what computes it.
        memory: one rank's; None where the weights' format or the model is not known.
    """

    machine: str
    model: str
    flags: dict[str, dict[str, Any]]
    operators: dict[str, str] = field(default_factory=dict)
    memory: RankMemory | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def starts(self) -> bool:
        """Whether nothing is known that stops a server."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """For programs; sizes are bytes of one rank."""
        return {"starts": self.starts, **asdict(self)}


def diagnose(resolution: Resolution, machine: Machine) -> Diagnosis:
    """Judge resolved flags on a machine."""
    view = resolution.view
    problems = [resolution.error] if resolution.error else []
    notes: list[str] = []
    quantization = view.quantization or (resolution.config.quant_method if resolution.config else None)
    other_model = _is_another_model(resolution)
    left_to_sglang = machine.target is None or quantization in SERVED_BY_SGLANG or other_model
    if machine.target is None:
        notes.append(
            f"{machine.name} is neither Hopper nor without a GPU: SGLang is left as it is, "
            "the plugin does nothing"
        )
    elif other_model:
        notes.append(f"{resolution.model} is not MiniMax-M3: the plugin leaves it to SGLang")
    elif quantization in SERVED_BY_SGLANG:
        notes.append(f"{quantization} is SGLang's own on Hopper, and left to it")
    flags = {
        name: {"given": resolution.given.get(name), "resolved": _plain(getattr(view, name))}
        for name in sorted({*resolution.given, *resolution.changed} - {"model_path"})
    }
    parallel = _parallel(view)
    if isinstance(parallel, str):
        return Diagnosis(machine.name, resolution.model, flags, problems=[*problems, parallel], notes=notes)
    if machine.gpu is not None and parallel.ranks > machine.gpus * view.nnodes:
        problems.append(
            f"--tp-size {parallel.tp} and --pp-size {parallel.pp} need {parallel.ranks} GPUs, "
            f"{view.nnodes} x {machine.name} have {machine.gpus * view.nnodes}: pass smaller sizes, or more "
            "nodes (--nnodes)"
        )
    memory = None
    if resolution.config is not None:
        problems += [
            f"{problem}: pass other sizes" for problem in check_division(resolution.config, parallel)
        ]
    weights = _weight_format(view, quantization, resolution)
    if (
        resolution.config is not None
        and weights is not None
        and _settings_are_readable()
        and not check_division(resolution.config, parallel)
    ):
        memory = _memory(resolution, machine, parallel, weights)
        _judge(memory, resolution, machine, weights, problems, notes)
    elif resolution.config is None and not resolution.error and not other_model:
        notes.append(f"memory is not estimated: {resolution.model} has no config.json here that can be read")
    elif weights is None and not other_model:
        notes.append(f"memory is not estimated for {quantization} weights, whose layout is SGLang's")
    if machine.here and (taken := _port_problem(view)) is not None:
        problems.append(taken)
    operators = {} if resolution.error else _operators(machine, view, weights, left_to_sglang)
    tunable = weights == "bfloat16" and machine.target == "sm90" and not left_to_sglang
    if operators and tunable and memory is not None:
        assert machine.gpu is not None and resolution.config is not None
        operators["experts"] += experts_division(machine.gpu.name, resolution.config, parallel)
    return Diagnosis(machine.name, resolution.model, flags, operators, memory, problems, notes)


def experts_division(gpu: str, config: M3Config, parallel: Parallel) -> str:
    """Whose configuration divides the work of SGLang's Triton experts on a rank."""
    experts, width = (
        config.num_local_experts // parallel.ep,
        config.intermediate_size // (parallel.tp // parallel.ep),
    )
    owner = tuned.known_by(experts, width, gpu)
    if owner is None:
        return (
            f", divided by its default: nobody has measured {experts} experts of {width} on {gpu}; "
            "python -m bench_serving.tune_experts does"
        )
    return f", divided as {owner} has measured"


def _is_another_model(resolution: Resolution) -> bool:
    path = Path(resolution.model) / "config.json"
    if resolution.config is not None or not path.is_file():
        return False
    try:
        architectures = json.loads(path.read_text(encoding="utf-8")).get("architectures") or ()
    except (json.JSONDecodeError, AttributeError):
        return False
    return bool(architectures) and not set(architectures) & set(M3_ARCHITECTURES)


def _settings_are_readable() -> bool:
    """What is wrong with them, a server would say as well: it is among the problems."""
    try:
        settings.read(os.environ)
    except settings.SettingError:
        return False
    return True


def _plain(value: Any) -> Any:
    """A server argument as JSON has it."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)


def _parallel(view: Any) -> Parallel | str:
    attention_dp = view.dp_size if view.enable_dp_attention else 1
    try:
        return Parallel(view.tp_size, view.ep_size, view.pp_size, attention_dp)
    except ValueError as error:
        return f"--tp-size, --ep-size, --pp-size, --dp-size: {error}"


def _weight_format(view: Any, quantization: str | None, resolution: Resolution) -> WeightFormat | None:
    if quantization in SERVED:
        return "mxfp8"
    if quantization is not None:
        return None
    declared = resolution.config.dtype if resolution.config else None
    return "float32" if "float32" in (view.dtype, declared if view.dtype == "auto" else None) else "bfloat16"


def _memory(
    resolution: Resolution, machine: Machine, parallel: Parallel, weights: WeightFormat
) -> RankMemory:
    view, config = resolution.view, resolution.config
    assert config is not None
    fraction = view.mem_fraction_static if view.mem_fraction_static is not None else 0.9
    model_element = ELEMENT_BYTES["float32" if weights == "float32" else "bfloat16"]
    kv_element = 1 if str(view.kv_cache_dtype).startswith("fp8") else model_element
    index_element = model_element
    if machine.target == "sm90":
        index_element = ELEMENT_BYTES[settings.read(os.environ).index_dtype]
    step = None
    if machine.target == "sm90":
        chunk = view.chunked_prefill_size or view.max_prefill_tokens
        step = StepSizes(
            rows=max(chunk, 1),
            requests=view.max_running_requests or DEFAULT_REQUESTS,
            context_tokens=view.context_length or config.max_position_embeddings,
            draft_tokens=view.speculative_num_draft_tokens or 0,
        )
    return rank_memory(
        config,
        parallel,
        weights=weights,
        free_bytes=machine.free_bytes,
        static_fraction=fraction,
        kv_element_bytes=kv_element,
        index_element_bytes=index_element,
        step=step,
    )


def _judge(
    memory: RankMemory,
    resolution: Resolution,
    machine: Machine,
    weights: WeightFormat,
    problems: list[str],
    notes: list[str],
) -> None:
    assert resolution.config is not None
    gib = 2**30
    if memory.tokens == 0:
        budget = memory.cache + memory.static
        more = "a machine with more memory" if machine.gpu is None else "more GPUs"
        remedy = f"use {more}" if weights == "mxfp8" else f"use {more} or the MXFP8 checkpoint"
        problems.append(
            f"{memory.static / gib:.1f} GiB of weights, tables and workspaces leave no "
            f"room for the cache in one rank's {budget / gib:.1f} GiB (--mem-fraction-static): {remedy}"
        )
        return
    context = resolution.view.context_length or resolution.config.max_position_embeddings
    limit = resolution.view.max_total_tokens
    tokens = memory.tokens if limit is None else min(limit, memory.tokens)
    if tokens < context:
        notes.append(
            f"the longest request holds {tokens:,} tokens, what fits into the cache, not the context of "
            f"{context:,}; SGLang refuses longer prompts"
        )


def _port_problem(view: Any) -> str | None:
    try:
        check_port(view.host, view.port)
    except PortTakenError as error:
        return str(error)
    return None


def _operators(machine: Machine, view: Any, weights: str | None, left_to_sglang: bool) -> dict[str, str]:
    if left_to_sglang:
        return {
            "sparse attention": "SGLang's own",
            "dense attention": f"SGLang's {view.attention_backend}",
            "experts": f"SGLang's {view.moe_runner_backend}",
        }
    kind = "Triton for sm90" if machine.target == "sm90" else "PyTorch reference"
    ours = {
        name: f"m3_kernels.{name}, {kind}"
        for name in ("plan_prefix", "choose_blocks", "attend_blocks", "store_tokens")
    }
    on_gpu, quantized = machine.target == "sm90", weights == "mxfp8"
    dense = getattr(view, "prefill_attention_backend", None) or view.attention_backend
    others = f"SGLang's {dense}"
    asked = settings.read(os.environ).mxfp8
    fast = asked == "fast" or (asked == "auto" and view.moe_runner_backend == "deep_gemm")
    many = "DeepGEMM with FP8 activations for many tokens, for few " if fast and on_gpu else ""
    experts = (
        "SGLang's native experts with M3's activation"
        if machine.target == "cpu"
        else (f"SGLang's {view.moe_runner_backend}")
    )
    return {
        **{f"sparse layers: {name}": value for name, value in ours.items()},
        # As `attention.hybrid` decides.
        "dense layers: prefill": ours["attend_blocks"] if on_gpu and dense == "triton" else others,
        "dense layers: decode": ours["attend_blocks"] if on_gpu else others,
        "experts": many + f"m3_kernels.mxfp8_experts, {kind}" if quantized else experts,
        "linear layers": many + f"m3_kernels.mxfp8_linear, {kind}"
        if quantized
        else "torch.nn.functional.linear",
    }
