"""verify passes torch's schedules, finds hangs that were reported, and says what is wrong."""

from __future__ import annotations

import csv
import itertools
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

import pipegrad
from pipegrad import limits, schedules
from pipegrad.errors import ScheduleError
from pipegrad.orders import Verdict
from pipegrad.orders.building import END
from pipegrad.orders.verification import Communicators
from pipegrad.schedules import lower
from pipegrad.schedules.program.program import OP_MASK, Op
from tests.support.orders import (
    MULTI,
    deepspeed,
    just_in_time,
    megatron,
    megatron_interleaved,
    multi,
)

GOOD = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


def verified(text: str, folder: Path, **options: object) -> Verdict:
    path = folder / "orders.csv"
    path.write_bytes(text.encode())
    return pipegrad.verify(path, **options)  # type: ignore[arg-type]


def test_an_evaluation_that_lacks_a_forward_says_which() -> None:
    program = lower(schedules.build("gpipe", num_ranks=2, num_microbatches=2), forward_only=True)
    first, last = program.schedule.actions
    schedule = replace(program.schedule, actions=(first[:-1], last))
    verdict = pipegrad.verify(replace(program, schedule=schedule))
    assert verdict.defects[0].text.endswith("found stage 0 microbatch 1 has []")


# Torch's schedules.


@pytest.mark.parametrize("num_ranks", range(2, 17))
@pytest.mark.parametrize("name", MULTI)
def test_what_torch_lowers_is_right_on_all_communicators(name: str, num_ranks: int) -> None:
    schedule = multi(name, num_ranks, 2 * num_ranks)
    for communicators in get_args(Communicators):
        verdict = pipegrad.verify(schedule, communicators=communicators)
        assert verdict.is_right, str(verdict)


@pytest.mark.parametrize("name", MULTI)
def test_transfers_are_added_where_torch_adds_them(name: str) -> None:
    schedule = multi(name, 4, 8)
    order = {r: [a for a in of_rank if a] for r, of_rank in schedule.pipeline_order.items()}
    orders = pipegrad.verify([order[rank] for rank in range(4)]).orders
    rank_of = schedule.stage_index_to_group_rank
    theirs = torch_schedules._add_send_recv(order, rank_of.__getitem__, len(rank_of))
    flat = [
        tuple(str(part) for action in theirs[rank] for part in action.sub_actions or [action])
        for rank in range(4)
    ]
    assert orders.transfers == "placed"
    assert orders.cells == tuple(flat)


@pytest.mark.skipif(
    not hasattr(torch_schedules, "_defer_recv_ops"), reason="needs defer_pp_recv of torch 2.13"
)
def test_torchs_deferred_receives_take_gradients_for_activations() -> None:
    """With torch 2.13 and 2.15 gradients were wrong by more than their size, without an error."""
    verdict = pipegrad.verify(multi("ScheduleZBVZeroBubble", 2, 4, defer_pp_recv=True))
    assert "rank 0, cell 9: 0SEND_F2: rank 1 takes it for 2RECV_B0: a message carries no name" in (
        str(verdict)
    )


LIVENESS: Any = getattr(torch_schedules, "analyze_pipeline_activation_liveness", None)


@pytest.mark.skipif(LIVENESS is None, reason="since torch 2.15")
@pytest.mark.parametrize("name", MULTI)
def test_torch_counts_the_same_live_activations(name: str) -> None:
    schedule = multi(name, 4, 8)
    of_rank = [
        [s for s, r in schedule.stage_index_to_group_rank.items() if r == n] for n in range(4)
    ]
    slots = tuple(
        LIVENESS(
            schedule, pp_rank=rank, stage_indices=stages, granularity="stage_microbatch"
        ).num_slots
        for rank, stages in enumerate(of_rank)
    )
    needs = pipegrad.verify(schedule).needs
    assert needs is not None
    assert needs.live_activations == slots


# Waits of torch 2.15.

WAITED = (
    "0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD\n"
)


def test_waits_for_sends_and_reductions_are_read(tmp_path: Path) -> None:
    verdict = verified(WAITED, tmp_path)
    assert verdict.is_right
    first = [item & OP_MASK for item in verdict.orders.program.items[0]]
    assert first.index(Op.RELEASE) < first.index(Op.FINAL)  # not at the end of the step


def test_a_wait_for_a_send_that_is_too_early_is_named(tmp_path: Path) -> None:
    """torch 2.15 looks for this circle only where it was given max_outstanding_sends."""
    text = (
        "0F0,0SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    verdict = verified(text, tmp_path, communicators="edge")
    assert verdict.sentences == (
        "rank 0: 0SEND_F1 waits for 1RECV_F1 of rank 1, which comes only after 1WAIT_SEND_B0",
        "rank 1: 1SEND_B0 waits for 0RECV_B0 of rank 0, which comes only after 0WAIT_SEND_F1",
    )


# Hangs that were reported.

INTERLEAVED = (
    "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
    "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
)


def test_pytorch_172668_both_ranks_send_first() -> None:
    orders = just_in_time(INTERLEAVED)
    verdict = pipegrad.verify(orders)
    assert verdict.sentences[0] == (
        "rank 0: 0SEND_F1 waits for 1RECV_F1 of rank 1, which is behind 1SEND_F0 on the "
        "communicator"
    )
    assert str(verdict).splitlines()[-2:] == [
        "rank 0  0F0 0SEND_F0 0F1 >0SEND_F1< >2RECV_F0< 2F0 2SEND_F0 2RECV_F1 ...",
        "rank 1  1RECV_F0 1F0 >1SEND_F0< >1RECV_F1< 1F1 1SEND_F1 3RECV_F0 ...",
    ]
    assert not pipegrad.verify(orders, communicators="pair").is_right
    assert pipegrad.verify(orders, communicators="edge").is_right
    assert pipegrad.verify(orders, sends="eager").is_right


def test_pytorch_172668_with_the_receive_first_on_odd_ranks() -> None:
    first, second = just_in_time(INTERLEAVED)
    for at, (one, other) in enumerate(itertools.pairwise(second)):
        if "SEND" in one and "RECV" in other:
            second[at : at + 2] = other, one
    verdict = pipegrad.verify([first, second])
    assert [(wait.rank, wait.other_rank) for wait in verdict.circle] == [(0, 1), (1, 0)]


def loop(num_microbatches: int) -> list[list[str]]:
    """Returns the orders of eight stages in two loops over four ranks, as in pytorch#195760."""
    many = range(num_microbatches)
    return just_in_time(
        [
            " ".join(
                [f"{stage}F{m}" for stage in (rank, rank + 4) for m in many]
                + [f"{stage}B{m}" for stage in (rank + 4, rank) for m in many]
            )
            for rank in range(4)
        ]
    )


def test_pytorch_195760_four_ranks_wait_round_the_loop() -> None:
    verdict = pipegrad.verify(loop(8))
    assert [(wait.rank, wait.other_rank) for wait in verdict.circle] == [
        *((0, 1), (1, 2), (2, 3), (3, 0))
    ]
    assert pipegrad.verify(loop(8), communicators="edge").is_right  # what the pull request does
    assert pipegrad.verify(loop(2)).is_right  # its example waits, and ends


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_megatron_5100_sends_before_it_receives(num_ranks: int) -> None:
    orders = megatron(num_ranks, 2 * num_ranks)
    verdict = pipegrad.verify(orders)
    before, last = num_ranks - 2, num_ranks - 1
    assert verdict.summary_of_circle == (
        f"ranks {before} and {last} wait for each other in a circle:"
    )
    assert verdict.sentences[0] == (
        f"rank {before}: {before}SEND_F1 (send_forward_recv_backward) waits for {last}RECV_F1 "
        f"(send_backward_recv_forward) of rank {last}, which is behind {last}SEND_B0 "
        f"(send_backward_recv_forward) on the communicator"
    )
    # In one group of NCCL their order does not matter: the report's hang is not from there.
    assert pipegrad.verify(orders, batched=True).is_right


INTERLEAVED_SIZES = [(2, 4, 2), (3, 6, 2), (4, 4, 2), (4, 8, 2), (4, 16, 3), (8, 16, 2)]


@pytest.mark.parametrize(("num_ranks", "num_microbatches", "num_chunks"), INTERLEAVED_SIZES)
def test_megatron_5100_with_interleaving(
    num_ranks: int, num_microbatches: int, num_chunks: int
) -> None:
    """Megatron-LM#5100: with the fixed order one by one, all ranks receive before they send."""
    orders = megatron_interleaved(num_ranks, num_microbatches, num_chunks)
    verdict = pipegrad.verify(orders)
    assert {wait.rank for wait in verdict.circle} == set(range(num_ranks))
    if num_ranks == 2:  # where they take messages for others, too
        return
    assert not pipegrad.verify(orders, communicators="pair").is_right
    assert pipegrad.verify(orders, batched=True).is_right


def test_megatron_5271_crosses_the_messages_of_interleaved_calls_between_two_ranks() -> None:
    verdict = pipegrad.verify(megatron_interleaved(2, 4), batched=True)
    assert [defect.text for defect in verdict.defects] == [
        "2SEND_B0: rank 1 takes it for 1RECV_F2: a message carries no name",
        "1SEND_B0: rank 0 takes it for 2RECV_F2: a message carries no name",
    ]


@pytest.mark.parametrize("communicators", get_args(Communicators))
@pytest.mark.parametrize(("num_ranks", "num_microbatches", "num_chunks"), INTERLEAVED_SIZES)
def test_megatron_alternates_sends_and_receives_where_they_overlap(
    num_ranks: int, num_microbatches: int, num_chunks: int, communicators: Communicators
) -> None:
    orders = megatron_interleaved(num_ranks, num_microbatches, num_chunks, overlap=True)
    verdict = pipegrad.verify(orders, communicators=communicators)
    assert verdict.is_right, str(verdict)
    warm = 2 * (num_ranks - 1) + (num_chunks - 1) * num_ranks
    assert verdict.needs is not None
    total = num_microbatches * num_chunks
    assert verdict.needs.live_activations[0] == min(warm + 1, total)


def test_a_send_that_overlaps_ends_behind_the_next_one() -> None:
    send = "p2p.send_forward_recv_forward(recv_prev=False, overlap_p2p_comm=True)"
    prefetch = send.replace("recv_prev", "output_tensor=None, recv_prev")
    first = ["forward_step", send, prefetch, "forward_step", send]
    second = ["recv_forward", "forward_step", "recv_forward", "forward_step"]
    orders = pipegrad.verify([first, second]).orders
    releases = [
        cell
        for item, cell in zip(orders.program.items[0], orders.cell_of[0], strict=True)
        if item & OP_MASK == Op.RELEASE
    ]
    assert releases == [4, END]


def test_a_receive_without_a_compute_and_a_send_too_many_are_wrong(tmp_path: Path) -> None:
    orders = megatron_interleaved(4, 8)
    assert "no stage computes microbatch" in str(
        pipegrad.verify([[*orders[0], "send_forward_recv_forward(recv_prev=True)"], *orders[1:]])
    )
    # A CSV quotes cells with commas.
    path = tmp_path / "orders.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(orders)
    assert pipegrad.verify(path, batched=True).is_right
    path.write_text(path.read_text().replace("recv_prev=True", "recv_prev=1"))
    with pytest.raises(ScheduleError, match="is not understood"):
        pipegrad.verify(path)


def test_instructions_of_deepspeed_are_read() -> None:
    verdict = pipegrad.verify(deepspeed())
    assert verdict.is_right, str(verdict)
    assert verdict.needs is not None
    assert verdict.needs.live_activations == (2, 1)


# What is wrong in single cells.

WRONG = {
    "never sent": ("0SEND_F0,", "", "rank 1, cell 1: 1RECV_F0: rank 0 never sends this"),
    "never received": ("1RECV_F0,", "", "rank 0, cell 2: 0SEND_F0: rank 1 never receives this"),
    "received twice": (
        *("1RECV_F0", "1RECV_F0,1RECV_F0"),
        "rank 1, cell 2: 1RECV_F0: it comes twice",
    ),
    "sent twice": ("0SEND_F0", "0SEND_F0,0SEND_F0", "rank 0, cell 3: 0SEND_F0: it comes twice"),
    "received late": (
        *("1RECV_F0,1F0", "1F0,1RECV_F0"),
        "rank 1, cell 1: 1F0: waits for a receive that is not posted",
    ),
    "sent early": (
        *("0F0,0SEND_F0", "0SEND_F0,0F0"),
        "rank 0, cell 1: 0SEND_F0: sent before stage 0 has computed it",
    ),
    "reduced early": (
        *("0B0", "0REDUCE_GRAD,0B0"),
        "0REDUCE_GRAD: the gradients of stage 0 are not final: it has backwards left",
    ),
    "reduced twice": (
        *("0B0", "0B0,0REDUCE_GRAD,0REDUCE_GRAD"),
        "cell 6: 0REDUCE_GRAD: the gradients of stage 0 are final already",
    ),
    "never reduced": (
        *("0B0", "0B0,0REDUCE_GRAD"),
        "rank 1: the gradients of stage 1 are never reduced, those of others are",
    ),
    "of no rank": ("0B0", "0B0,1REDUCE_GRAD", "rank 0 has no backward of stage 1"),
    "no stage": ("1SEND_B0", "5SEND_B0", "rank 1, cell 4: 5SEND_B0: there is no stage 5"),
    "no microbatch": ("1SEND_B0", "1SEND_B7", "1SEND_B7: no stage computes microbatch 7"),
    "no next stage": ("1F0", "1F0,1SEND_F0", "cell 3: 1SEND_F0: stage 1 is the last one"),
    "another rank's": ("0B0", "0B0,1SEND_B0", "cell 5: 1SEND_B0: a transfer of another rank"),
    "doubled": ("0B0", "0B0,0B0", "on the stage's rank; found 0B0 2 times"),
    "missing": ("0B0", "", "on the stage's rank; found stage 0 microbatch 0 has ['F']"),
    "backward first": ("1F0,1B0", "1B0,1F0", "1B0: its forward comes first"),
}


# The same of orders with waits.
WRONG_WAITS = {
    "waited twice": (
        *("0WAIT_SEND_F0", "0WAIT_SEND_F0,0WAIT_SEND_F0"),
        "rank 0, cell 6: 0WAIT_SEND_F0: there is no SEND_F to wait for",
    ),
    "of no stage": ("0WAIT_SEND_F0", "5WAIT_SEND_F0", "5WAIT_SEND_F0: there is no SEND_F to wait"),
    "not reduced": ("0REDUCE_GRAD,", "", "0WAIT_REDUCE_GRAD: no reduction of stage 0 is under way"),
    "never ends": (
        *(",0WAIT_REDUCE_GRAD", ""),
        "rank 0: the reduction of stage 0 never ends: WAIT_REDUCE_GRAD is missing",
    ),
    "two at a time": (
        *("0REDUCE_GRAD", "0REDUCE_GRAD,0REDUCE_GRAD"),
        "rank 0, cell 7: 0REDUCE_GRAD: the reduction of stage 0 has not ended",
    ),
}


@pytest.mark.parametrize("wrong", [*WRONG, *WRONG_WAITS])
def test_wrong_cells_are_named(wrong: str, tmp_path: Path) -> None:
    good = GOOD if wrong in WRONG else WAITED
    old, new, says = {**WRONG, **WRONG_WAITS}[wrong]
    text = good.replace(old, new)
    assert text != good
    verdict = verified(text, tmp_path)
    assert not verdict.is_right
    assert says in str(verdict)
    assert verdict.needs is None


def test_ranks_that_wait_for_what_never_comes_are_shown_with_what_it_is(tmp_path: Path) -> None:
    lines = str(verified(GOOD.replace("0SEND_F0,", ""), tmp_path)).splitlines()
    assert lines[3:] == [
        "wrong: ranks wait for something that never comes:",
        "  rank 0: 0RECV_B0 waits for 1SEND_B0 of rank 1, which comes only after 1F0",
        "  rank 1: 1RECV_F0 waits for a send that no rank has",
        "rank 0  0F0 >0RECV_B0< 0B0",
        "rank 1  >1RECV_F0< >1F0< 1B0 >1SEND_B0<",
    ]


@pytest.mark.parametrize("sends", ["rendezvous", "eager"])
def test_computes_that_wait_for_each_other_hang_on_every_transport(
    sends: str, tmp_path: Path
) -> None:
    verdict = verified("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", tmp_path, sends=sends)
    assert verdict.sentences == (
        "rank 0: 0RECV_B0 waits for 1SEND_B0 (1B0) of rank 1, which comes only after 1F1",
        "rank 1: 1RECV_F1 waits for 0SEND_F1 (0F1) of rank 0, which comes only after 0B0",
    )


def test_what_a_rank_receives_early_is_counted(tmp_path: Path) -> None:
    text = (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )
    verdict = verified(text, tmp_path)
    assert verdict.needs == schedules.Proof((2, 1), (2, 1), (1, 2), (1, 2))


# Other sources and forms.


@pytest.mark.parametrize(
    "name", ["1f1b", "interleaved-1f1b", "zbv", "zb-h1", "eager-1f1b", "v-min"]
)
def test_our_schedules_are_proven_on_their_own_edges(name: str) -> None:
    made = schedules.build(name, num_ranks=4, num_microbatches=8)
    verdict = pipegrad.verify(made)
    assert verdict.is_right
    assert verdict.transport.communicators == "edge"
    assert verdict.needs == schedules.verify(lower(made))
    assert pipegrad.verify(made.grid).is_right  # computes alone, with blanks


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("\n", "\r\n"),
        "\ufeff" + GOOD,
        GOOD.replace(",", " , "),
        GOOD.replace("0SEND_F0", ",0SEND_F0,,") + ",,\n\n",
        "# by hand\n" + GOOD.replace("\n", "\n\n# the next rank\n"),
        "0F0,0B0\n1F0,1B0\n",
        "0F0,0SEND_F0\n1RECV_F0,1F0\n",
    ],
)
def test_lines_and_blanks_do_not_matter(text: str, tmp_path: Path) -> None:
    assert verified(text, tmp_path).is_right


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no cells; expected a line for each rank"),
        ("0F0,0B0\n,,\n2F0,2B0\n", "line 2 computes nothing; each rank has a stage"),
        ("0F0,0B0\n2F0,2B0\n", "has a stage 2 but no stage 1"),
        ("0F0,0B7\n", "has a microbatch 7 but no microbatch 1"),
        ("# torch\n\n" + GOOD.replace("1B0", "1Q0"), "line 4, cell 3: '1Q0' is not understood"),
        ("ForwardPass(buffer_id=0, phase=1)\n", "understood; expected actions of torch such as"),
        ("0F99999999999\n", "line 1, cell 1: '0F99999999999' is not understood"),
        ("0F0,\x1b[2J\n", r"line 1, cell 2: '\x1b[2J' is not understood"),
        ("0" * 200_000, "is not a CSV file: field larger than"),
        ("".join(f"{n}F0," for n in range(5000)), "5,000 stages: expected at most 4,096"),
        ("ForwardPass(buffer_id=0),SendGrad(buffer_id=1)", "nothing was computed in buffer 1"),
        ("__import__('os').abort()", "is not understood"),
    ],
)
def test_what_is_no_order_is_refused_in_one_sentence(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=re.escape(says)) as refused:
        verified(text, tmp_path)
    assert "\n" not in str(refused.value)


def test_files_that_cannot_be_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "orders.csv"
    with pytest.raises(ScheduleError, match=r"orders\.csv: No such file"):
        pipegrad.verify(path)
    path.write_bytes(bytes(range(256)))
    with pytest.raises(ScheduleError, match=r"orders\.csv: byte 128 is no UTF-8 text"):
        pipegrad.verify(path)
    assert limits.MOST_ORDERS_BYTES == 2**26
    monkeypatch.setattr("pipegrad.orders.reading.MOST_ORDERS_BYTES", 10)
    with pytest.raises(ScheduleError, match="more than 10 bytes"):
        pipegrad.verify(path)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (5, "expected a file, a list of the actions"),
        (b"0F0", "expected a file, a list of the actions"),
        ({1: ["0F0"]}, "expected all from 0 on"),
        (["0F0", "0B0"], "orders of rank 0 are '0F0': expected a list of its actions"),
        ([["0F0", "0X0"]], "orders, rank 0, cell 2: '0X0' is not understood"),
        (GOOD * 100, "0F0,0SEND_F0,0RECV_B0,0B0"),
    ],
)
def test_what_lists_no_ranks_is_refused(source: object, says: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(says)) as refused:
        pipegrad.verify(source)
    assert len(str(refused.value)) < 400
    with pytest.raises(ScheduleError, match="sends is 'fast', expected one of"):
        pipegrad.verify([["0F0"]], sends="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B"])
def test_a_table_that_torch_does_not_run_is_refused(name: str) -> None:
    """The table of torch 2.13's Schedule1F1B counts the forwards of the last rank from 1."""
    stage = SimpleNamespace(num_stages=2, group_size=2, stage_index=0, has_backward=True)
    schedule = getattr(torch_schedules, name)(stage, 4)
    with pytest.raises(ScheduleError, match=f"{name}: with one stage a rank torch runs code"):
        pipegrad.verify(schedule)


def test_one_schedule_of_deepspeed_is_one_rank() -> None:
    class TrainSchedule(list[object]):
        micro_batches, stages, stage_id = 8, 4, 1

    with pytest.raises(ScheduleError, match="a TrainSchedule of stage 1: expected a list with"):
        pipegrad.verify(TrainSchedule())


# What is shown.


def test_json_has_the_same(tmp_path: Path) -> None:
    table = json.loads(pipegrad.verify(loop(8)).as_json())
    assert (table["is_right"], table["ranks"], table["stages"]) == (False, 4, 8)
    assert [wait["rank"] for wait in table["circle"]] == [0, 1, 2, 3]
    table = json.loads(verified(GOOD, tmp_path).as_json())
    assert (table["is_right"], table["circle"], table["live_activations"]) == (True, [], [1, 1])


def test_64_ranks_and_256_microbatches_are_verified_in_seconds(tmp_path: Path) -> None:
    path = tmp_path / "large.csv"
    multi("ScheduleInterleaved1F1B", 64, 256)._dump_csv(str(path))
    began = time.process_time()  # other processes may have the machine meanwhile
    assert pipegrad.verify(path).is_right
    assert time.process_time() - began < 10  # 2.5 s here
