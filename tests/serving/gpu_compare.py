"""Answers of `gpu_engine`'s modes beside transformers' model in float32, and beside each other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tests.serving.gpu_modes import (
    COMPARED,
    DEVICE,
    LARGEST_MEAN_ERROR,
    LARGEST_MEAN_ERROR_FLOAT32,
    LARGEST_MEDIAN_ERROR,
    MODES,
    NEW_TOKENS,
    PREFIX_TOKENS,
    TAIL_TOKENS,
    prompts,
)


def compare(results: dict[str, Any], records: Path) -> dict[str, Any]:
    """Every mode against transformers' model in float32."""
    from tests import oracle

    model = oracle.load_oracle(os.environ["M3_CHECKPOINT"]).to(DEVICE)
    asked = prompts()
    report: dict[str, Any] = {}
    for mode, result in results.items():
        error, regret, gaps = [], [], []
        for number, ids in enumerate(asked):
            tokens = result["tokens"][number]
            with torch.device(DEVICE):
                run = oracle.run(model, [*ids, *tokens[:-1]])
                logprobs = run.logprobs[len(ids) - 1 :]
                want = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
                error.append((want - torch.tensor(result["logprobs"][number])).abs())
                regret.append(logprobs.amax(1) - want)
                if COMPARED.get(mode) in results:
                    others = results[COMPARED[mode]]["tokens"][number]
                    parted = first_difference(tokens, others)
                    if parted is not None:
                        gaps.append(round(float((logprobs[parted, others[parted]] - want[parted]).abs()), 4))
                if number == 0 and MODES[mode].records:
                    report[mode] = overlap(run.blocks, result["request_ids"][0], records / mode)
        if COMPARED.get(mode) in results:
            report.setdefault(mode, {})["tokens_compared"] = {
                "mode": COMPARED[mode],
                "tokens_until_the_first_difference": until_parted(result, results[COMPARED[mode]], "tokens"),
                "the_same_in_the_first_round": until_parted(
                    result, results[COMPARED[mode]], "tokens_of_first_round"
                ),
                "nats_between_the_two_tokens_where_they_part": gaps,
            }
        errors = torch.cat(error)
        report.setdefault(mode, {}).update(
            logprob_error_mean=float(errors.mean()),
            logprob_error_median=float(errors.median()),
            logprob_error_of_first_tokens=[round(float(prompt[0]), 4) for prompt in error],
            logprob_errors_over_one_half=int((errors > 0.5).sum()),
            logprob_error_max=float(errors.max()),
            worst_distance_from_best_token=float(torch.cat(regret).max()),
        )
    if {"eager", "reference"} <= results.keys():
        report["eager"]["against_reference_operators"] = against(results, "eager", "reference", records)
    if "decode-graph" in results:
        for mode in results:
            if mode != "decode-graph" and (records / f"{mode}.cache").exists():
                report[mode]["cache_against_decode_graph"] = cache_differences(records, mode, "decode-graph")
    return report


def cache_differences(records: Path, mode: str, other: str) -> dict[str, str]:
    """Where two modes' caches of the first prompt part, per layer and cache.

    In words: the first token whose values differ in a bit, how many do, the mean relative difference, and how
    many differ by more than 5%, which is another expert or block and no rounding.
    """
    caches = [torch.load(records / f"{name}.cache") for name in (mode, other)]
    found = {}
    for (layer, kind), values in caches[0].items():
        ours, theirs = values.float().flatten(1), caches[1][layer, kind].float().flatten(1)
        relative = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
        differ = torch.where(relative > 0)[0].tolist()
        found[f"{kind} of layer {layer}"] = (
            f"from token {differ[0]}: {len(differ)} of {len(relative)}, mean {float(relative.mean()):.5f}, "
            f"{int((relative > 0.05).sum())} above 5%"
            if differ
            else "equal"
        )
    return found


def against(results: dict[str, Any], left: str, right: str, records: Path) -> dict[str, Any]:
    """Two modes side by side: log-probabilities up to the first different token, and recorded blocks."""
    ours, theirs = results[left], results[right]
    largest, same_tokens = 0.0, 0
    for left_tokens, right_tokens, left_logprobs, right_logprobs in zip(
        ours["tokens"], theirs["tokens"], ours["logprobs"], theirs["logprobs"]
    ):
        parted = first_difference(left_tokens, right_tokens)
        until = len(left_tokens) if parted is None else parted
        same_tokens += until
        gaps = [abs(a - b) for a, b in zip(left_logprobs[:until], right_logprobs[:until])]
        largest = max(largest, *gaps, 0.0)
    chosen = {
        mode: prompt_blocks(records / mode, result["request_ids"][0])
        for mode, result in ((left, ours), (right, theirs))
    }
    rows = chosen[left].keys() & chosen[right].keys()
    different = sum(not torch.equal(chosen[left][row], chosen[right][row]) for row in rows)
    return {
        "tokens_until_the_first_difference": same_tokens,
        "tokens": sum(map(len, ours["tokens"])),
        "logprob_difference_max": largest,
        "prompt_rows_and_layers": len(rows),
        "with_another_choice": different,
    }


def first_difference(left: list[int], right: list[int]) -> int | None:
    """The first index at which two answers of one length differ; None if nowhere."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), None)


def until_parted(ours: dict[str, Any], theirs: dict[str, Any], round_name: str) -> list[int]:
    """Of every answer of a round, the tokens before the first other one; `NEW_TOKENS` if there is none."""
    parted = map(first_difference, ours[round_name], theirs[round_name])
    return [NEW_TOKENS if index is None else index for index in parted]


def prompt_blocks(record_dir: Path, request_id: str) -> dict[tuple[int, int], torch.Tensor]:
    """(layer, position) -> chosen blocks of a request's recorded prompt tokens."""
    from sglang_m3.attention import recorder

    found: dict[tuple[int, int], torch.Tensor] = {}
    for step in recorder.load(record_dir):
        if request_id not in step.request_ids:
            continue
        for row in torch.where(step.request == step.request_ids.index(request_id))[0].tolist():
            position = int(step.position[row])
            if position < PREFIX_TOKENS + TAIL_TOKENS:
                found |= {(layer, position): blocks[:, row] for layer, blocks in step.chosen.items()}
    return found


def overlap(oracle_blocks: dict[int, torch.Tensor], request_id: str, record_dir: Path) -> dict[str, Any]:
    """How many of the oracle's blocks the request's recorded rows chose."""
    from sglang_m3.attention import recorder

    same = total = 0
    for step in recorder.load(record_dir):
        if request_id not in step.request_ids:
            continue
        rows = torch.where(step.request == step.request_ids.index(request_id))[0].cpu()
        rows = rows[step.position.cpu()[rows] < oracle_blocks[min(oracle_blocks)].shape[1]]
        for layer, chosen in step.chosen.items():
            got = chosen.cpu()[:, rows]
            want = oracle_blocks[layer].cpu()[:, step.position.cpu()[rows].long()]
            hit = (got[..., :, None] == want[..., None, :]) & (got[..., :, None] >= 0)
            same, total = same + int(hit.sum()), total + int((want >= 0).sum())
    return {"blocks_recorded": total, "share_of_blocks_as_in_float32": same / max(1, total)}


def what_is_wrong(mode: str, found: dict[str, Any]) -> str:
    """Why a mode's answers are not the model's; "" if its dtype explains all differences."""
    mean, median = found["logprob_error_mean"], found["logprob_error_median"]
    in_float32 = MODES[mode].flags.get("dtype") == "float32"
    # NaN is within no tolerance.
    if not mean <= (LARGEST_MEAN_ERROR_FLOAT32 if in_float32 else LARGEST_MEAN_ERROR):
        return f"the mean error is {mean}"
    if not median <= LARGEST_MEDIAN_ERROR:
        return f"the median error is {median}"
    compared = found.get("tokens_compared", {})
    for name in ("tokens_until_the_first_difference", "the_same_in_the_first_round"):
        if in_float32 and set(compared.get(name, ())) - {NEW_TOKENS}:
            return f"other tokens than {compared['mode']}: {name} {compared[name]}"
    return ""
