"""How long a step takes on the GPU: the one clock of the operators' benches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Layer = TypeVar("Layer")


def time_us(
    run: Callable[[Layer], object],
    layers: Sequence[Layer],
    repeats: int = 15,
    *,
    enough: float = float("inf"),
) -> float:
    """Microseconds of one `run(layer)` on the GPU, launches included and Python left out.

    What is timed is a CUDA graph that holds `run(layer)` for every layer in turn, as a model runs an operator
    layer after layer. With layers that are larger together than the L2 cache, none finds its weights or keys
    there from the replay before. Every layer runs once before the capture, so that kernels are compiled and
    tuned, and the graph is replayed once before it is timed. Memory that `run` allocates comes from the
    graph's own pool.

    Args:
        run: launches work on the current stream; what it returns is dropped.
        layers: what it is called with, one after the other.
        repeats: replays that are timed, each between two events.
        enough: no more replays once the first took longer than so many microseconds a layer.

    Returns:
        The median of the replays, divided by the number of layers.
    """
    for layer in layers:
        run(layer)
    torch.cuda.synchronize()
    # `torch.cuda.graph` would empty the allocator's cache each time, which can take longer than measuring.
    graph, stream, current = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            for layer in layers:
                run(layer)
        finally:
            graph.capture_end()
    current.wait_stream(stream)
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / len(layers) * 1e3)
        if times[0] > enough:
            break
    return sorted(times)[len(times) // 2]
