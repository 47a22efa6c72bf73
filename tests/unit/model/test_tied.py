"""What is taken for tied, by bits, by declaration and by memory. Numbers are those of issue 16."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import pipe_split, pipeline

from pipegrad import Topology, find_tied, make_manifest
from pipegrad.errors import PlanError
from pipegrad.model.describe import describe_rank, starts_of
from pipegrad.model.gradient_storage import GradAttribute
from pipegrad.model.suspects import likely_ties
from pipegrad.model.ties import declared, link_local, refuse_partly_shared
from tests.support.gradients.cases import stage

TWO = Topology.build(axes=(("pp", 2), ("dp", 1)))


def verdict(*stages: nn.Module) -> tuple[int, int]:
    """Returns how many groups are likely tied, and how many only look alike."""
    said = describe_rank(dict(enumerate(stages)), GradAttribute(), {})
    likely, alike = likely_ties(starts_of([said]), [])
    return len(likely), len(alike)


def test_a_head_behind_a_norm_alone_is_a_likely_tie() -> None:
    """Issue 16, point 6. It was only warned of, in words that say the opposite."""
    embed, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    stages = nn.Sequential(embed, nn.Linear(4, 4)), nn.Sequential(nn.LayerNorm(4), head)
    assert verdict(*stages) == (0, 0)
    head.weight = nn.Parameter(embed.weight.detach().clone())
    assert verdict(*stages) == (1, 0)
    assert verdict(nn.Sequential(embed), nn.Sequential(head)) == (1, 0)


def test_one_seed_on_every_rank_explains_stages_of_one_structure() -> None:
    """Issue 16, point 6. Equal stages, or one that goes on where the other ends, are one draw."""

    def blocks(*last: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), *last)

    assert verdict(blocks(), blocks()) == (0, 4)
    assert verdict(blocks(), blocks(nn.LayerNorm(4), nn.Linear(4, 5))) == (0, 4)


def test_adapters_of_one_seed_are_no_likely_ties() -> None:
    """Issue 16, point 10 (3.8). The advice to declare them would have tied unrelated adapters."""

    def adapted(base: int) -> nn.Module:
        torch.manual_seed(base)
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        module.requires_grad_(False)
        torch.manual_seed(0)
        for layer in module.children():
            layer.a = nn.Parameter(torch.randn(4, 2))
            layer.b = nn.Parameter(torch.zeros(2, 4))
        return module

    assert verdict(adapted(1), adapted(2)) == (0, 2)


class Alias(nn.Module):
    """As torch's ModelWithParamAlias: two names for one parameter, used on both sides of a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.p1 = self.p2 = nn.Parameter(torch.randn(4, 4))
        self.lin0, self.lin1 = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin0(x @ self.p1) @ self.p2
        pipe_split()
        return self.lin1(x @ self.p1)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
def test_a_traced_model_whose_alias_was_dropped() -> None:
    """Issue 16, points 6 and 12. The tracer keeps one name: it is a tie, and no missing one."""
    model = Alias()
    pipe = pipeline(model, (torch.randn(2, 4),))
    stages = {i: pipe.get_stage_module(i) for i in range(2)}
    shared = find_tied(model)
    assert shared == [["p1", "p2"]]
    assert verdict(*stages.values()) == (1, 0)
    for index, module in stages.items():
        link_local({index: module}, declared(shared))
    (tie,) = make_manifest(stages, TWO, tied=shared).ties
    assert [at for at, _ in tie] == [0, 1]


# --- declared ties


def cut_in_two(first: int, second: int) -> tuple[list[list[str]], dict[int, nn.Module]]:
    """Returns ties and stages of a model of eight layers, of which two are tied."""
    layers = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(8)])
    layers[second].weight = layers[first].weight
    stages: dict[int, nn.Module] = {
        s: nn.ModuleDict({"layers": layers[4 * s : 4 * s + 4]}) for s in range(2)
    }
    return find_tied(nn.ModuleDict({"layers": layers})), stages


def test_names_that_a_slice_numbers_anew_tie_no_unrelated_layers() -> None:
    """Issue 16, point 10 (1.2). Layers 5 and 7 were overwritten by layer 1, without a word."""
    shared, stages = cut_in_two(1, 3)
    before = copy.deepcopy(stages[1].state_dict())
    with pytest.raises(PlanError, match=r"'layers.1.weight' on stage 1 start with different bits"):
        link_local(stages, declared(shared))
    assert all(torch.equal(v, before[k]) for k, v in stages[1].state_dict().items())
    with pytest.raises(PlanError, match=r"start with different bits.*number their layers anew"):
        link_local({1: stages[1]}, declared(shared))


@pytest.mark.parametrize("copied", [False, True])
def test_a_tie_is_found_under_other_names(copied: bool) -> None:
    """Issue 16, point 12. Names differ after the cut: what a stage holds counts."""
    shared, stages = cut_in_two(1, 5)
    if copied:
        stages = copy.deepcopy(stages)
        layer = stages[1].get_submodule("layers.1")
        layer.weight = nn.Parameter(layer.get_parameter("weight").detach().clone())
    tie = ((0, "layers.1.weight"), (1, "layers.1.weight"))
    assert make_manifest(stages, TWO, tied=shared).ties == (tie,)


def test_constants_that_several_stages_have_are_ambiguous() -> None:
    """Issue 16, point 10 (1.2). Zeros cannot tell which stage's layer 1 is meant."""
    stages = {0: stage(a=(2,), b=(2,)), 1: stage(a=(2,))}
    with pytest.raises(PlanError, match=r"stages \[0, 1\] all have a parameter 'a'"):
        make_manifest(stages, TWO, tied=[["a", "b"]])


def test_a_missing_name_is_an_error_where_nothing_says_who_holds_it() -> None:
    """Issue 16, point 12. The error advises replicated_params."""
    with pytest.raises(PlanError, match=r"no such parameter: \['c'\].*replicated_params"):
        make_manifest({0: stage(a=(2,)), 1: stage(b=(2,))}, TWO, tied=[["a", "c"]])


def test_parameters_that_share_memory() -> None:
    """Issue 16, point 10 (1.8). Equal views are a tie; a transpose or a chunk is an error."""
    model = nn.ModuleDict({"e": nn.Embedding(5, 3), "h": nn.Linear(3, 5, bias=False)})
    model["h"].weight = nn.Parameter(model.get_parameter("e.weight").data)
    assert find_tied(model) == [["e.weight", "h.weight"]]
    link_local({0: model["e"], 1: model["h"]}, ())
    assert model["h"].weight is model["e"].weight
    big = torch.randn(6, 4)
    apart = stage(a=big[:3], b=big[3:], c=torch.randn(2))
    assert find_tied(apart) == []
    columns = stage(a=big[:, :2], b=big[:, 2:])
    assert find_tied(columns) == []
    for view in (big.t(), big[2:]):
        with pytest.raises(PlanError, match=r"'a' \(6, 4\) and 'b' .* different views"):
            find_tied(stage(a=big, b=view))
        with pytest.raises(PlanError, match=r"different views of the same memory"):
            link_local({0: stage(a=big), 1: stage(b=view)}, ())


@pytest.mark.slow
def test_the_cost_of_ties_is_linear() -> None:
    """Issue 16, point 10 (3.6). 2000 ties took 7.3 s of CPU time, 500 took 0.4 s."""

    def seconds(num_ties: int) -> float:
        stages = {s: stage(**{f"{s}p{i}": (1,) for i in range(num_ties)}) for s in range(2)}
        shared = [{0: f"0p{i}", 1: f"1p{i}"} for i in range(num_ties)]
        began = time.process_time()
        make_manifest(stages, TWO, tied=shared)
        link_local(stages, declared(shared))
        return time.process_time() - began

    seconds(10)
    few, many = (min(seconds(number) for _ in range(3)) for number in (500, 2000))
    assert many < 10 * few  # quadratic is 16 times and more


def views(*ranges: tuple[int, int]) -> list[tuple[str, nn.Parameter]]:
    flat = torch.zeros(32)
    return [(f"p{i}", nn.Parameter(flat[begin:end])) for i, (begin, end) in enumerate(ranges)]


def test_pieces_of_one_flat_tensor_that_only_touch_are_no_shared_memory() -> None:
    refuse_partly_shared(views((0, 8), (8, 12), (12, 13), (20, 32)))


def test_views_with_a_common_byte_are_refused_in_any_order() -> None:
    with pytest.raises(PlanError, match=r"'p0' \(8,\) and 'p2' \(8,\)"):
        refuse_partly_shared(views((0, 8), (20, 24), (4, 12)))
