"""Loads checkpoints with SGLang's own loader, in the test's process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.arg_groups import model_override_base
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.model_loader import get_model, loader
from sglang.srt.server_args import ServerArgs

from launch.server import free_port
from sglang_m3 import hardware, overrides
from sglang_m3.models.register import around_get_model_architecture
from sglang_m3.quantization import register
from sglang_m3.quantize import quantize_checkpoint
from sglang_m3.tiny import TinyConfig, build

SMALL = TinyConfig(
    layers=2, vocab=512, hidden=96, vision_layers=1, experts=3, dense_intermediate=160, expert_intermediate=64
)
"""Odd numbers of scales: 3 along the hidden size, 5 and 2 along the widths."""

Load = Callable[..., torch.nn.Module]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("mxfp8") / "plain", replace(SMALL, dtype="bfloat16"))


@pytest.fixture(scope="session")
def converted(plain: Path) -> Path:
    return quantize_checkpoint(plain, plain.parent / "converted")


@pytest.fixture(scope="package", params=["plugin's model file", "upstream's model file"])
def load(request: pytest.FixtureRequest) -> Iterator[Load]:
    """`load(checkpoint, **server arguments)`: the model, as a scheduler process would load it."""
    if hardware.target() != "cpu":
        pytest.skip("loads on the CPU platform, which is there without a GPU only")
    with loader_of(request.param) as load:
        yield load


@contextmanager
def loader_of(model_file: str) -> Iterator[Load]:
    """What the fixture `load` gives, with the plugin's model file or with upstream's."""
    providers = model_override_base._MODEL_OVERRIDE_FNS
    before = {name: list(known) for name, known in providers.items()}
    overrides.register()
    register.register()
    lookup = loader.get_model_architecture
    if model_file == "plugin's model file":
        loader.get_model_architecture = functools.partial(around_get_model_architecture, lookup)

    def load(checkpoint: Path, **flags: object) -> torch.nn.Module:
        args = ServerArgs(
            model_path=str(checkpoint),
            dtype="float32",
            skip_tokenizer_init=True,
            max_total_tokens=512,
            **flags,
        )
        args.resolve_once()
        ranks = runtime_context.SpawnRanks(world_rank=0)
        context = runtime_context.create_context(args, role="scheduler", ranks=ranks)
        with runtime_context.use_context(context):
            parallel_state.init_distributed_environment(
                1, 0, f"tcp://127.0.0.1:{free_port()}", 0, backend="gloo"
            )
            parallel_state.initialize_model_parallel(backend="gloo")
            try:
                return get_model(
                    model_config=ModelConfig.from_server_args(args),
                    load_config=LoadConfig(load_format=args.load_format),
                    device_config=DeviceConfig("cpu"),
                )
            finally:
                parallel_state.destroy_model_parallel()
                parallel_state.destroy_distributed_environment()

    yield load
    loader.get_model_architecture = lookup
    providers.clear()
    providers.update(before)
