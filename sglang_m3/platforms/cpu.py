"""An out-of-tree platform that lets SGLang serve through its torch-native paths without any accelerator."""

from __future__ import annotations

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class M3CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU through PyTorch alone: no CPU build of SGLang's kernels, no Triton, no graphs.

    SGLang's own platforms either want its CPU kernel build (`SGLANG_USE_CPU_ENGINE=1`) or reach for CUDA
    operators; an out-of-tree platform whose dispatch key is "native" gets the PyTorch code of every layer.
    It serves any model that SGLang has native code for, M3 among them.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        # SGLang takes this for the value of `--device`, a string, while its own CPU class returns an object.
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def get_torch_profiler_activity_str(self) -> str:
        # The base class raises: without these two, `/start_profile` ends the scheduler.
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def post_load_model(self, model: torch.nn.Module) -> None:
        # SGLang's tower for M3 takes bfloat16 pixels only, whatever the language model's dtype
        # (`minimax_vl_common.MiniMaxVLVisionTransformer.forward`).
        if type(model).__name__ == "MiniMaxM3SparseForConditionalGeneration":
            model.vision_tower.to(torch.bfloat16)
            model.vision_tower.dtype = torch.bfloat16
