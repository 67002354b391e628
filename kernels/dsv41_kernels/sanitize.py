"""Do kernels stay inside their arrays, and do their threads wait for one another?

    python -m dsv41_kernels.sanitize [OP ...] [--tool memcheck]

NVIDIA's compute-sanitizer, which comes with the CUDA toolkit, watches what a kernel does: memcheck
sees an access behind the end of an array, racecheck one to shared memory that no barrier puts in
order. Under both, every version of an operation is launched once on the small shapes of its
bench.py, and `model`, a pseudo-operation, takes two training steps and some decode steps of a tiny
model, with the shapes and the order of a model. For racecheck kernels are built with WATCHED, since
it cannot follow some barriers (watched.cuh); with --as-they-are they are not, and it reports races
where the order is certain. CuPy's memory pool is off: inside a pool's block the end of an array is
nothing special. The last line names the kernels that nobody launched.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import numpy as np

from . import commands, launch
from .bench import cases, operations

TOOLS = ("memcheck", "racecheck")
# trap: libraries ask the driver for entry points that it may not have, which is no error of theirs;
# reported, ten such answers would use up the lines for what kernels do
OPTIONS = ("--report-api-errors", "no", "--print-limit", "100", "--error-exitcode", "9")
MODEL = "model"
PEERS = ("cupy text", "torch")  # versions that launch none of our kernels

_NAME = re.compile(
    r"__global__ void\s+(?:__(?:launch_bounds|cluster_dims)__\((?:[^()]|\([^()]*\))*\)\s+)*(\w+)\("
)


def kernel_names():
    """{(op, kernel)}: all that the sources define."""
    folders = [path.parent.name for path in launch.HERE.glob("*/kernel.cu")]
    return {(op, name) for op in folders for name in _NAME.findall(launch.source(op))}


def sanitizer():
    """The path of compute-sanitizer; ValueError where there is none."""
    toolkit = Path(os.environ.get("CUDA_PATH") or os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    found = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=toolkit / "bin"
    )
    if found is None:
        raise ValueError("compute-sanitizer: not found on PATH; it comes with the CUDA toolkit")
    return found


def watch(tools, names, as_they_are=False, run=subprocess.run):
    """Launch under each of the tools -> the names of those that found something."""
    path, failed = sanitizer(), []
    for tool in tools:
        child = [sys.executable, "-m", "dsv41_kernels.sanitize", "--launch"]
        if tool == "memcheck" or as_they_are:
            child += ["--as-they-are"]
        print(f"== {tool}", flush=True)
        if run([path, "--tool", tool, *OPTIONS, *child, *names]).returncode:
            failed.append(tool)
    return failed


# ---- what is launched ---------------------------------------------------------------------------


def launch_all(names, out=print):
    """Launch all of these operations without a memory pool -> how many calls raised."""
    import cupy

    cupy.cuda.set_allocator(None)
    sys.modules["torch"] = None  # as if it were not installed: its import alone takes long here
    failed = 0
    for name in names:
        try:
            for what, call in calls(name):
                call()
                cupy.cuda.Device().synchronize()
                out(what)
        except Exception:
            traceback.print_exc()
            failed += 1
    missed = {pair for pair in kernel_names() - launch.used if pair[0] in names}
    if MODEL in names and set(operations()) <= set(names):
        missed = kernel_names() - launch.used
    words = ", ".join("/".join(pair) for pair in sorted(missed))
    out(f"{len(launch.used)} kernels launched" + (f", not launched: {words}" if words else ""))
    return failed


def calls(name):
    """Yield what a call is, and the call."""
    if name == MODEL:
        from .device import cuda_like

        yield "model: training", lambda: train(cuda_like())
        yield "model: decode", lambda: decode("cuda")
        return
    for case in cases(name, quick=True):
        if case.version not in PEERS:
            yield f"{name} {case.version}, {case.shape}", case.call


def tiny():
    """Config and token classes of a model with every mechanism but vision."""
    from dsv41.presets import preset

    config = preset("tiny").but(vision_config=None)
    return config, np.arange(config.vocab_size) % config.engram_compressed_vocab_size


def train(like=None):
    """Two steps, the second with quantised weights and activations."""
    from dsv41.train.loop import Trainer
    from dsv41.train.run import Run

    config, classes = tiny()
    run = Run(length=24, batch=2, steps=2, warmup=1, decay_from=2, quantised_from=1)
    documents = [np.arange(n, n + 30) % 50 + 3 for n in range(40)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, run, documents, classes, Path(folder), like=like)
        trainer.step()
        trainer.step()


def decode(device=None):
    """A prompt and two tokens of two requests, in float32 and as released."""
    from dsv41 import FLOAT32, OFFICIAL
    from dsv41.init import random_params
    from dsv41.model import Model

    config, classes = tiny()
    model = Model(config, random_params(config, np.random.default_rng(0)), classes)
    model = model.to(device) if device else model
    for numerics in (FLOAT32, OFFICIAL):
        cache = model.new_cache(numerics)
        slots = [model.open(cache), model.open(cache)]
        for ids in (np.arange(3, 60), np.array([5]), np.array([6])):
            model.step(cache, slots, [ids, ids])


def main(argv=None):
    parser = commands.parser("sanitize", __doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help="folder names, `model` (default: all)")
    parser.add_argument("--tool", choices=TOOLS, help="only this one")
    parser.add_argument("--as-they-are", action="store_true", help="without WATCHED builds")
    parser.add_argument("--launch", action="store_true", help="launch here and now, unwatched")
    arguments = parser.parse_args(argv)
    known = [*operations(), MODEL]
    names = arguments.ops or known
    try:
        if unknown := sorted(set(names) - set(known)):
            raise ValueError(f"no such operation: {', '.join(unknown)}")
        importlib.import_module("cupy")
        if arguments.launch:
            launch.macros_of_all |= {} if arguments.as_they_are else {"WATCHED": 1}
            return 1 if launch_all(names) else 0
        tools = [arguments.tool] if arguments.tool else TOOLS
        failed = watch(tools, names, arguments.as_they_are)
    except ModuleNotFoundError as error:
        print(f"sanitize: needs CuPy: pip install dsv41[cuda13] ({error})", file=sys.stderr)
        return 2
    except (ImportError, ValueError) as error:
        print(f"sanitize: {error}", file=sys.stderr)
        return 2
    print(f"found something: {', '.join(failed)}" if failed else "nothing found")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
