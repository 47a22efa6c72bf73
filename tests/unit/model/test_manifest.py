"""What each rank says of itself, and the one model that all make of it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipegrad import ParameterRecord, Topology
from pipegrad.comm import plain
from pipegrad.errors import AgreementError, PlanError, TopologyError
from pipegrad.model.describe import check_stages, describe_rank, device_of, make_manifest, merge
from pipegrad.model.manifest import Manifest, ParameterEntry, RankManifest
from pipegrad.model.ties import declared
from pipegrad.plan.options import GradientOptions
from tests.support.gradients.cases import stage
from tests.support.gradients.plans import entry, grid

Modules = Mapping[int, nn.Module]


def describe(modules: Modules, **settings: object) -> RankManifest:
    return describe_rank(modules, None, settings)


def merged(
    make: Callable[[int], nn.Module], where: Topology, *shared: Sequence[str] | Mapping[int, str]
) -> Manifest:
    """Merges what every rank says that holds ``make(stage)``."""
    said = [
        describe({s: make(s) for s in where.at(rank).local_stages}) for rank in sorted(where.ranks)
    ]
    return merge(said, where, declared(shared))


class Table(nn.Module):
    """A lookup table whose class is not called an embedding."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.table = table


def linear(weight: nn.Parameter) -> nn.Linear:
    made = nn.Linear(3, 4, bias=False)
    made.weight = weight
    return made


def matrices(manifest: Manifest) -> dict[str, bool]:
    return {record.key: record.is_matrix() for record in manifest.parameters}


# --- one rank


def test_a_rank_describes_its_stages() -> None:
    first = stage(w=(2, 3), b=(3,))
    first.again = first.w
    last = stage(
        head=first.get_parameter("w"),
        scale=nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16), False),
    )
    manifest = describe({3: last, 0: first}, comm_streams=2, reduce_dtype=None)
    scale = ParameterEntry("scale", (), (), (), torch.bfloat16, torch.bfloat16, False)
    assert manifest == RankManifest(
        stages=(
            (0, (entry("w", 2, 3, aliases=("again",)), entry("b", 3))),
            (3, (entry("head", 2, 3), scale)),
        ),
        wrappers=(),
        linked=(((0, "w"), (3, "head")),),
        device_type="cpu",
        settings=(("comm_streams", "2"), ("reduce_dtype", "None")),
    )
    zeros = 8 * "0"
    starts = [(e.digest, e.constant) for e in manifest.entries.values()]
    assert starts == [(None, zeros), (None, zeros), (None, zeros), (None, "0040")]
    assert plain.loads(plain.dumps(manifest)) == manifest
    assert str(entry("w", 2, 3)) == "w (2, 3) torch.float32 grad torch.float32 trained"


def test_strides_and_gradient_dtypes_are_described() -> None:
    image = nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    low = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    low.grad_dtype = torch.float32
    manifest = describe_rank({0: stage(image=image, low=low)}, None, {})
    (_, (first, second)), *_ = manifest.stages
    assert first.stride == (48, 1, 12, 3)
    assert (second.dtype, second.gradient_dtype) == (torch.bfloat16, torch.float32)


def test_fingerprints_are_of_bits_that_vary() -> None:
    torch.manual_seed(0)
    weight = torch.randn(70, 70)
    other = weight.clone()
    other[0, 0] += 1
    parameters = {
        "a": nn.Parameter(weight),
        "b": nn.Parameter(weight.clone()),
        "c": nn.Parameter(other),
        "d": nn.Parameter(torch.ones(9)),
        "e": nn.Parameter(torch.randn(4, dtype=torch.complex64)),
    }
    found = [e.digest for e in describe({0: stage(**parameters)}).entries.values()]
    assert [digest is None for digest in found] == [False, False, False, True, False]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"modules": {1: nn.Module()}},
            TopologyError,
            r"given modules for stages \[1\], but .*\[0\]",
        ),
        (
            {"modules": {0: nn.Linear(2, 2, device="meta")}},
            PlanError,
            "'weight' of stage 0 is on the meta device: materialise",
        ),
        ({"modules": {0: None}}, PlanError, "stage 0 is None, expected an nn.Module"),
        ({"topology": grid(2)}, TopologyError, r"ranks \[0, 1\], the default process group 1"),
    ],
)
def test_arguments_that_one_rank_sees_to_be_wrong(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    right: dict[str, Any] = {"modules": {0: nn.Module()}, "topology": grid(1)}
    check_stages(**right)
    with pytest.raises(error, match=message):
        check_stages(**right | arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_bytes": -1}, "bucket_bytes is -1, expected a whole number of at least 0"),
        ({"comm_streams": 2.0}, "comm_streams is 2.0, expected a whole number"),
        ({"comm_streams": 0}, "comm_streams is 0, expected a whole number of at least 1"),
        ({"stage_ticks": (1, 2)}, "stage_ticks has 2 entries for 1 stages"),
        ({"reduce_dtype": torch.int32}, "reduce_dtype is torch.int32, expected one of floats"),
        ({"allow_unsynced": "*.bias"}, r"allow_unsynced is '\*.bias', expected a list"),
        ({"bucket_byte": 1}, "has no option 'bucket_byte'; allowed, closest first: bucket_bytes"),
    ],
)
def test_options_that_are_wrong_on_any_model(options: dict[str, Any], message: str) -> None:
    GradientOptions.of({}).check(grid(1))
    with pytest.raises(PlanError, match=message):
        GradientOptions.of(options).check(grid(1))


def test_a_rank_without_parameters_takes_the_others_device_type() -> None:
    meta = nn.Parameter(torch.zeros(2, device="meta"))
    with pytest.raises(PlanError, match=r"several devices, \['cpu', 'meta'\]"):
        describe({4: stage(a=meta, b=(2,))})
    assert device_of({}, [describe({}), describe({0: stage(a=(1,))})]) == torch.device("cpu")
    assert device_of({0: nn.Module()}, [describe({})]) == torch.device("cpu")


# --- all ranks


def test_the_manifest_of_stages_on_the_meta_device_is_that_of_the_ranks() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
    model[2].weight = model[0].weight
    cut = {stage: model[stage : stage + 1] for stage in range(3)}
    v = grid(2, 2, (0, 1, 0))
    ranks = [describe({s: copy.deepcopy(cut[s]) for s in v.at(r).local_stages}) for r in v.ranks]
    shared = [["0.weight", "2.weight"]]
    made = make_manifest({s: m.to("meta") for s, m in cut.items()}, v, tied=shared)
    assert made == merge(ranks, v, declared(shared))
    assert [r.holders for r in made.records(v)] == [(0, 2)]
    with pytest.raises(TopologyError, match=r"stages 0\.\.2, but .* stages \[0, 1\]"):
        make_manifest({0: cut[0], 1: cut[1]}, v)


def tied(index: int) -> nn.Module:
    """Stage 0 holds emb, b; stage 1 c; stage 2 a dead alias, norm and head."""
    return [
        lambda: stage(emb=(4, 2), b=(2,)),
        lambda: stage(c=(3,)),
        lambda: stage(norm=(2,), head=(4, 2)),
    ][index]()


def test_records_of_every_rank() -> None:
    manifest = merged(tied, grid(3), {0: "emb", 2: "head"})
    assert manifest.ties == (((0, "emb"), (2, "head")),)
    record = partial(ParameterRecord, dtype=torch.float32, requires_grad=True, kind="Module")
    emb = record(key="0.emb", name="emb", stage=0, shape=(4, 2), holders=(0, 2), position=0)
    assert [manifest.records(grid(3).at(rank)) for rank in range(3)] == [
        (emb, record(key="0.b", name="b", stage=0, shape=(2,), holders=(0,), position=1)),
        (record(key="1.c", name="c", stage=1, shape=(3,), holders=(1,), position=0),),
        (
            record(key="2.norm", name="norm", stage=2, shape=(2,), holders=(2,), position=0),
            dataclasses.replace(emb, name="head", stage=2),
        ),
    ]
    assert manifest.records(grid(3))[0].shared
    assert not manifest.records(grid(3))[1].shared
    assert manifest.locations["0.emb"] == ((0, "emb"), (2, "head"))
    assert manifest.entries("0.emb") == (entry("emb", 4, 2), entry("head", 4, 2))


def test_a_parameter_that_two_stages_of_one_rank_hold_has_one_record() -> None:
    def make(where: Topology) -> Manifest:
        shared = nn.Parameter(torch.zeros(4, 2))
        return merged(
            lambda s: stage(head=shared, own=(1,)) if s in (0, 3) else stage(c=(3,)), where
        )

    v = grid(2, stages=(0, 1, 1, 0))
    manifest = make(v)
    assert manifest.ties == (((0, "head"), (3, "head")),)
    assert [(r.key, r.holders) for r in manifest.records(v)] == [
        ("0.head", (0, 3)), ("0.own", (0,)), ("3.own", (3,)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "shared",
    [
        [["emb", "head"]],
        [{0: "emb", 2: "head"}],
        [{"submod_pp_2": "head", "submod_pp_0": "emb"}],
        [["emb", "head"], {0: "emb", 2: "head"}],  # said twice
    ],
)
def test_every_form_of_a_declaration_means_the_same(shared: list[Mapping[int, str]]) -> None:
    assert merged(tied, grid(3), *shared) == merged(tied, grid(3), {0: "emb", 2: "head"})


def test_declarations_that_touch_are_one_tie() -> None:
    def make(s: int) -> nn.Module:
        return stage(**{f"p{s}": (2,), "q": (3,)})

    chained = merged(make, grid(4), ["p0", "p2"], ["p3", "p1"], {1: "p1", 2: "p2"})
    assert chained.ties == (((0, "p0"), (1, "p1"), (2, "p2"), (3, "p3")),)
    apart = merged(make, grid(4), ["p3", "p1"], ["p2", "p0"])
    assert apart.ties == (((0, "p0"), (2, "p2")), ((1, "p1"), (3, "p3")))
    everywhere = merged(make, grid(4), ["q"])  # one name on all stages
    assert everywhere.ties == (((0, "q"), (1, "q"), (2, "q"), (3, "q")),)

    def aliased(_: int) -> nn.Module:
        module = stage(w=(2,))
        module.alias = module.w
        return module

    assert merged(aliased, grid(2), {0: "alias", 1: "w"}).ties == (((0, "w"), (1, "w")),)
    # A rank that links two stages ties them for all.
    one, where = nn.Parameter(torch.zeros(2)), grid(1, 2, stages=(0, 0))
    linked = describe({0: stage(a=one), 1: stage(b=one)})
    apart_there = describe({0: stage(a=(2,)), 1: stage(b=(2,))})
    assert merge([apart_there, linked], where, ()).ties == (((0, "a"), (1, "b")),)


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        (["emb", "lm_head"], r"tie \['emb', 'lm_head'\]: no such parameter: \['lm_head'\]"),
        ({0: "emb", 1: "head"}, r"no such parameter: \[\"'head' on stage 1\"\]"),
        ({0: "emb", 1: "c"}, r"its shape is \(3,\) and the other's \(4, 2\)"),
        (["emb", "b", "head"], "one stage holds it as several objects"),
    ],
)
def test_a_declaration_that_fits_no_model(
    shared: Sequence[str] | Mapping[int, str], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        merged(tied, grid(3), shared)


@pytest.mark.parametrize(
    ("other", "trait"),
    [
        (nn.Parameter(torch.zeros(2, 4)), r"shape is \(2, 4\) and the other's \(4, 2\)"),
        (
            nn.Parameter(torch.zeros(4, 2, dtype=torch.bfloat16)),
            "dtype is torch.bfloat16 and the other's torch.float32",
        ),
        (nn.Parameter(torch.zeros(4, 2), False), "requires_grad is False and the other's True"),
    ],
)
def test_a_tie_must_be_one_parameter(other: nn.Parameter, trait: str) -> None:
    def make(s: int) -> nn.Module:
        return stage(emb=(4, 2)) if s == 0 else stage(head=other)

    with pytest.raises(PlanError, match=f"'head' on stage 1 is tied to 'emb' on stage 0.*{trait}"):
        merged(make, grid(2), ["emb", "head"])


DISAGREE: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "missing": (
        {"stages": ((0, ()),)},
        *(
            "the parameters of stage 0",
            "w (3,) torch.float32 grad torch.float32 trained",
            "nothing",
        ),
    ),
    "setting": ({"settings": ()}, "comm_streams", "1", "nothing"),
    "device": ({"device_type": "cuda"}, "the device type", "cpu", "cuda"),
    "wrapper": (
        {"wrappers": ((0, "DistributedDataParallel"),)},
        *("the wrapper of stage 0", "nothing", "DistributedDataParallel"),
    ),
}


@pytest.mark.parametrize(("odd", "what", "ours", "theirs"), DISAGREE.values(), ids=DISAGREE)
def test_ranks_that_disagree_are_told_who_says_what(
    odd: dict[str, Any], what: str, ours: str, theirs: str
) -> None:
    right = describe({0: stage(w=(3,))}, comm_streams=1)
    said = [right, dataclasses.replace(right, **odd), right]
    with pytest.raises(AgreementError) as caught:
        merge(said, grid(1, 3), ())
    assert str(caught.value) == (
        f"ranks disagree on {what}: {ours} on ranks [0, 2], {theirs} on rank 1; make them the same"
    )


@pytest.mark.parametrize(
    ("trait", "other"),
    [
        ("gradient_dtype", torch.float64),
        ("requires_grad", False),
        ("name", "v"),
    ],
)
def test_copies_of_a_stage_must_match_in(trait: str, other: Any) -> None:
    right = describe({0: stage(w=(3,))})
    odd = dataclasses.replace(entry("w", 3), **{trait: other})
    with pytest.raises(AgreementError, match=r"parameters of stage 0: .* on rank 0, .* on rank 1;"):
        merge([right, dataclasses.replace(right, stages=((0, (odd,)),))], grid(1, 2), ())


def test_strides_may_differ_from_copy_to_copy() -> None:
    """One rank has channels_last weights, another not: the lowest rank's layout is everybody's."""
    shape = (2, 3, 4, 4)
    plain = describe({0: stage(w=shape)})
    last = torch.zeros(shape).to(memory_format=torch.channels_last)
    odd = describe({0: stage(w=nn.Parameter(last))})
    where = grid(1, 2)
    assert merge([plain, odd], where, ()) == merge([plain, plain], where, ())
    assert merge([odd, plain], where, ()) == merge([odd, odd], where, ())


# --- what is a matrix


@pytest.mark.parametrize("make_holders", [(Table, linear), (linear, Table)], ids=["in", "out"])
def test_a_parameter_of_several_modules_is_no_matrix_in_any_cut(
    make_holders: Sequence[Callable[[nn.Parameter], nn.Module]],
) -> None:
    """A table and a head in one stage were a matrix, and in two stages they were none."""
    weight = nn.Parameter(torch.zeros(4, 3))
    first, last = (make(weight) for make in make_holders)
    whole = make_manifest({0: nn.Sequential(first, nn.Linear(3, 3), last)}, grid(1))
    assert list(matrices(whole).values()) == [False, True, False]
    stages = {0: nn.Sequential(first, nn.Linear(3, 3)), 1: nn.Sequential(last)}
    names = [next(name for name, _ in stages[s].named_parameters()) for s in stages]
    in_two = make_manifest(stages, grid(2), tied=[dict(enumerate(names))])
    assert matrices(in_two) == matrices(whole)
    # The class of the first holder alone counted, so an embedding behind its head was a matrix.
    embedding = nn.Embedding(4, 3)
    embedding.weight = weight
    for holders in ([last, embedding], [embedding, last]):
        alone = make_manifest({0: nn.Sequential(*holders)}, grid(1))
        assert list(matrices(alone).values()) == [False]


def test_a_tie_inside_any_stage_counts_on_all_stages() -> None:
    weight = nn.Parameter(torch.zeros(4, 3))
    stages = {0: nn.Sequential(linear(weight)), 1: nn.Sequential(Table(weight), linear(weight))}
    manifest = make_manifest(stages, grid(2), tied=[{0: "0.weight", 1: "0.table"}])
    records = [manifest.records(grid(2).at(rank))[0] for rank in (0, 1)]
    assert [record.tied_in_stage for record in records] == [True, True]
    assert [record.aliases for record in records] == [(), ("1.weight",)]


def test_a_module_with_several_names_is_one_holder() -> None:
    """Stages that hold copies of it are several holders, and so are its names for the patterns."""
    layer = nn.Linear(3, 3, bias=False)
    twice = make_manifest({0: nn.Sequential(layer, nn.Tanh(), layer)}, grid(1))
    [record] = twice.parameters
    assert (record.aliases, record.tied_in_stage) == (("2.weight",), False)
    assert record.is_matrix()
    assert not record.is_matrix(["0.*"])
    assert not record.is_matrix(["2.*"])
    stages = {0: nn.Sequential(layer), 1: nn.Sequential(layer)}
    apart = make_manifest(stages, grid(2), tied=[{0: "0.weight", 1: "0.weight"}])
    assert matrices(apart) == {"0.0.weight": False}
    # Two names in one module are one holder.
    held = stage(w=(4, 3))
    held.again = held.w
    assert matrices(make_manifest({0: held}, grid(1))) == {"0.w": True}
