"""How long does a launch take, and how long would the hardware need?

A call is recorded as a CUDA graph, so that the time of Python and of the driver is not measured,
and launched between two events. "Hot" records it many times over and divides: the L2 cache holds
what it kept of its data. "Cold" first reads 256 MB of something else, as a model's other layers
would. Both are medians with the 10th and 90th percentile. A call that cannot be recorded, because
it waits for the GPU or takes memory from the driver, is launched directly and says so.

The floor is max(bytes / copy bandwidth, flops / matrix rate), both measured on this GPU now: a copy
of 1 GB counts 2 GB moved, a matrix product of float16 with 8,192 rows counts 2 * 8192^3. CuPy has
no product of FP8 numbers; PyTorch's is measured where it is installed, and elsewhere twice the rate
of float16 stands in, as in the data sheet of the H200 (1,979 and 989.5 TFLOP/s, dense).
"""

import functools
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from .launch import kernel

FLUSH_BYTES = 256 << 20
COPY_BYTES = 1 << 30
PRODUCT_ROWS = 8192
CLOCK_CYCLES = 400_000


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile of some times, in microseconds."""

    median: float
    p10: float
    p90: float


def spread(times):
    """List of microseconds -> Spread."""
    return Spread(*(round(float(t), 3) for t in np.percentile(times, (50, 10, 90))))


class Timer:
    """Measures calls on a stream of its own; `seconds` bounds the time spent on each kind."""

    def __init__(self, seconds=0.5):
        import cupy

        self.cupy, self.seconds = cupy, seconds
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.other = cupy.zeros(FLUSH_BYTES // 4, cupy.uint32)
        self.seen = cupy.zeros(2, cupy.int64)
        cupy.cuda.Device().synchronize()

    def measure(self, call):
        """-> hot Spread, cold Spread, "graph" or "stream": how the call was launched."""
        with current(self.stream):
            run, how = self.recorded(call, 1)
            run()  # a graph's first launch also uploads it
            once = self._time(run)
            inner = int(np.clip(300 / max(once, 1), 1, 50))  # calls between two events
            rounds = int(np.clip(self.seconds * 1e6 / (once * inner + 1), 5, 50))
            cold = [self._time(run, flush=True) for _ in range(rounds)]
            many, _ = self.recorded(call, inner)
            many()
            hot = [self._time(many) / inner for _ in range(rounds)]
        return spread(hot), spread(cold), how

    def recorded(self, call, times):
        """-> a function that makes the call so many times, and how: "graph", or "stream"."""
        call()  # compiles, and fills the memory pool
        self.stream.synchronize()
        try:
            self.stream.begin_capture()
            for _ in range(times):
                call()
            graph = self.stream.end_capture()
        except Exception:
            # whatever the library calls it: the recording is void, the call itself is fine
            with suppress(Exception):
                self.stream.end_capture()  # reports the void recording once more, and ends it
            return lambda: [call() for _ in range(times)], "stream"
        return lambda: graph.launch(self.stream), "graph"

    def _time(self, run, flush=False):
        """Microseconds between an event before and one behind run()."""
        start, stop = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        if flush:
            self.flush()
        start.record(self.stream)
        run()
        stop.record(self.stream)
        stop.synchronize()
        return 1000 * self.cupy.cuda.get_elapsed_time(start, stop)

    def flush(self):
        """Fill the L2 cache with clean lines that belong to nobody, on the current stream."""
        read = kernel("bench.cu", "read_through")
        arguments = (self.other, np.int64(FLUSH_BYTES // 16), self.seen)
        read((1024,), (256,), arguments)

    def clock_mhz(self):
        """The SM clock now, in MHz, counted by the GPU itself."""
        arguments = (self.seen, np.int32(CLOCK_CYCLES))
        with current(self.stream):
            kernel("bench.cu", "sm_clock")((1,), (1,), arguments)
        self.stream.synchronize()
        cycles, nanoseconds = self.seen.get()
        return round(1000 * float(cycles) / float(nanoseconds))

    @functools.cached_property
    def copy_gbps(self):
        """GB/s, read plus write, of a copy of 1 GB."""
        source = self.cupy.zeros(COPY_BYTES, self.cupy.uint8)
        target = self.cupy.empty_like(source)
        with current(self.stream):
            target[...] = source
            times = [self._time(lambda: target.__setitem__(..., source)) for _ in range(20)]
        return round(2 * COPY_BYTES / spread(times).median / 1000, 1)

    @functools.cached_property
    def matrix_tflops(self):
        """TFLOP/s of a large float16 product: what tensor cores give in a burst."""
        a = self.cupy.ones((PRODUCT_ROWS, PRODUCT_ROWS), self.cupy.float16)
        out = self.cupy.empty_like(a)
        with current(self.stream):
            self.cupy.matmul(a, a, out=out)
            times = [self._time(lambda: self.cupy.matmul(a, a, out=out)) for _ in range(5)]
        return round(2 * PRODUCT_ROWS**3 / spread(times).median / 1e6, 1)

    @functools.cached_property
    def fp8_tflops(self):
        """TFLOP/s of the same product of E4M3 numbers."""
        product = fp8_product(PRODUCT_ROWS)
        if product is None:
            return 2 * self.matrix_tflops
        with current(self.stream):
            product()
            times = [self._time(product) for _ in range(5)]
        return round(2 * PRODUCT_ROWS**3 / spread(times).median / 1e6, 1)

    @functools.cached_property
    def fp8_source(self):
        """Where fp8_tflops comes from."""
        return "2 x fp16" if fp8_product(16) is None else "torch._scaled_mm"


def fp8_product(rows):
    """-> a function that multiplies two square E4M3 matrices, None without a PyTorch that can."""
    try:
        import torch

        a = torch.ones((rows, rows), device="cuda").to(torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")
        known = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
        product = functools.partial(torch._scaled_mm, a, a.t(), use_fast_accum=True, **known)
        product()
    except (ImportError, AttributeError, AssertionError, RuntimeError, TypeError):
        return None  # not installed, not for CUDA, too old, or not for this GPU
    torch.cuda.synchronize()
    return product


@contextmanager
def current(stream):
    """`stream` as the current one of CuPy, and of PyTorch where a case has imported it."""
    torch = sys.modules.get("torch")
    with stream:
        if torch is None or not torch.cuda.is_available():
            yield
        else:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
                yield
