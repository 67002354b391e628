"""How long do kernels run while the host does something, and which of them?

The GPU keeps records of its own; PyTorch's profiler reads them, whoever launched the kernels. Where
PyTorch is not installed nobody reads them, and that is said.
"""


def kernels_of(work):
    """work() -> its seconds. Yields lines: how many kernels, how long together, the longest."""
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile
    except ImportError:
        yield "how long kernels run is not known: PyTorch, which would read it, is not installed"
        return
    torch.zeros(1, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        seconds = work()
        torch.cuda.synchronize()
    found = sorted(watched.key_averages(), key=lambda event: -event.self_device_time_total)
    busy, launches = (
        sum(getattr(event, name) for event in found) for name in ("self_device_time_total", "count")
    )
    yield f"{launches:,} kernels ran {busy / 1e3:.0f} of {seconds * 1e3:.0f} ms, the longest:"
    yield "  ".join(f"{e.key[:36]} {e.self_device_time_total / busy:.0%}" for e in found[:8])
