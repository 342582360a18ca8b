"""A small MiniMax-M3 checkpoint, built on the spot, that stock SGLang and transformers both load."""

from sglang_m3.tiny.build import build
from sglang_m3.tiny.config import TinyConfig

__all__ = ["TinyConfig", "build"]
