"""Registers every part with SGLang. No logic of its own."""

from __future__ import annotations

import logging

from sglang_m3 import compat, hardware, settings

logger = logging.getLogger(__name__)


def register() -> None:
    """On hardware that the plugin serves, check SGLang and register every part; elsewhere do nothing.

    Raises:
        compat.MovedSymbolError: SGLang moved a symbol.
        settings.SettingError: a `SGLANG_M3_*` variable is wrong.
    """
    if hardware.target() is None:
        logger.debug("sglang-m3: neither a Hopper GPU nor a machine without one; SGLang is left as it is.")
        return
    compat.check()
    settings.read()

    from sglang_m3 import overrides

    overrides.register()

    from sglang_m3 import hooks
    from sglang_m3.parsing import register as parsers

    hooks.register()
    parsers.register()
