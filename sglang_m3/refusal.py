"""Stop an M3 server with one clear message when the plugin could not register, and disturb nobody else."""

from __future__ import annotations

import functools
import logging
from typing import Any, NoReturn

from sglang_m3.architectures import M3_ARCHITECTURES

logger = logging.getLogger(__name__)


class PluginFailedError(RuntimeError):
    """The plugin could not register; raised while an M3 server resolves its arguments."""


def refuse_m3(reason: str) -> None:
    """Make every attempt to serve an M3 model fail with `reason`, before weights load.

    SGLang logs what a plugin raises and goes on, so the reason travels with a model override provider, whose
    exceptions do propagate. Should SGLang have moved that registry, the model configuration's constructor
    carries it, and should that be gone too, the process ends.

    Raises:
        SystemExit: SGLang has neither place any more.
    """
    message = (
        f"sglang-m3 cannot serve MiniMax-M3: {reason}. Mend that, or set SGLANG_PLUGINS=none to run SGLang "
        "without the plugin."
    )
    logger.error("%s", message)

    def fail(*_: Any) -> NoReturn:
        raise PluginFailedError(message)

    try:
        import sglang.srt.arg_groups.overrides  # noqa: F401  (registers the built-in provider first)
        from sglang.srt.arg_groups.model_override_base import register_model_override

        for architecture in M3_ARCHITECTURES:
            register_model_override(architecture)(fail)
    except (ImportError, AttributeError):
        _refuse_in_model_config(message)


def _refuse_in_model_config(message: str) -> None:
    try:
        from sglang.srt.configs.model_config import ModelConfig

        original = ModelConfig.__init__
    except (ImportError, AttributeError):
        raise SystemExit(message) from None

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if set(self.hf_config.architectures or ()) & set(M3_ARCHITECTURES):
            raise PluginFailedError(message)

    ModelConfig.__init__ = init
