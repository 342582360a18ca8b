"""Registers every part with SGLang. No logic of its own."""

from __future__ import annotations

from sglang_m3 import compat, hardware, settings


def register() -> None:
    """On hardware that the plugin serves, check SGLang and register every part.

    Elsewhere only the provider for M3's server arguments is registered, which leaves them as they are and
    says so in one log line.

    Raises:
        compat.MovedSymbolError: SGLang moved a symbol.
        settings.SettingError: a `SGLANG_M3_*` variable is wrong.
    """
    served = hardware.target() is not None
    if served:
        compat.check()
        settings.read()

    from sglang_m3 import overrides

    overrides.register()
    if not served:
        return

    from sglang_m3 import hooks
    from sglang_m3.parsing import register as parsers
    from sglang_m3.quantization import register as quantization

    hooks.register()
    parsers.register()
    quantization.register()
