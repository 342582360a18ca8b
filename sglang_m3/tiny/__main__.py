"""`python -m sglang_m3.tiny DEST`: writes a small MiniMax-M3 checkpoint."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import get_type_hints

from safetensors import SafetensorError

from sglang_m3.tiny.build import build
from sglang_m3.tiny.config import TinyConfig


def main() -> None:
    """Every field of `TinyConfig` is an option."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_m3.tiny",
        description="Write a small MiniMax-M3 checkpoint with random weights, for demos and tests.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("dest", metavar="DEST", help="folder to create")
    hints = get_type_hints(TinyConfig)
    for field in fields(TinyConfig):
        kind = int if hints[field.name] is int else str
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default, help=" ")
    arguments = vars(parser.parse_args())
    dest = arguments.pop("dest")
    try:
        build(dest, TinyConfig(**arguments), report=print)
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))
    except (OSError, SafetensorError) as error:
        parser.exit(1, f"{parser.prog}: cannot write {dest}, nothing is left of it: {error}\n")


if __name__ == "__main__":
    main()
