import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipegrad.testing import Ranks, run_ranks


@dataclass(frozen=True)
class Point:
    x: int


class CodedError(Exception):
    """Pickles, but cannot be rebuilt: Exception keeps only the message as its argument."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)


def rank() -> int:
    return dist.get_rank()


def rank_and_sum(summand: float, *, factor: float = 1.0) -> tuple[int, float]:
    tensor = torch.tensor([summand * factor])
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor.item()


def scaled(tensor: torch.Tensor, point: Point) -> dict[str, torch.Tensor]:
    return {"scaled": tensor * (dist.get_rank() + point.x)}


def setting() -> tuple[str | None, ...]:
    names = ("PIPEGRAD_TEST", "RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    return (
        *(os.environ.get(name) for name in names),
        str(Path.cwd()),
        str(torch.get_num_threads()),
    )


def fail_on(failing: int, error: BaseException) -> None:
    if dist.get_rank() == failing:
        raise error
    dist.all_reduce(torch.ones(1))


def fail_one_after_another() -> None:
    dist.barrier()  # so that all begin alike
    time.sleep(0.3 * (2 - dist.get_rank()))
    raise ValueError(f"number {dist.get_rank()}")


def raise_coded() -> None:
    raise CodedError("half", 7)


def raise_unpicklable() -> None:
    error = ValueError("holds a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def leave_on(leaving: int, code: int = 3) -> None:
    if dist.get_rank() == leaving:
        os._exit(code) if code > 0 else os.kill(os.getpid(), -code)
    dist.all_reduce(torch.ones(1))


def stay_away_on(absent: int) -> None:
    if dist.get_rank() != absent:
        dist.all_reduce(torch.ones(1))


def wait_for_nothing() -> None:
    threading.Event().wait()


def stuck_on(stuck: int) -> None:
    if dist.get_rank() == stuck:
        wait_for_nothing()


def unpicklable() -> object:
    return threading.Lock()


def leave_thread_in_recv() -> int:
    peer = 1 - dist.get_rank()
    threading.Thread(target=dist.recv, args=(torch.empty(1), peer)).start()
    time.sleep(0.1)
    return dist.get_rank()


def early_and_late() -> int:
    """Rank 0 is done long before rank 1 reads what it sent."""
    if dist.get_rank() == 0:
        dist.send(torch.full((4096,), 5.0), 1)
        return 0
    time.sleep(0.3)
    tensor = torch.empty(4096)
    dist.recv(tensor, 0)
    return int(tensor[-1])


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stderr.write(f"{text}\n")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def ranks_that_live() -> list[Any]:
    """Returns the processes of ranks: a contract of another test has processes that stay."""
    kind = multiprocessing.get_context("forkserver").Process
    return [child for child in multiprocessing.active_children() if isinstance(child, kind)]


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def test_results_come_in_rank_order() -> None:
    assert run_ranks(rank, 4) == [0, 1, 2, 3]


def test_arguments_reach_every_rank_by_value() -> None:
    assert run_ranks(rank_and_sum, 2, 1.5) == [(0, 3.0), (1, 3.0)]
    assert run_ranks(partial(rank_and_sum, factor=2.0), 2, 1.5) == [(0, 6.0), (1, 6.0)]
    # Tensors and classes of the test module travel by value.
    results = run_ranks(scaled, 2, torch.arange(3.0), Point(1))
    assert [result["scaled"].tolist() for result in results] == [[0, 1, 2], [0, 2, 4]]
    assert not any(result["scaled"].is_shared() for result in results)


def test_environment_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_ranks(rank, 1)  # the fork server has started: what follows is not in its environment
    monkeypatch.setenv("PIPEGRAD_TEST", "here")
    monkeypatch.chdir(tmp_path)
    place = str(tmp_path)
    assert run_ranks(setting, 2) == [
        ("here", "0", "0", "2", "1", place, "1"),
        ("here", "1", "1", "2", "1", place, "1"),
    ]
    monkeypatch.delenv("PIPEGRAD_TEST")
    assert run_ranks(setting, 1)[0][0] is None


def test_module_that_no_path_leads_to_is_imported_from_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A handler author's tests under plain ``pytest``, installed from a wheel."""
    (tmp_path / "elsewhere.py").write_text(
        "class Answer(int): pass\ndef answer(a): return Answer(a)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import elsewhere  # type: ignore[import-not-found]

    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    assert run_ranks(elsewhere.answer, 2, elsewhere.Answer(42)) == [42, 42]


def test_output_goes_where_the_caller_writes(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(say, 2, "hello")
    out, err = capfd.readouterr()
    assert out.count("hello\n") == 2
    assert err == "hello\nhello\n"  # and no noise


def test_early_ranks_and_waiting_threads_harm_nobody() -> None:
    assert run_ranks(early_and_late, 2) == [0, 5]
    # Thread that waits for a peer does not keep its rank.
    began = time.monotonic()
    assert run_ranks(leave_thread_in_recv, 2, timeout_seconds=30) == [0, 1]
    assert time.monotonic() - began < 30


def test_the_first_failure_is_raised_and_the_later_ones_are_noted() -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match="bad microbatch") as caught:
        run_ranks(fail_on, 4, 2, ValueError("bad microbatch"))
    assert time.monotonic() - began < 4  # less than the grace: its peers saw it leave
    assert "First failure on rank 2." in notes(caught.value)
    assert "in fail_on" in notes(caught.value)
    # First failure in time is raised and the later ones are noted.
    with pytest.raises(ValueError, match="number 2") as caught:
        run_ranks(fail_one_after_another, 3)
    assert notes(caught.value).endswith(
        "Then on rank 1: ValueError: number 1\nThen on rank 0: ValueError: number 0"
    )
    # Exceptions that are no errors travel too.
    with pytest.raises(SystemExit, match="4"):
        run_ranks(fail_on, 1, 0, SystemExit(4))


def test_rank_that_leaves_without_a_word_is_named_with_its_exit_code() -> None:
    with pytest.raises(RuntimeError, match="rank 1 ended without a result: exit code 3"):
        run_ranks(leave_on, 3, 1)
    with pytest.raises(RuntimeError, match="rank 0 ended without a result: killed by SIGKILL"):
        run_ranks(leave_on, 1, 0, -signal.SIGKILL)


def test_timeout_names_the_stuck_ranks_and_shows_their_stacks() -> None:
    with pytest.raises(TimeoutError, match=r"not finished after 2 s: rank 1\n") as caught:
        run_ranks(stuck_on, 2, 1, timeout_seconds=2)
    assert "Rank 1, innermost call first:" in notes(caught.value)
    assert "test_ranks.py" in notes(caught.value)
    assert "in wait_for_nothing" in notes(caught.value)
    with pytest.raises(TimeoutError, match=r"not finished after 2 s: rank 0, 2\n") as caught:
        run_ranks(stay_away_on, 3, 1, timeout_seconds=2)
    assert notes(caught.value).count("in all_reduce") == 2


def test_what_does_not_pickle_and_a_world_without_ranks_are_clear_errors() -> None:
    with pytest.raises(TypeError, match="the function or its arguments cannot be pickled"):
        run_ranks(rank_and_sum, 1, threading.Lock())
    with pytest.raises(TypeError, match="the result of rank 0 cannot be pickled"):
        run_ranks(unpicklable, 1)
    with pytest.raises(
        TypeError, match="rank 0 raised, ValueError: holds a lock, cannot"
    ) as caught:
        run_ranks(raise_unpicklable, 1)
    assert "in raise_unpicklable" in notes(caught.value)
    with pytest.raises(
        TypeError, match="CodedError: half, cannot be pickled and unpickled"
    ) as caught:
        run_ranks(raise_coded, 1)
    assert "in raise_coded" in notes(caught.value)
    # A world needs a rank.
    with pytest.raises(ValueError, match="num_ranks is 0"):
        run_ranks(rank, 0)


def process() -> int:
    return os.getpid()


def test_ranks_that_stay_run_one_function_after_the_other_until_one_fails() -> None:
    with Ranks(2) as ranks:
        processes = ranks.run(process)
        assert ranks.run(rank_and_sum, 1.5) == [(0, 3.0), (1, 3.0)]
        assert ranks.run(process) == processes
    with pytest.raises(RuntimeError, match="these ranks have ended"):
        ranks.run(process)
    # A rank that died between two functions is named.
    with Ranks(2) as ranks:
        os.kill(ranks.run(process)[1], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="rank 1 ended without a result: killed by SIGKILL"):
            ranks.run(rank_and_sum, 1.0)
    # Ranks that stay end with the first function that fails.
    ranks = Ranks(2)
    assert ranks.run(rank) == [0, 1]
    with pytest.raises(TimeoutError, match="not finished after 1 s: rank 1"):
        ranks.run(stuck_on, 1, timeout_seconds=1)
    assert not ranks.is_open
    assert ranks_that_live() == []
    ranks.close()  # once more does nothing


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_ranks(rank, 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = open_files()
    kept = []
    for function, error in ((leave_on, RuntimeError), (stuck_on, TimeoutError)):
        with pytest.raises(error) as caught:
            run_ranks(function, 2, 1, timeout_seconds=2)
        kept.append(caught.value)  # a traceback keeps its frames
    assert run_ranks(rank, 2) == [0, 1]
    assert open_files() == before
    assert list(tmp_path.iterdir()) == []
    assert ranks_that_live() == []
