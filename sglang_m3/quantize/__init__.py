"""Writes a BF16 MiniMax-M3 checkpoint in the released MXFP8 format."""

from sglang_m3.quantize.convert import quantize_checkpoint

__all__ = ["quantize_checkpoint"]
