"""Shows which kernel waits for which on one card, and which calls of the host wait for a stream.

python benchmarks/card/streams.py
CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER python benchmarks/card/streams.py
"""

import time
from collections.abc import Callable, Sequence

import torch
from add_one import add_one
from torch import Tensor

DEVICE = torch.device("cuda", 0)
NUM_STREAMS, SLEEP_MS, BUSY_MS = 32, 20, 600


def milliseconds_of(cycles: int) -> float:
    """Returns how long a kernel takes that sleeps so many cycles."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def enqueue(streams: Sequence[torch.cuda.Stream], cycles: float, num_kernels: int = 1) -> None:
    """Enqueues kernels that sleep on each of the streams."""
    for stream in streams:
        with torch.cuda.stream(stream):
            for _ in range(num_kernels):
                torch.cuda._sleep(int(cycles))


def host_ms(call: Callable[[], object], finish: Callable[[], object] = bool) -> float:
    """Returns how many milliseconds of the host a call takes, with what finishes it."""
    began = time.perf_counter()
    call()
    finish()
    return 1e3 * (time.perf_counter() - began)


def print_delays(cycles: float, add: Callable[[], object], priority: int) -> None:
    """Prints which busy streams of a priority delay a kernel on the default stream."""
    streams = [torch.cuda.Stream(priority=priority) for _ in range(NUM_STREAMS)]
    default, delayed = torch.cuda.current_stream(), []
    for number, stream in enumerate(streams):
        torch.cuda.synchronize()
        enqueue([stream], cycles, 2)
        if host_ms(add, default.synchronize) > 8:
            delayed.append(number)
    torch.cuda.synchronize()
    enqueue(streams, cycles, 2)
    behind = host_ms(add, default.synchronize)
    torch.cuda.synchronize()
    together = host_ms(lambda: enqueue(streams, cycles), torch.cuda.synchronize)
    print(f"priority {priority}: delayed by one busy stream: {delayed or 'never'}; by two kernels")
    print(f"  on each: {behind:.0f} ms; one kernel on each takes {together:.0f} ms", flush=True)


def calls_of(x: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
    """Returns calls in an order that counts: what one of them loads is there for later ones."""

    def half() -> Tensor:
        return torch.randn(64, 64, device=DEVICE).half()

    def pinned() -> Tensor:
        return torch.tensor([1.0, 2.0]).pin_memory().to(DEVICE, non_blocking=True)

    return {
        "erfinv, first": lambda: torch.erfinv(y),
        "erfinv, again": lambda: torch.erfinv(y),
        "sort, first": lambda: torch.sort(y),
        "product in fp16, first": lambda: half() @ half(),
        "cumsum, first": lambda: torch.cumsum(y, 0),
        "product in fp16, again": lambda: half() @ half(),
        "torch.tensor(list, device=)": lambda: torch.tensor([1.0, 2.0], device=DEVICE),
        "torch.full": lambda: torch.full((), 3.0, device=DEVICE),
        "copy of pinned memory, first": pinned,
        "copy of pinned memory, again": pinned,
        "64 MiB of pinned memory": lambda: torch.empty(2**24, pin_memory=True),
        "1 GiB, a new segment": lambda: torch.empty(2**28, device=DEVICE),
        "empty_cache": torch.cuda.empty_cache,
        "a new stream": lambda: torch.cuda.Stream(priority=-1),
        "copy of pageable memory": lambda: torch.zeros(2**20).to(DEVICE),
        "the same, non_blocking": lambda: torch.zeros(2**20).to(DEVICE, non_blocking=True),
        "y[0] = x[0]": lambda: y.__setitem__(0, x[0]),
        "Triton, first": lambda: add_one[(1,)](y, 1000, block=1024),
        "Triton, again": lambda: add_one[(1,)](y, 1000, block=1024),
    }


def main() -> None:
    """Prints delays, and what each call takes behind a busy stream."""
    torch.cuda.init()
    milliseconds_of(10**7)
    cycles = 5 * 10**7 / milliseconds_of(5 * 10**7)  # of a millisecond
    x = torch.zeros(1, device=DEVICE)
    x.add_(1)
    torch.cuda.synchronize()
    for priority in (0, -1):
        print_delays(SLEEP_MS * cycles, lambda: x.add_(1), priority)
    y = torch.randn(1000, device=DEVICE)
    for name, call in calls_of(x, y).items():
        busy_ms = 5 * BUSY_MS if name == "Triton, first" else BUSY_MS  # its compiler takes time
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        enqueue([stream], busy_ms * cycles)
        taken = host_ms(call)
        torch.cuda.synchronize()
        print(f"{name:40}{taken:8.1f} ms{' WAITS' if taken > busy_ms / 2 else ''}", flush=True)


if __name__ == "__main__":
    main()
