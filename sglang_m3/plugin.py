"""Registers every part with SGLang. No logic of its own."""

from __future__ import annotations

import logging

from sglang_m3 import compat, hardware, settings

logger = logging.getLogger(__name__)


def register() -> None:
    """Check SGLang, then register the start-up checks and, on hardware that the plugin serves, all else.

    Raises:
        compat.MovedSymbolError: SGLang moved a symbol.
        settings.SettingError: a `SGLANG_M3_*` variable is wrong.
    """
    compat.check()
    settings.read()

    from sglang_m3 import overrides

    overrides.register()
    if hardware.target() is None:
        return

    from sglang_m3 import hooks
    from sglang_m3.parsing import register as parsers

    hooks.register()
    parsers.register()
