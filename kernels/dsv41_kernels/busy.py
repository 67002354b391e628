"""How long do kernels run while the host does something, and which of them?

The GPU keeps records of its own; PyTorch's profiler reads them, whoever launched the kernels. Where
PyTorch is not installed nobody reads them, and that is said.
"""

from contextlib import contextmanager


@contextmanager
def records():
    """Yields a profile, full of the GPU's records when the block ends; ImportError if none can."""
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile
    except ImportError:
        raise ImportError("PyTorch, which would read the GPU's records, is not installed") from None
    if not torch.cuda.is_available():
        raise ImportError("PyTorch, which would read the GPU's records, is one without CUDA")
    torch.zeros(1, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        yield watched
        torch.cuda.synchronize()


def names_in_order(work):
    """work() -> names of what the GPU ran meanwhile, kernels and copies, in its order."""
    with records() as watched:
        work()
    ran = [event for event in watched.events() if "CUDA" in str(event.device_type)]
    ran = [event for event in ran if not getattr(event, "is_user_annotation", False)]
    return [event.name for event in sorted(ran, key=lambda event: event.time_range.start)]


def kernels_of(work):
    """work() -> its seconds. Yields lines: how many kernels, how long together, the longest."""
    try:
        with records() as watched:
            seconds = work()
    except ImportError as error:
        yield f"how long kernels run is not known: {error}"
        return
    found = sorted(watched.key_averages(), key=lambda event: -event.self_device_time_total)
    busy, launches = (
        sum(getattr(event, name) for event in found) for name in ("self_device_time_total", "count")
    )
    yield f"{launches:,} kernels ran {busy / 1e3:.0f} of {seconds * 1e3:.0f} ms, the longest:"
    yield "  ".join(f"{e.key[:36]} {e.self_device_time_total / busy:.0%}" for e in found[:8])
