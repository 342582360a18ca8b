"""What the doctor says of parts that need no server flags resolved."""

from __future__ import annotations

import json

import pytest

from sglang_m3.config import M3Config
from sglang_m3.doctor import published
from sglang_m3.doctor.diagnosis import experts_division
from sglang_m3.doctor.machine import GPUS
from sglang_m3.doctor.memory import Parallel

RELEASED = M3Config.read(json.loads(published.CONFIG.read_text()))


@pytest.mark.parametrize(
    ("gpu", "parallel", "expected"),
    [
        ("h200", Parallel(tp=8, ep=8), ", divided as sglang-m3 has measured"),
        ("h200", Parallel(tp=4, ep=4), ", divided as sglang-m3 has measured"),
        ("h200", Parallel(tp=8), ", divided as SGLang has measured"),
        ("h100", Parallel(tp=8), ", divided as SGLang has measured"),
    ],
)
def test_who_measured_how_experts_are_divided(gpu: str, parallel: Parallel, expected: str) -> None:
    assert experts_division(GPUS[gpu].name, RELEASED, parallel) == expected


def test_an_unmeasured_gpu_is_told_how_to_measure() -> None:
    said = experts_division(GPUS["h100"].name, RELEASED, Parallel(tp=8, ep=8))
    assert "nobody has measured 16 experts of 3072 on NVIDIA H100" in said
    assert "python -m bench_serving.tune_experts" in said
