"""The one table of `SGLANG_M3_*` environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PREFIX = "SGLANG_M3_"

UPSTREAM_NAMES = frozenset({"SGLANG_M3_ALLOW_CUSTOM_AR", "SGLANG_M3_USE_AITER_FUSED_QKNORM"})
"""Variables with the same prefix that belong to SGLang itself (`sglang.srt.environ`)."""


class SettingError(ValueError):
    """A `SGLANG_M3_*` variable that does not exist, or a value that it does not take."""


@dataclass(frozen=True)
class Settings:
    """The plugin's settings.

    Attributes:
        record_blocks: `SGLANG_M3_RECORD_BLOCKS`, a directory. Every step writes the block ids that each
            sparse layer chose for each query token there (`sglang_m3.attention.recorder`), and the experts
            it took (`sglang_m3.experts.recorder`). For tests and for looking at selections; it copies to the
            host in every layer, so it is slow and needs `--disable-cuda-graph`. Unset: nothing is recorded.
        index_dtype: `SGLANG_M3_INDEX_DTYPE`, the dtype of cached index keys: `bfloat16`, whatever the dtype
            of K and V, or `fp8_e4m3`, each key rounded once; half the memory traffic of a decode step's
            scoring for some other blocks. On Hopper only.
        mxfp8: `SGLANG_M3_MXFP8`, how MXFP8 weights are kept (`sglang_m3.quantization.layout`): `exact`,
            `fast`, or `auto`: `fast` with `--moe-runner-backend deep_gemm` where DeepGEMM is there, else
            `exact`.
    """

    record_blocks: Path | None = None
    index_dtype: str = "bfloat16"
    mxfp8: str = "auto"


MXFP8_LAYOUTS = ("auto", "exact", "fast")
INDEX_DTYPES = ("bfloat16", "fp8_e4m3")


def read(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings.

    Raises:
        SettingError: an unknown variable of the prefix, or a value that does not fit; it names the variable.
    """
    known = {f"{PREFIX}RECORD_BLOCKS", f"{PREFIX}INDEX_DTYPE", f"{PREFIX}MXFP8"}
    unknown = {name for name in environ if name.startswith(PREFIX)} - known - UPSTREAM_NAMES
    if unknown:
        raise SettingError(
            f"unknown setting {', '.join(sorted(unknown))}; sglang-m3 knows {', '.join(sorted(known))}"
        )
    record = environ.get(f"{PREFIX}RECORD_BLOCKS")
    if record is not None and not Path(record).is_dir():
        raise SettingError(f"{PREFIX}RECORD_BLOCKS={record}: no such directory; create it first")
    index_dtype = environ.get(f"{PREFIX}INDEX_DTYPE", "bfloat16")
    if index_dtype not in INDEX_DTYPES:
        raise SettingError(f"{PREFIX}INDEX_DTYPE={index_dtype}: pass one of {', '.join(INDEX_DTYPES)}")
    mxfp8 = environ.get(f"{PREFIX}MXFP8", "auto")
    if mxfp8 not in MXFP8_LAYOUTS:
        raise SettingError(f"{PREFIX}MXFP8={mxfp8}: pass one of {', '.join(MXFP8_LAYOUTS)}")
    return Settings(None if record is None else Path(record), index_dtype, mxfp8)
