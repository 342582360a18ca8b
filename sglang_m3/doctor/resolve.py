"""Server flags resolved as a server would, on a machine that need not be there."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_m3.config import ConfigError, M3Config
from sglang_m3.config.merge import merge
from sglang_m3.doctor import published
from sglang_m3.doctor.machine import Machine, pretending

_STANDS_IN = {
    "model_path",
    "load_format",
    "skip_tokenizer_init",
    "device",
    "served_model_name",
    "tokenizer_path",
}
"""Server arguments that speak of the folder in place of a published checkpoint."""


@dataclass(frozen=True)
class Resolution:
    """What became of the flags.

    Attributes:
        model: the model path as it was given.
        view: reads resolved server arguments by name; as far as they got, if there is an error.
        given: server argument -> value, for the flags that were passed.
        config: None where config.json cannot be read or is not served.
        error: why a server would not start, or None.
    """

    model: str
    view: Any
    given: dict[str, Any]
    config: M3Config | None
    error: str | None
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Server argument -> (as given or by default, resolved), where the two differ."""


def resolve(flags: Sequence[str], machine: Machine) -> Resolution:
    """Parse and resolve SGLang's `flags`. Published checkpoints need no network, weights are not read.

    Raises:
        SystemExit: the flags are not SGLang's (argparse has said so).
    """
    with pretending(machine):
        # Plugins register by what the machine is taken for, so not earlier.
        from sglang.srt.arg_groups.model_override_base import resolving_view
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import ServerArgs
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

        load_plugins()
        parser = argparse.ArgumentParser(prog="python -m sglang_m3.doctor", allow_abbrev=False)
        ServerArgs.add_cli_args(parser)
        if "--config" in flags:
            flags = ConfigArgumentMerger(parser).merge_config_with_args(list(flags))
        parsed = parser.parse_args(list(flags))
        with _local(parsed.model_path) as (folder, name):
            parsed.model_path = folder
            if name is not None:
                parsed.load_format = "dummy"
                parsed.skip_tokenizer_init = True
            asked_device = parsed.device
            if machine.gpu is not None and not machine.here:
                parsed.device = parsed.device or "cuda"
            args = ServerArgs.from_cli_args(parsed)
            raw = {name: getattr(args, name) for name in vars(parsed) if hasattr(args, name)}
            error = _resolve(args)
            config = _config(folder, parsed.json_model_override_args)
    view = resolving_view(args)
    passing = _STANDS_IN if name is not None else {"device"} if asked_device is None else set()
    given = {
        key: value for key, value in raw.items() if key not in passing and value != parser.get_default(key)
    }
    changed = {
        key: (value, getattr(view, key))
        for key, value in raw.items()
        if key not in {*passing, "random_seed"} and getattr(view, key) != value
    }
    model = folder if name is None else name
    return Resolution(model, view, given, config, error, changed)


@contextlib.contextmanager
def _local(model: str) -> Iterator[tuple[str, str | None]]:
    """A folder with the model's config.json, and the published name if the folder stands in for one."""
    config = None if Path(model).is_dir() else published.config_of(model)
    if config is None:
        yield model, None
        return
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield folder, model


def _resolve(args: Any) -> str | None:
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        args.resolve_once()
    except Exception as error:  # whatever stops a server is what the doctor is to report
        return str(error) or type(error).__name__
    finally:
        logging.disable(level)
    return None


def _config(folder: str, override: str) -> M3Config | None:
    """What the memory is worked out from. An error in it is found, and told, while SGLang resolves."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return None
    try:
        return M3Config.read(merge(json.loads(path.read_text(encoding="utf-8")), json.loads(override)))
    except (ConfigError, json.JSONDecodeError):
        return None
