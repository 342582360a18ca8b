"""`python -m sglang_m3.quantize SRC DEST`: a BF16 MiniMax-M3 checkpoint in the released MXFP8 format."""

from __future__ import annotations

import argparse
import functools

from sglang_m3.quantize.convert import quantize_checkpoint


def main() -> None:
    """Prints a line per file; an error names the tensor or file and exits with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_m3.quantize",
        description="Write a BF16 MiniMax-M3 checkpoint in the released MXFP8 format. Interrupted, the same "
        "command goes on where it stopped; complete, it checks every byte. Nothing is ever overwritten.",
    )
    parser.add_argument("source", metavar="SRC", help="folder of the BF16 checkpoint")
    parser.add_argument("dest", metavar="DEST", help="folder to create or to complete")
    arguments = parser.parse_args()
    try:
        quantize_checkpoint(arguments.source, arguments.dest, report=functools.partial(print, flush=True))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
