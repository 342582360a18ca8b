"""SGLang plugin that serves MiniMax-M3 on Hopper GPUs and, for trying and testing, on machines without one.

SGLang finds the two functions below through entry points and only logs what they raise, import errors
included. So nothing heavy is imported here, and `register` makes a failure visible to M3 servers alone.
"""

__version__ = "0.1.0"


def register() -> None:
    """Entry point `sglang.srt.plugins`: register every part, in every SGLang process.

    Raises nothing. If a part fails, servers of other models start as they would without the plugin, and a
    server of an M3 model stops with the reason (`refusal.refuse_m3`).
    """
    try:
        from sglang_m3 import plugin

        plugin.register()
    except Exception as error:
        from sglang_m3 import refusal

        refusal.refuse_m3(f"{type(error).__name__}: {error}")


def activate() -> str | None:
    """Entry point `sglang.srt.platforms`: the CPU platform where there is no accelerator, else None."""
    from sglang_m3 import hardware

    if hardware.target() == "cpu":
        return "sglang_m3.platforms.cpu.M3CpuPlatform"
    return None
