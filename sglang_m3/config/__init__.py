"""A strict, frozen reading of the checkpoint's config.json, and overrides merged into it."""

from sglang_m3.config.fields import ConfigError
from sglang_m3.config.m3 import M3Config, VisionConfig
from sglang_m3.config.rope import Rope, YarnScaling

__all__ = ["ConfigError", "M3Config", "Rope", "VisionConfig", "YarnScaling"]
