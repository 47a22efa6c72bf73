"""What is taken for tied, and what all ranks must hold alike. Numbers are those of issue 16."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import pipe_split, pipeline

from pipegrad import GradientSync, Topology, find_tied, make_manifest
from pipegrad.errors import PlanError, TopologyError
from pipegrad.model.describe import describe_rank
from pipegrad.model.gradient_storage import GradAttribute
from pipegrad.model.merge import starts_of
from pipegrad.model.suspects import likely_ties
from pipegrad.model.ties import declared, link_local
from pipegrad.plugins.written import written
from pipegrad_handlers.data_parallel import DataParallel
from tests.support.gradients.cases import Replies, on, outcome, rank, replies, stage

WORLD: list[Callable[[], Any]] = []
replied = replies(2, WORLD)


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def verdict(*stages: nn.Module) -> tuple[int, int]:
    """Returns how many groups are likely tied, and how many only look alike."""
    said = describe_rank(dict(enumerate(stages)), GradAttribute(), {})
    likely, alike = likely_ties(starts_of([said]), [])
    return len(likely), len(alike)


# --- suspicion


def gpt(first: int = 1, tied: bool = True) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(first)
    embed, block, head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
    if tied:
        head.weight = embed.weight
    return nn.Sequential(embed, block), nn.Sequential(nn.LayerNorm(4), copy.deepcopy(head))


def test_a_head_behind_a_norm_alone_is_a_likely_tie() -> None:
    """Issue 16, point 6. It was only warned of, in words that say the opposite."""
    assert verdict(*gpt()) == (1, 0)
    assert verdict(*gpt(tied=False)) == (0, 0)
    embed, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = nn.Parameter(embed.weight.detach().clone())
    assert verdict(nn.Sequential(embed), nn.Sequential(head)) == (1, 0)


def test_one_seed_on_every_rank_explains_stages_of_one_structure() -> None:
    """Issue 16, point 6. Equal stages, or one that goes on where the other ends, are one draw."""

    def blocks(*last: nn.Module) -> nn.Module:
        return seeded(3, lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), *last))

    assert verdict(blocks(), blocks()) == (0, 4)
    assert verdict(blocks(), blocks(nn.LayerNorm(4), nn.Linear(4, 5))) == (0, 4)


def test_adapters_of_one_seed_are_no_likely_ties() -> None:
    """Issue 16, point 10 (3.8). The advice to declare them would have tied unrelated adapters."""

    def adapted(base: int) -> nn.Module:
        module = seeded(base, lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
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
    where = Topology.build(axes=(("pp", 2), ("dp", 1)))
    for index, module in stages.items():
        link_local({index: module}, declared(shared))
    (tie,) = make_manifest(stages, where, tied=shared).ties
    assert [at for at, _ in tie] == [0, 1]


# --- declared ties


class Layers(nn.Module):
    def __init__(self, tied: tuple[int, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(8)])
        first, second = tied
        self.layers[second].weight = self.layers[first].weight

    def cut(self, begin: int, end: int) -> nn.Module:
        part = nn.Module()
        part.layers = self.layers[begin:end]
        return part


ONE = Topology.build(axes=(("pp", 1), ("dp", 1)), stage_to_rank=(0, 0))


def test_names_that_a_slice_numbers_anew_tie_no_unrelated_layers() -> None:
    """Issue 16, point 10 (1.2). Layers 5 and 7 were overwritten by layer 1, without a word."""
    model = Layers(tied=(1, 3))
    shared = find_tied(model)
    stages = {0: model.cut(0, 4), 1: model.cut(4, 8)}
    before = copy.deepcopy(stages[1].state_dict())
    with pytest.raises(PlanError, match=r"'layers.1.weight' on stage 1 start with different bits"):
        link_local(stages, declared(shared))
    assert all(torch.equal(v, before[k]) for k, v in stages[1].state_dict().items())
    with pytest.raises(PlanError, match=r"start with different bits.*number their layers anew"):
        link_local({1: stages[1]}, declared(shared))


@pytest.mark.parametrize("copied", [False, True])
def test_a_tie_is_found_under_other_names(copied: bool) -> None:
    """Issue 16, point 12. Names differ after the cut: what a stage holds counts."""
    model = Layers(tied=(1, 5))
    shared = find_tied(model)
    stages = {0: model.cut(0, 4), 1: model.cut(4, 8)}
    if copied:
        stages = copy.deepcopy(stages)
        layer = stages[1].get_submodule("layers.1")
        layer.weight = nn.Parameter(layer.get_parameter("weight").detach().clone())
    two = Topology.build(axes=(("pp", 2), ("dp", 1)))
    tie = ((0, "layers.1.weight"), (1, "layers.1.weight"))
    assert make_manifest(stages, two, tied=shared).ties == (tie,)


def test_constants_that_several_stages_have_are_ambiguous() -> None:
    """Issue 16, point 10 (1.2). Zeros cannot tell which stage's layer 1 is meant."""
    two = Topology.build(axes=(("pp", 2), ("dp", 1)))
    stages = {0: stage(a=(2,), b=(2,)), 1: stage(a=(2,))}
    with pytest.raises(PlanError, match=r"stages \[0, 1\] all have a parameter 'a'"):
        make_manifest(stages, two, tied=[["a", "b"]])


def test_a_missing_name_is_an_error_where_nothing_says_who_holds_it() -> None:
    """Issue 16, point 12. The error advises replicated_params."""
    two = Topology.build(axes=(("pp", 2), ("dp", 1)))
    with pytest.raises(PlanError, match=r"no such parameter: \['c'\].*replicated_params"):
        make_manifest({0: stage(a=(2,)), 1: stage(b=(2,))}, two, tied=[["a", "c"]])


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


def test_the_cost_of_ties_is_linear() -> None:
    """Issue 16, point 10 (3.6). 2000 ties took 7.3 s of CPU time, 500 took 0.4 s."""

    def seconds(num_ties: int) -> float:
        stages = {s: stage(**{f"{s}p{i}": (1,) for i in range(num_ties)}) for s in range(2)}
        shared = [{0: f"0p{i}", 1: f"1p{i}"} for i in range(num_ties)]
        began = time.process_time()
        make_manifest(stages, Topology.build(axes=(("pp", 2), ("dp", 1))), tied=shared)
        link_local(stages, declared(shared))
        return time.process_time() - began

    seconds(10)
    few, many = (min(seconds(number) for _ in range(3)) for number in (500, 2000))
    assert many < 10 * few  # quadratic is 16 times and more


# --- what ranks compare


@pytest.mark.parametrize("first", [{"b", "a"}, {"x": {1, 2}, "y": (1.0, None)}, [torch.ones(5000)]])
def test_equal_options_are_written_alike(first: Any) -> None:
    """Issue 16, point 10 (1.13). Sets and tensors of the same values were refused, or agreed."""
    again = copy.deepcopy(first)
    if isinstance(again, dict):
        again = dict(reversed(again.items()))
    assert written(first) == written(again)
    assert written([first]) != written([[*first, 0]])


def test_options_are_written_by_value() -> None:
    """Issue 16, point 10 (1.13). No address, and all elements of a tensor."""

    class Plain:
        def __init__(self, value: object) -> None:
            self.value = value

    one, other = torch.zeros(5000), torch.zeros(5000)
    other[2500] = 1
    assert written(one) != written(other)
    assert written(Plain(1)) == written(Plain(1)) != written(Plain(2))
    assert "0x" not in written([Plain(lambda: 1), object(), print])
    assert written(1) != written(1.0) != written("1.0")
    assert written(lambda: 1) != written(lambda: 2)
    loop: list[object] = []
    loop.append(loop)
    assert written(loop) == "[...]"


# --- on two ranks


def pipelined(modules: nn.Module, **options: Any) -> GradientSync:
    options = {"handlers": ["pipeline-shared"], "agree_seconds": 20.0, **options}
    return GradientSync({rank(): modules}, Topology.create(pipeline=2), **options)


def replicas(module: nn.Module, **options: Any) -> GradientSync:
    options = {"handlers": ["data-parallel"], "agree_seconds": 20.0, **options}
    return GradientSync({0: module}, Topology.create(pipeline=1), **options)


def own(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank() + 1))


@on(WORLD)
def different_bits() -> str:
    return outcome(lambda: pipelined(stage(w=own(3, 2)), tied=[{0: "w", 1: "w"}]))


@on(WORLD)
def zeros_take_the_first() -> list[float]:
    module = stage(w=torch.tensor([1.0, 2.0]) * (1 - rank()))
    pipelined(module, tied=[{0: "w", 1: "w"}]).close()
    values: list[float] = module.get_parameter("w").tolist()
    return values


@on(WORLD)
def models_of_different_seeds() -> list[float]:
    torch.manual_seed(rank())
    model = Layers(tied=(0, 7))
    shared = find_tied(model)
    part = nn.ModuleDict({"0": model.layers[0]} if rank() == 0 else {"7": model.layers[7]})
    pipelined(nn.ModuleDict({"layers": part}), tied=shared).close()
    return next(part.parameters()).flatten().tolist()


@on(WORLD)
def bare_replicas() -> list[str]:
    module = stage(w=(2,), frozen=nn.Parameter(torch.zeros(2), requires_grad=False))
    bare = outcome(lambda: replicas(module, handlers=["pipeline-shared"]))
    for options in ({"handlers": ["noop"]}, {"handlers": [], "allow_unsynced": ["w"]}):
        replicas(module, **options).close()
    module.requires_grad_(requires_grad=False)
    replicas(module, handlers=[]).close()
    return [bare]


@on(WORLD)
def different_buffers() -> list[str]:
    module = stage(w=(2,))
    module.register_buffer("noise", own(3))
    module.register_buffer("count", torch.zeros(()))
    refused = outcome(lambda: replicas(module))
    replicas(module, allow_unsynced=["noise"]).close()
    return [refused]


@on(WORLD)
def instances_that_differ() -> list[str]:
    hooks = ["bf16_compress_hook", "fp16_compress_hook"]
    differ = outcome(lambda: replicas(stage(w=(2,)), handlers=[DataParallel(hook=hooks[rank()])]))
    replicas(stage(w=(2,)), handlers=[DataParallel(hook=hooks[0])]).close()
    return [differ]


@on(WORLD)
def reduce_dtype_of_integers() -> list[str]:
    return [
        outcome(lambda dtype=dtype: replicas(stage(w=(2,)), reduce_dtype=dtype))  # type: ignore[misc]
        for dtype in (torch.int32, torch.bool, "bf16")
    ]


@on(WORLD)
def odd_dtypes() -> list[Any]:
    module = stage(w=torch.complex(own(2).double(), own(2).double()))
    for name, dtype in (("i", torch.int16), ("f", torch.float8_e4m3fn), ("b", torch.bool)):
        odd = nn.Parameter((own(4) * 9).to(dtype), requires_grad=False)
        setattr(module, name, odd)
    sync = replicas(module)
    sync.check_replicas()
    sync.close()
    return [p.detach().to(torch.complex128).tolist() for p in module.parameters()]


@on(WORLD)
def half_of_a_world() -> str:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("model", "pp", "dp"))
    return outcome(lambda: Topology.from_mesh(mesh["pp", "dp"]))


def test_declared_copies_of_different_bits_are_refused(replied: Replies) -> None:
    """Issue 16, point 10 (1.2). One of them was overwritten without a word."""
    for reply in replied:
        assert reply["different_bits"].startswith(
            "PlanError: tie {0: 'w', 1: 'w'}: 'w' on stage 0 and 'w' on stage 1 start with "
            "different bits"
        )
        assert reply["zeros_take_the_first"] == [1.0, 2.0]


def test_an_uncut_model_on_every_rank_needs_no_common_seed(replied: Replies) -> None:
    """Issue 16, point 10 (1.2). find_tied has seen that both are the tied parameter."""
    first, second = (reply["models_of_different_seeds"] for reply in replied)
    assert first == second


def test_a_data_dimension_that_nobody_reduces_is_refused(replied: Replies) -> None:
    """Issue 16, point 10 (1.3). Replicas drifted apart, and check_replicas passed."""
    for reply in replied:
        (message,) = reply["bare_replicas"]
        assert "no handler reduces the gradients of '0.w' and 0 more" in message
        assert "Add 'data-parallel' to the handlers" in message


def test_buffers_of_replicas_start_alike(replied: Replies) -> None:
    """Issue 16, point 10 (1.9). Replicas trained different functions on averaged gradients."""
    for reply in replied:
        assert (
            "buffer 'noise' of stage 0 starts with different bits" in reply["different_buffers"][0]
        )


def test_handlers_given_as_instances_are_compared(replied: Replies) -> None:
    """Issue 16, point 10 (1.13). bf16 on one rank and fp16 on another made gradients of 4.0."""
    for reply in replied:
        assert "ranks disagree on handlers" in reply["instances_that_differ"][0]


def test_reduce_dtype_is_a_float(replied: Replies) -> None:
    """Issue 16, point 10 (1.15). Gradients became 0 without a word."""
    for reply in replied:
        found = reply["reduce_dtype_of_integers"]
        assert all("PlanError: reduce_dtype is" in message for message in found)


def test_parameters_of_any_dtype_are_made_equal_and_checked(replied: Replies) -> None:
    """Issue 16, point 10 (3.5). KeyError: 16, and gloo's "Invalid scalar type"."""
    assert str(replied[0]["odd_dtypes"]) == str(replied[1]["odd_dtypes"])


def test_a_mesh_of_a_part_of_the_world_is_refused_on_all_its_ranks(replied: Replies) -> None:
    """Issue 16, point 14. Ranks that the mesh left out waited for ever."""
    for reply in replied:
        assert "give a mesh of all ranks" in reply["half_of_a_world"]
    assert TopologyError.__name__ in replied[0]["half_of_a_world"]
