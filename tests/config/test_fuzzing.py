"""Ten thousand mutated configs: each is read, or refused with the name of a field that was mutated."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from sglang_m3.config import ConfigError, M3Config
from sglang_m3.models.weight_map import checkpoint_weights, value_count
from tests.config.test_m3_config import by_transformers, flat, nested

MUTATED = 10_000
SHAPES = (nested(), flat(), by_transformers())
STRANGE: tuple[Any, ...] = (
    None, 0, 1, -1, 2, 3, 7, 128, 2**31, 2**70, 0.5, -0.0, 1e308, float("nan"), float("inf"), True, False,
    "", "max", "silu", "1", [], [0], [1] * 5, [0] * 5, [None] * 5, [[]] * 5, ["dense"] * 5, {}, {"a": 1},
    {"rope_type": "yarn"}, {"rope_type": "yarn", "factor": 1.5}, {"type": 3}, [2**70] * 5, "x" * 500,
)  # fmt: skip


def places(config: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [path] if path else []
    for name, value in config.items():
        found += places(value, (*path, name)) if isinstance(value, dict) else [(*path, name)]
    return found


def mutate(value: Any, source: random.Random) -> Any:
    kind = source.randrange(4)
    if isinstance(value, list) and kind:
        changed = [*value, *value[:1]] if kind == 1 else value[:-1]
        if kind == 3 and value:
            changed = list(value)
            changed[source.randrange(len(value))] = source.choice(STRANGE)
        return changed
    if isinstance(value, int) and not isinstance(value, bool) and kind > 1:
        return value + source.choice((-1, 1, 31, value, -value))
    return copy.deepcopy(source.choice(STRANGE))


@pytest.mark.parametrize("shape", range(len(SHAPES)), ids=["nested", "flat", "transformers"])
def test_mutated_configs_are_read_or_refused_by_field(shape: int) -> None:
    source = random.Random(20 + shape)
    original = SHAPES[shape]
    paths = places(original)
    outcomes = {"read": 0, "refused": 0}
    for number in range(MUTATED // len(SHAPES) + 1):
        config = copy.deepcopy(original)
        names = []
        for path in source.sample(paths, source.choice((1, 1, 1, 2, 3))):
            holder = config
            for part in path[:-1]:
                holder = holder[part] if isinstance(holder, dict) and part in holder else {}
            if not isinstance(holder, dict) or path[-1] not in holder:
                continue
            if source.random() < 0.2:
                del holder[path[-1]]
            else:
                holder[path[-1]] = mutate(holder[path[-1]], source)
            names.append(path[-1])
        try:
            read = M3Config.read(config)
        except ConfigError as error:
            outcomes["refused"] += 1
            shown = str(error)
            assert any(name in shown for name in names), f"{number}: {names} mutated, but: {shown}"
            assert error.field and len(shown) < 600, f"{number}: {shown}"
        else:
            outcomes["read"] += 1
            check(read)
    assert min(outcomes.values()) > MUTATED // 30, outcomes


def check(read: M3Config) -> None:
    """What everything downstream takes for granted."""
    layers = range(read.num_hidden_layers)
    assert read.sparse_layers and set(read.sparse_layers) | set(read.moe_layers) <= set(layers)
    assert read.num_attention_heads % read.num_key_value_heads == 0
    assert min(read.init_blocks, read.local_blocks) >= 0
    assert read.init_blocks + read.local_blocks <= read.topk_blocks
    assert read.rope.rotary_dim % 2 == 0 and 0 < read.rope.rotary_dim <= read.head_dim
    assert read.num_experts_per_tok <= read.num_local_experts
    assert read.dense_intermediate_size or len(read.moe_layers) == read.num_hidden_layers
    assert value_count(checkpoint_weights(read)) > read.vocab_size * read.hidden_size
    again = M3Config.read({"architectures": ["MiniMaxM3SparseForCausalLM"], **read.text_fields()})
    assert (again.rope.rotary_dim, again.sparse_layers) == (read.rope.rotary_dim, read.sparse_layers)


@pytest.mark.parametrize("shape", range(2), ids=["nested", "flat"])
@pytest.mark.parametrize(("name", "value"), [("rms_norm_eps", 10**400), ("layer_types", 5)], ids=str)
def test_what_mutations_do_not_reach_is_refused_by_field(shape: int, name: str, value: object) -> None:
    config = copy.deepcopy(SHAPES[shape])
    config.get("text_config", config)[name] = value
    with pytest.raises(ConfigError, match=name):
        M3Config.read(config)
