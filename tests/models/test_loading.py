"""Every tensor is used exactly once, or the error names what does not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from sglang_m3.models import loading
from sglang_m3.models.loading import WeightError
from sglang_m3.models.weight_map import WeightMap, checkpoint_weights
from tests.models.test_weight_map import tiny

Named = list[tuple[str, Tensor]]

FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def weights() -> WeightMap:
    return checkpoint_weights(tiny())


@pytest.fixture(scope="module")
def checkpoint(weights: WeightMap) -> Named:
    return [
        (name, torch.empty(to.shape, dtype=torch.bfloat16, device="meta")) for name, to in weights.items()
    ]


class Recorded:
    """Parameters that only note what they are asked to load: (parameter, shard, expert) -> loaded tensors."""

    def __init__(self, weights: WeightMap, suffix: str = "") -> None:
        self.calls: dict[tuple[str, object, object], list[Tensor]] = {}
        self.parameters = {}
        for name in {to.parameter + end for to in weights.values() for end in {"", suffix}}:
            parameter = Parameter(torch.empty(0), requires_grad=False)
            parameter.weight_loader = self._loader(name)
            self.parameters[name] = parameter

    def _loader(self, name: str) -> Callable[..., None]:
        def load(
            parameter: Parameter,
            tensor: Tensor,
            shard: object = None,
            *,
            shard_id: object = None,
            expert_id: object = None,
        ) -> None:
            # Experts' loaders take the parameter's name third, the shard by keyword.
            key = (name, shard if expert_id is None else shard_id, expert_id)
            self.calls.setdefault(key, []).append(tensor)

        return load


def load(weights: WeightMap, tensors: Iterable[tuple[str, Tensor]], *, complete: bool = True) -> Recorded:
    recorded = Recorded(weights)
    loading.load(weights, recorded.parameters, tensors, complete=complete)
    return recorded


def test_every_tensor_is_copied_once_to_its_own_place(weights: WeightMap, checkpoint: Named) -> None:
    calls = load(weights, iter(checkpoint)).calls
    expected = {(to.parameter, to.shard, to.expert): name for name, to in weights.items()}
    assert calls.keys() == expected.keys()
    by_name = dict(checkpoint)
    wrong = [name for place, name in expected.items() if [id(t) for t in calls[place]] != [id(by_name[name])]]
    assert not wrong


def dropped(tensors: Named, place: int) -> Named:
    return tensors[:place] + tensors[place + 1 :]


def renamed(tensors: Named, place: int) -> Named:
    name, tensor = tensors[place]
    return [*tensors[:place], (name.replace(".", ".x", 1), tensor), *tensors[place + 1 :]]


def duplicated(tensors: Named, place: int) -> Named:
    return [*tensors, tensors[place]]


def replaced_by_another(tensors: Named, place: int) -> Named:
    return [*tensors[:place], tensors[place - 1], *tensors[place + 1 :]]


def with_one_row_more(tensors: Named, place: int) -> Named:
    name, tensor = tensors[place]
    taller = tensor.new_empty(tensor.shape[0] + 1, *tensor.shape[1:])
    return [*tensors[:place], (name, taller), *tensors[place + 1 :]]


def flattened(tensors: Named, place: int) -> Named:
    name, tensor = tensors[place]
    return [*tensors[:place], (name, tensor[None]), *tensors[place + 1 :]]


@pytest.mark.parametrize("listed", (False, True), ids=("from files", "from a list"))
@pytest.mark.parametrize(
    "mutation", (dropped, renamed, duplicated, replaced_by_another, with_one_row_more, flattened)
)
def test_a_mutation_of_any_tensor_is_caught_by_name(
    weights: WeightMap, checkpoint: Named, mutation: Callable[[Named, int], Named], listed: bool
) -> None:
    escaped = []
    for place, (name, _) in enumerate(checkpoint):
        mutated = mutation(checkpoint, place)
        try:
            load(weights, mutated if listed else iter(mutated))
        except WeightError as error:
            if name not in str(error):
                escaped.append(f"{name}, error: {error}")
        else:
            escaped.append(name)
    assert not escaped


def test_one_error_lists_everything_that_is_wrong(weights: WeightMap, checkpoint: Named) -> None:
    tensors = [*checkpoint[1:], ("strange.weight", torch.empty(1)), checkpoint[3]]
    tensors[4] = (tensors[4][0], torch.empty(3, 5))
    with pytest.raises(WeightError) as caught:
        load(weights, iter(tensors))
    message = str(caught.value)
    for part in (
        f"1 missing: {checkpoint[0][0]}",
        "1 unknown: strange.weight",
        f"1 duplicate: {checkpoint[3][0]}",
        f"1 misshapen: {tensors[4][0]} is 3x5, not ",
    ):
        assert part in message, message


def test_of_many_names_twenty_are_listed_and_the_rest_counted(weights: WeightMap, checkpoint: Named) -> None:
    with pytest.raises(WeightError, match=rf"{len(checkpoint)} missing: .* and {len(checkpoint) - 20} more"):
        load(weights, [])


def test_draft_heads_are_skipped_in_one_line(
    weights: WeightMap, checkpoint: Named, caplog: pytest.LogCaptureFixture
) -> None:
    drafts = [
        (f"{path}.0.weight", torch.empty(1))
        for path in ("language_model.model.mtp.layers", "model.mtp.layers", "mtp", "language_model.dspark")
    ]
    with caplog.at_level(logging.INFO, "sglang_m3"):
        load(weights, iter(drafts + checkpoint))
    assert [record.getMessage() for record in caplog.records] == [
        "sglang-m3: skipped 4 tensors of draft heads (mtp.*, dspark.*)."
    ]


def test_an_update_needs_only_some_tensors_in_any_order(weights: WeightMap, checkpoint: Named) -> None:
    some = checkpoint[70:20:-3]
    assert sum(map(len, load(weights, some, complete=False).calls.values())) == len(some)


@pytest.mark.parametrize("wrong", (("strange.weight", torch.empty(1)), None), ids=("unknown", "misshapen"))
def test_a_refused_list_changes_nothing(
    weights: WeightMap, checkpoint: Named, wrong: tuple[str, Tensor] | None
) -> None:
    recorded = Recorded(weights)
    last = wrong or (checkpoint[9][0], torch.empty(2, 2))
    with pytest.raises(WeightError):
        loading.load(weights, recorded.parameters, [*checkpoint[:9], last], complete=False)
    assert recorded.calls == {}


def test_another_pipeline_stages_tensors_are_accounted_for_and_left(
    weights: WeightMap, checkpoint: Named
) -> None:
    recorded = Recorded(weights)
    elsewhere = {name for name in recorded.parameters if ".layers.3." in name or "lm_head" in name}
    for name in elsewhere:
        del recorded.parameters[name]
    loading.load(weights, recorded.parameters, iter(checkpoint), complete=True)
    assert {name for name, _, _ in recorded.calls} == set(recorded.parameters)


WEIGHT = "language_model.model.layers.0.mlp.down_proj.weight"


def quantised(weights: WeightMap, checkpoint: Named, dtype: torch.dtype, *, scales: bool) -> Named:
    tensors = dict(checkpoint)
    tensors[WEIGHT] = tensors[WEIGHT].to(dtype)
    if scales:
        tensors[f"{WEIGHT}_scale_inv"] = torch.empty(
            weights[WEIGHT].scales().shape, dtype=torch.uint8, device="meta"
        )
    return list(tensors.items())


@pytest.mark.parametrize(
    ("dtype", "scales", "message"),
    [
        (FP8, True, None),
        (torch.bfloat16, False, None),
        (FP8, False, rf"1 missing: {WEIGHT}_scale_inv"),
        (torch.bfloat16, True, rf"scales of a weight that is not float8_e4m3fn: {WEIGHT}_scale_inv"),
    ],
)
def test_a_quantised_weight_comes_with_its_scales_and_no_other_does(
    weights: WeightMap, checkpoint: Named, dtype: torch.dtype, scales: bool, message: str | None
) -> None:
    parameters = Recorded(weights, "_scale_inv").parameters
    tensors = quantised(weights, checkpoint, dtype, scales=scales)
    if message is None:
        assert loading.load(weights, parameters, tensors, complete=True) == dict(tensors).keys()
        return
    with pytest.raises(WeightError, match=message):
        loading.load(weights, parameters, tensors, complete=True)


def test_a_quantised_weight_for_an_unquantised_server_is_refused(
    weights: WeightMap, checkpoint: Named
) -> None:
    tensors = quantised(weights, checkpoint, FP8, scales=True)
    for parameters in (Recorded(weights).parameters, {}):
        with pytest.raises(WeightError, match=rf"quantised, but the server is not.*: {WEIGHT}"):
            loading.load(weights, parameters, tensors, complete=True)


@pytest.mark.parametrize("name", ["model.norm", "model.embed_tokens", "model.layers.1.block_sparse_moe.gate"])
def test_what_the_format_leaves_unquantised_is_refused_quantised(
    weights: WeightMap, checkpoint: Named, name: str
) -> None:
    """On every pipeline stage, whether it has the parameter or not."""
    wrong = f"language_model.{name}.weight"
    tensors = [(other, tensor.to(FP8) if other == wrong else tensor) for other, tensor in checkpoint]
    whole = Recorded(weights, "_scale_inv").parameters
    other_stage = {at: parameter for at, parameter in whole.items() if at.startswith("model.layers.3.")}
    for parameters in (whole, other_stage):
        with pytest.raises(WeightError, match=rf"1 quantised, which M3's format does not have: {wrong}"):
            loading.load(weights, parameters, tensors, complete=False)


def test_a_model_that_the_map_does_not_fill_is_a_defect(weights: WeightMap) -> None:
    names = {to.parameter for to in weights.values()}
    loading.check_covered(weights, names, unloaded=(), whole=True)
    loading.check_covered(weights, names | {"tower.unused"}, unloaded=["tower.unused"], whole=True)
    loading.check_covered(weights, names - {"lm_head.weight"}, unloaded=(), whole=False)
    with pytest.raises(AssertionError, match=r"no checkpoint tensor fills \['tower.unused'\]"):
        loading.check_covered(weights, names | {"tower.unused"}, unloaded=(), whole=True)
    with pytest.raises(AssertionError, match=r"no parameter takes \['lm_head.weight'\]"):
        loading.check_covered(weights, names - {"lm_head.weight"}, unloaded=(), whole=True)
