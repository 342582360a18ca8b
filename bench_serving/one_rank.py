"""`python -m bench_serving.one_rank --of 8 DEST`: a model folder that puts one rank of a node on one GPU.

M3's real sizes, with what tensor and expert parallelism divide divided: attention and index heads, experts,
dense and shared feed-forward, vocabulary. Serve it with `--load-format dummy`. A small tokenizer of source
code comes with it, so that real text can be sent; the folder says in `benchmark-note.txt` what differs from
a real rank, and reports repeat it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_serving.options import LaidOutHelp, count
from sglang_m3.tiny import tokenizer
from sglang_m3.tiny.config import TinyConfig, generation_config, model_config, preprocessor_configs

TOKENIZER_TOKENS = 8192
NOTE = "benchmark-note.txt"


@dataclass(frozen=True)
class Rank:
    """One rank of `of`, and how much of the model it keeps."""

    of: int = 8
    layers: int = 60
    dense_layers: int = 3
    experts: int = 128
    experts_per_token: int = 4

    def __post_init__(self) -> None:
        rules = {
            "--of is 1, 2, 4, 8 or 16": self.of in (1, 2, 4, 8, 16),
            "--experts is a multiple of --of": self.experts % self.of == 0,
            "there are sparse layers": 0 < self.dense_layers < self.layers,
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise ValueError(f"need that {'; that '.join(broken)}")

    @property
    def experts_per_token_here(self) -> int:
        """Experts of this rank that a token goes to: a real rank's mean, but at least one."""
        return max(1, self.experts_per_token // self.of)

    @property
    def note(self) -> str:
        mean = self.experts_per_token / self.of
        return (
            f"The model is one rank of {self.of}, emulated on one GPU with random weights: no collectives, "
            f"and {self.experts_per_token_here} expert(s) of this rank per token where a real rank's mean is "
            f"{mean:g}, so a step reads more expert weights than on a real rank: that flatters smaller "
            "weights. Random weights select blocks unlike trained ones."
        )


def config(rank: Rank) -> dict[str, Any]:
    """config.json of one rank."""
    shape = TinyConfig(
        layers=rank.layers,
        dense_layers=rank.dense_layers,
        hidden=6144,
        heads=64 // rank.of,
        kv_heads=max(1, 4 // rank.of),
        head_dim=128,
        dense_intermediate=12288 // rank.of,
        expert_intermediate=3072,
        experts=rank.experts // rank.of,
        experts_per_token=rank.experts_per_token_here,
        topk_blocks=16,
        vocab=TOKENIZER_TOKENS,
        max_position=1 << 20,
    )
    made = model_config(shape)
    # Markers stay where the tokenizer has them, the embedding gets a real rank's size.
    made["text_config"]["vocab_size"] = 200064 // rank.of
    made["text_config"]["shared_intermediate_size"] = 3072 // rank.of
    return made


def write(dest: Path, rank: Rank) -> None:
    """Write the folder. Raises FileExistsError if it is there and not empty."""
    if dest.exists() and any(dest.iterdir()):
        raise FileExistsError(f"{dest} is not empty")
    dest.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": config(rank),
        "generation_config.json": generation_config(TinyConfig(vocab=TOKENIZER_TOKENS)),
        **preprocessor_configs(),
    }
    for name, content in files.items():
        (dest / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.write(dest, TOKENIZER_TOKENS, 1 << 20)
    (dest / NOTE).write_text(rank.note + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench_serving.one_rank",
        description=__doc__,
        formatter_class=LaidOutHelp,
    )
    parser.add_argument("dest", type=Path, metavar="DEST", help="folder to write; it must not hold anything")
    for name, default, what in (
        ("--of", 8, "ranks of the node"),
        ("--layers", 60, "dense ones included"),
        ("--dense-layers", 3, "layers without experts and selection"),
        ("--experts", 128, "of the whole model"),
        ("--experts-per-token", 4, "of the whole model"),
    ):
        parser.add_argument(name, type=count, default=default, metavar="N", help=what)
    chosen = parser.parse_args(arguments)
    options = {name: value for name, value in vars(chosen).items() if name != "dest"}
    try:
        rank = Rank(**options)
        write(chosen.dest, rank)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"wrote {chosen.dest}: {rank.note}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
