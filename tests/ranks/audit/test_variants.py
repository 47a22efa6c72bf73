"""Options of a pipeline that are lost, alike, refused or without effect, and updates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from pipegrad.audit import Audit, of_torch
from pipegrad.audit.report import Report
from pipegrad.audit.script import Run
from pipegrad.errors import AgreementError, PlanError

pytestmark = pytest.mark.ranks(2)

WIDTH, MICROBATCHES = 6, 4
ALL = tuple(f"{index}.weight" for index in range(4))


@dataclass(frozen=True)
class Options:
    """Of one side: how large gradients are, dropout, further layers, and the optimizer's."""

    gain: float = 1.0
    dropout: float = 0.0
    layers: int = 4
    rate: float = 0.1
    momentum: float = 0.0
    recompute: bool = False
    seed: int = 1
    fails: bool = False


class Layer(nn.Module):
    """A layer whose gradient is `gain` times as large, and whose output is as ever."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        if self.options.fails:
            raise NotImplementedError("this needs a GPU")
        gain = self.options.gain
        weight = gain * self.weight - (gain - 1) * self.weight.detach()
        return functional.dropout(torch.tanh(functional.linear(x, weight)), self.options.dropout)


def uncut(options: Options) -> nn.Sequential:
    torch.manual_seed(options.seed)
    return nn.Sequential(*(Layer(options) for _ in range(options.layers)))


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(2)]


def made(one: Options, *pipeline: Options, has_optimizer: bool = False) -> Audit:
    """Returns the audit of one process, and of a pipeline whose stages may have other options."""
    rank = dist.get_rank()
    own = (pipeline or (one,))[rank % max(1, len(pipeline))]
    module = uncut(replace(own, layers=4))[2 * rank : 2 * rank + 2]
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    optimizer = torch.optim.SGD(module.parameters(), lr=own.rate, momentum=own.momentum)
    audit = of_torch(
        Schedule1F1B(stage, MICROBATCHES, functional.mse_loss),
        optimizer,
        model=uncut(one),
        batches=batches(),
    )
    if not has_optimizer:
        return audit
    return replace(
        audit,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=one.rate, momentum=one.momentum),
    )


USUAL = Options()
LARGE = Options(gain=3.0)
NOWHERE: tuple[tuple[str, ...], tuple[int, ...]] = (), ()


def varied(
    *sides: Options, usual: Sequence[Options] = (USUAL,), steps: int = 1, **more: Any
) -> Report:
    """Returns the report of a variant: one process, and the stages of the pipeline."""
    audit = made(*usual, **more)
    return replace(audit, variants={"option": partial(made, *sides, **more)}).run(steps=steps)


@pytest.mark.parametrize(
    ("sides", "words", "amounts", "cause", "where"),
    [
        ((LARGE,), "alike", ("gradient", 2.0, 2.0), "", NOWHERE),
        (
            (LARGE, USUAL),
            "lost in the pipeline",
            ("gradient", 2.0, 0.0),
            "option: changes one process's gradient by 2, and the pipeline's not at all",
            (ALL, (0, 1)),
        ),
        (
            (USUAL, LARGE),
            "in the pipeline alone",
            ("gradient", 0.0, 2.0),
            "option: changes the pipeline's gradient by 2, and one process's not at all",
            (ALL, (0, 1)),
        ),
        (
            (LARGE, Options(gain=6.0)),
            "otherwise in the pipeline",
            ("gradient", 2.0, 5.0),
            "option: the gradient is multiplied by 2",
            (ALL, (0, 1)),
        ),
        (
            (Options(dropout=0.25), USUAL),
            "lost in the pipeline",
            ("dropout", 0.25, 0.0),
            "option: changes one process's dropout by 0.25, and the pipeline's not at all",
            NOWHERE,
        ),
        ((Options(dropout=0.25),), "alike", ("dropout", 0.25, 0.25), "", NOWHERE),
        ((Options(recompute=True),), "without effect in both", ("", 0.0, 0.0), "", NOWHERE),
    ],
    ids=["alike", "lost", "added", "otherwise", "dropout lost", "dropout alike", "no effect"],
)
def test_an_option_changes_both_sides_alike_or_the_report_says_how_not(
    sides: tuple[Options, ...],
    words: str,
    amounts: tuple[str, float, float],
    cause: str,
    where: tuple[tuple[str, ...], tuple[int, ...]],
) -> None:
    report = varied(*sides)
    [variant] = report.variants
    assert (variant.name, variant.words, variant.what) == ("option", words, amounts[0])
    assert (variant.one, variant.pipeline) == pytest.approx(amounts[1:], rel=1e-5)
    assert report.is_right == (not cause)
    for finding in report.findings:
        assert (finding.cause[: len(cause)], (finding.names, finding.ranks)) == (cause, where)
    assert len(report.findings) == bool(cause)


def test_an_option_that_one_stage_loses_has_the_parameters_and_the_rank_of_that_stage() -> None:
    report = varied(LARGE, LARGE, USUAL)
    [finding] = report.findings
    words = "option: changes one process's gradient by 2, and the pipeline's not at all on these r"
    assert finding.cause.startswith(words)
    assert (finding.names, finding.ranks) == (ALL[2:], (1,))


@pytest.mark.parametrize(
    ("sides", "words", "one", "pipeline"),
    [
        ((Options(rate=0.2),), "alike", 1.0, 1.0),
        ((Options(rate=0.2), USUAL), "lost in the pipeline", 1.0, 0.0),
    ],
)
def test_an_option_of_the_optimizer_shows_in_the_first_update(
    sides: tuple[Options, ...], words: str, one: float, pipeline: float
) -> None:
    audit = made(USUAL, has_optimizer=True)
    changed = partial(made, *sides, has_optimizer=True)
    report = replace(audit, variants={"rate": changed}).run(steps=1)
    [variant] = report.variants
    assert (variant.words, variant.what) == (words, "update")
    assert (variant.one, variant.pipeline) == pytest.approx((one, pipeline), abs=1e-5)
    assert [(f.names, f.ranks) for f in report.findings] == [(ALL, (0, 1))] * (words != "alike")


def test_momentum_shows_in_the_second_step() -> None:
    report = varied(Options(momentum=0.9), USUAL, steps=2, has_optimizer=True)
    assert report.variants[0].words == "lost in the pipeline"
    assert report.variants[0].pipeline == 0
    assert varied(Options(momentum=0.9), steps=2, has_optimizer=True).is_right


def test_without_an_optimizer_of_one_process_updates_are_not_compared() -> None:
    report = varied(Options(rate=0.2))
    assert report.is_right
    assert str(report.variants[0]) == (
        "not compared: give the audit `optimizer`: update ? in one process, 1 in the pipeline"
    )


def test_a_pipeline_that_is_wrong_without_the_option_has_that_cause_once() -> None:
    double = Options(gain=2.0)
    report = varied(LARGE, Options(gain=6.0), usual=(USUAL, double))
    assert [finding.cause[:31] for finding in report.findings] == [
        "the gradient is multiplied by 2"
    ]
    assert report.variants[0].words == "alike"
    lost = varied(LARGE, double, usual=(USUAL, double))
    assert lost.variants[0].words == "lost in the pipeline"
    assert lost.findings[1].cause.startswith("option: changes one process's gradient by 2, and")


def refusing(error: type[Exception], rank: int | None = None, *_: object) -> Audit:
    if rank in {None, dist.get_rank()}:
        raise error("no pipeline has that")
    return made(USUAL)


@pytest.mark.parametrize("error", [ValueError, ImportError])
def test_a_function_that_all_ranks_refuse_is_no_finding(error: type[Exception]) -> None:
    report = replace(made(USUAL), variants={"option": partial(refusing, error)}).run()
    assert report.is_right
    assert str(report.variants[0]).startswith(
        f"refused: {error.__name__}('no pipeline has that') (test_variants.py:"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (partial(refusing, ValueError, 1), "the variant 'option': only some ranks refuse it: {1:"),
        (
            partial(refusing, KeyError),
            "the variant 'option' fails: KeyError('no pipeline has that'",
        ),
        (lambda: 3, "the variant 'option' returned int, expected a pipegrad.Audit"),
        (
            lambda: replace(made(USUAL), step=partial(refusing, ValueError, None)),
            "the variant 'option' fails in a step: ",
        ),
    ],
    ids=["on one rank", "a mistake", "no audit", "a step that fails"],
)
def test_other_errors_end_the_audit_on_all_ranks(change: Callable[[], Audit], words: str) -> None:
    with pytest.raises((AgreementError, PlanError)) as caught:
        replace(made(USUAL), variants={"option": change}).run()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("sides", "words"),
    [
        ((Options(layers=5),), "no rank holds 4.weight of the uncut model"),
        ((Options(fails=True), USUAL), "NotImplementedError('this needs a GPU')"),
    ],
)
def test_what_one_process_cannot_compute_is_a_finding_and_other_variants_go_on(
    sides: tuple[Options, ...], words: str
) -> None:
    variants = {"kernel": partial(made, *sides), "gain": partial(made, LARGE)}
    report = replace(made(USUAL), variants=variants).run()
    assert [variant.words for variant in report.variants] == ["not compared", "alike"]
    [finding] = report.findings
    assert finding.cause.startswith("kernel: it cannot be compared with one process: ")
    assert words in finding.cause


@pytest.mark.parametrize(
    ("variants", "words"),
    [
        ([("gain", made)], "variants is list, expected a table of name -> function"),
        ({"gain": "made"}, "the variant 'gain' fails: TypeError"),
    ],
)
def test_variants_that_are_no_functions_under_names_are_refused(variants: Any, words: str) -> None:
    with pytest.raises((PlanError, AgreementError), match=words):
        replace(made(USUAL), variants=variants).run()


def test_what_a_variant_could_not_compare_has_its_name() -> None:
    assert not made(USUAL).run().notes
    report = varied(Options(seed=5), USUAL)
    [note] = report.notes
    assert note.startswith("option: stages start with other values than the uncut model, in 0.wei")


def test_ranks_with_different_variants_are_refused() -> None:
    variants = {f"of rank {dist.get_rank()}": partial(made, USUAL)}
    with pytest.raises(PlanError, match="ranks have different variants"):
        replace(made(USUAL), variants=variants).run()


@pytest.mark.parametrize("variants", [("replaced",), ("gain", "wrapped")])
def test_a_variant_that_goes_on_with_modules_that_were_stepped_is_refused(
    variants: tuple[str, ...],
) -> None:
    """Their values, and the moments of their optimizer, would be taken for the option's."""
    audit, gain = made(USUAL), made(LARGE)
    functions: dict[str, Callable[[], Audit]] = {
        "replaced": lambda: replace(audit, loss_fn=functional.l1_loss),
        "gain": lambda: gain,
        "wrapped": lambda: replace(made(USUAL), modules=nn.Sequential(*gain.held)),
    }
    words = f"the variant '{variants[-1]}' cannot be compared: its modules were stepped in this aud"
    with pytest.raises((PlanError, AgreementError), match=words):
        replace(audit, variants={name: functions[name] for name in variants}).run()


def test_an_update_that_is_not_that_of_one_process_is_found_without_variants() -> None:
    audit = made(USUAL, Options(rate=0.2), has_optimizer=True)
    [finding] = audit.run().findings
    assert finding.cause.startswith("the update is not that of one process's optimizer")
    assert (finding.names, finding.ranks) == (ALL, (0, 1))
    assert finding.details[0] == "that of 0.weight is 2 times as large"


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.SGD, "TypeError('optimizer can only optimize Tensors, but one of the params"),
        (lambda _: None, "it returned NoneType"),
    ],
)
def test_an_optimizer_of_one_process_that_is_none_is_refused(optimizer: Any, words: str) -> None:
    with pytest.raises(
        AgreementError, match="`optimizer` is to make an optimizer of the"
    ) as caught:
        replace(made(USUAL), optimizer=optimizer).run()
    assert words in str(caught.value)
    with pytest.raises(PlanError, match="optimizer is str, expected a function of the uncut model"):
        replace(made(USUAL), optimizer="SGD")  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_optimizer_of_another_model_than_that_of_one_process_is_one_finding(device: str) -> None:
    def other(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(copy.deepcopy(model).to(device).parameters(), lr=0.1)

    [finding] = replace(made(USUAL), optimizer=other).run().findings
    assert finding.cause.startswith("one process's optimizer changes no parameter of the uncut mo")


def test_moments_that_are_lost_between_steps_are_found_in_the_second() -> None:
    momentum = Options(momentum=0.9)
    audit = made(momentum, has_optimizer=True)
    assert audit.run().is_right
    module = copy.deepcopy(uncut(momentum)[2 * dist.get_rank() : 2 * dist.get_rank() + 2])
    stage = PipelineStage(module, dist.get_rank(), 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, functional.mse_loss)

    def step(inputs: Tensor, target: Tensor) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        optimizer.zero_grad()
        schedule.step(*([inputs] if stage.is_first else []), target=target)
        optimizer.step()

    report = replace(audit, step=step, modules=module).run()
    [finding] = report.findings
    assert finding.step == 2
    assert finding.cause.startswith("the update is not that of one process's optimizer")


def test_dropout_of_functions_is_compared_without_variants() -> None:
    [finding] = made(Options(dropout=0.25), USUAL).run().findings
    assert finding.cause == "the pipeline drops nothing, and one process 0.25"


FILE = Path(__file__).parents[3] / "examples" / "audit_options.py"


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["right", "three_lost"])
def test_the_examples_options_have_an_effect_and_those_that_are_lost_are_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FILE.parent)
    report = Run(f"{FILE}:{name}").here()
    lost = {"packing", "decay groups", "Muon"} if name == "three_lost" else set()
    words = {variant.name: variant.words for variant in report.variants}
    assert len(words) == 12
    assert {n for n, said in words.items() if said == "lost in the pipeline"} == lost
    assert {n for n, said in words.items() if said == "without effect in both"} == {"recompute"}
    assert {finding.cause.split(":")[0] for finding in report.findings} == lost
