"""Registers M3's MXFP8 with SGLang under a name of its own, so that other models' `mxfp8` stays SGLang's."""

from __future__ import annotations

from sglang.srt.layers.quantization import QUANTIZATION_METHODS

from sglang_m3.quantization.config import METHOD, M3MxFp8Config


def register() -> None:
    """The server argument provider resolves `mxfp8` to this method for M3 models alone."""
    QUANTIZATION_METHODS[METHOD] = M3MxFp8Config
