"""python -m dsv41: one command per question that a user asks.

    demo      does it run here, and what does it write?
    inspect   what is in this checkpoint?
    verify    which tensor of another run departs from ours first?
    generate  what does the model write?
    ledger    how many parameters, bytes and FLOPs, for every model of the family?
    data      where does the training text come from?
    train     can it learn?
    worth     what is each part of a trained model worth?
    bench     how fast is the plain text on this machine?
    kernels   which operations have CUDA kernels, and are they right and fast here?

A user's mistake ends with one line on stderr and exit code 2.
"""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

STRATEGIES = ("bounded", "zero", "periodic", "full")
ROOT = Path(__file__).resolve().parent.parent
MINI = ROOT / "data" / "mini"


def main(argv=None):
    """Run one command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments) or 0
    except BrokenPipeError:  # whoever read the output has read enough
        return 0
    except (ValueError, FloatingPointError, OSError, ImportError) as error:
        print(f"dsv41 {arguments.command}: {error}", file=sys.stderr)
        return 2


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m dsv41",
        description="DeepSeek-V4.1-Flash in plain NumPy: run it, measure it, compare with it.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name, run, text):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    demo = add("demo", _demo, "what a checkpoint does: text, recall, drafts, replay, agreement")
    demo.add_argument("dir", nargs="?", type=Path, default=MINI, help="default: data/mini")

    inspect = add("inspect", _inspect, "layer plan and tensor inventory; reads headers only")
    inspect.add_argument("dir", type=Path, help="checkpoint directory")
    inspect.add_argument("--axes", action="store_true", help="also explain the axis letters")

    verify = add(
        "verify", _verify, "compare a run with stored intermediates; name the first departure"
    )
    verify.add_argument("dir", type=Path, help="checkpoint directory")
    verify.add_argument(
        "arrays", type=Path, help=".npz of intermediates, with the token ids as ids"
    )
    verify.add_argument("--numerics", choices=("official", "float32"), default="official")
    verify.add_argument("--all", action="store_true", help="print every tensor, not only the first")

    generate = add("generate", _generate, "continue a prompt, with drafts and a prefix store")
    generate.add_argument("dir", type=Path, help="checkpoint directory")
    generate.add_argument("--prompt", required=True, help="text, or @FILE to read it from a file")
    generate.add_argument("--max-tokens", type=int, default=64, help="new tokens at most (64)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--top-p", type=float, default=1.0, help="nucleus (1: all tokens)")
    generate.add_argument("--seed", type=int, default=0, help="of drawn tokens")
    generate.add_argument("--draft", action="store_true", help="speculate with DSpark")
    generate.add_argument("--store", type=Path, help="directory of the prefix store")
    generate.add_argument(
        "--strategy", choices=STRATEGIES, help="what is kept of windows; default bounded"
    )
    generate.add_argument(
        "--store-budget", type=int, default=4096, help="MB on disk, least used go first"
    )
    generate.add_argument("--page-tokens", type=int, default=64, help="tokens of a stored block")
    generate.add_argument(
        "--period", type=int, default=1024, help="tokens between windows kept by periodic"
    )
    generate.add_argument("--chunk", type=int, default=512, help="prompt tokens per step")
    generate.add_argument(
        "--exact", action="store_true", help="run every layer on every prompt token"
    )
    generate.add_argument(
        "--numerics",
        choices=("official", "float32"),
        default="official",
        help="official: the released roundings",
    )
    generate.add_argument("--chat", action="store_true", help="wrap the prompt as a user's turn")
    generate.add_argument("--effort", type=int, help="reasoning effort 1-100, with --chat")

    train = add("train", _train, "train a model from a run description; resumes where it stopped")
    train.add_argument("config", type=Path, help="JSON file: model, run, recall")
    train.add_argument("--corpus", type=Path, default=Path("out/corpus"))
    train.add_argument("--out", type=Path, default=Path("out/run"))
    train.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    train.add_argument("--minutes", type=float, help="stop, saved, after so many minutes")

    data = add("data", _data, "build the training corpus from freely licensed packages")
    data.add_argument("--out", type=Path, default=Path("out/corpus"))
    data.add_argument(
        "--ship", action="store_true", help="also train the tokenizer and renew data/"
    )
    data.add_argument("--baselines", action="store_true", help="also measure xz and a 5-gram model")

    ledger = add("ledger", _ledger, "parameters, FLOPs and cache bytes of the model family")
    ledger.add_argument("dir", nargs="?", type=Path, help="a checkpoint directory or config.json")
    ledger.add_argument("--context", type=int, nargs="+", default=[4096, 131_072, 1_048_576])
    ledger.add_argument("--figures", type=Path, metavar="DIR", help="also draw the figures there")

    bench = add("bench", _bench, "tokens per second and peak memory of two random models")
    bench.add_argument("--prompt", type=int, default=1024, help="prompt tokens (default 1024)")
    bench.add_argument("--steps", type=int, default=32, help="decode steps (default 32)")
    bench.add_argument("--train", action="store_true", help="training steps of the miniature")
    bench.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="with --train")

    worth = add("worth", _worth, "what each part of a trained model is worth on held-out text")
    worth.add_argument("dir", nargs="?", type=Path, default=MINI, help="default: data/mini")
    worth.add_argument("--text", type=Path, default=MINI.parent / "corpus" / "heldout.txt")
    worth.add_argument("--bytes", type=int, help="stop after so many bytes of text")
    worth.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")
    worth.add_argument(
        "--only",
        action="append",
        metavar="KIND",
        help="of the measures; may be repeated: bits per byte, recall, replay, drafts, experts",
    )

    add("kernels", _kernels, "which CUDA kernels there are; on a GPU each is checked and timed")
    return parser


def _demo(arguments):
    from .demo import demo

    return 0 if demo(arguments.dir) else 1


def _worth(arguments):
    from .worth_table import main_worth

    main_worth(arguments)


def _inspect(arguments):
    from . import dims
    from .checkpoint import Checkpoint, inventory
    from .plan import format_plan

    checkpoint = Checkpoint(arguments.dir)
    print(format_plan(checkpoint.config.plan) + "\n")
    if arguments.axes:
        print(dims.table(checkpoint.config) + "\n")
    print(f"{'tensors':<40}{'count':>8}  {'type':<10}{'bytes':>20}")
    for group, count, dtype, size in inventory(checkpoint):
        print(f"{group:<40}{count:>8,}  {dtype:<10}{size:>20,}")
    checkpoint.check()
    extra = f"; {len(checkpoint.extra)} more are not part of it" if checkpoint.extra else ""
    print(f"\nevery tensor of the model is there, with its shape and type{extra}")


def _verify(arguments):
    from . import FLOAT32, OFFICIAL, load
    from .verify import compare_by_layer, compare_whole, load_arrays

    numerics = OFFICIAL if arguments.numerics == "official" else FLOAT32
    arrays = load_arrays(arguments.arrays)
    model = load(arguments.dir)
    found = compare_whole(model, arrays, numerics)
    if not found:
        raise ValueError(f"arrays: {arguments.arrays} holds no tensor that this model computes")
    departed = [d for d in found if not d.within]
    shown = found if arguments.all else departed[:1]
    for departure in shown:
        print(departure)
    print(f"one run: {len(found) - len(departed)} of {len(found)} tensors agree")
    if not departed:
        return 0
    for layer, tensors in compare_by_layer(model, arrays, numerics).items():
        wrong = [d for d in tensors if not d.within]
        verdict = f"first {wrong[0]}" if wrong else f"all {len(tensors)} tensors agree"
        print(f"layer {layer} from its stored input: {verdict}")
    return 1


def _generate(arguments):
    from . import load
    from .generate import stream_text
    from .sampling import Sampling

    model = load(arguments.dir)
    sampling = Sampling(arguments.temperature, arguments.top_p, arguments.seed)
    ids = _prompt_ids(model, arguments)
    with _store(arguments) as store:
        options = _engine_options(model, store, arguments)
        for piece in stream_text(model, ids, arguments.max_tokens, sampling, **options):
            print(piece, end="", flush=True)
    print()


def _store(arguments):
    """The prefix store on disk as a context, or one that holds nothing."""
    if arguments.store is None:
        return nullcontext()
    from .store import Store

    # keys carry the model's fingerprint themselves (prefix.py)
    return Store(arguments.store, b"prefix", budget=arguments.store_budget << 20)


def _engine_options(model, store, arguments):
    from . import FLOAT32, OFFICIAL
    from .prefix import PrefixCache
    from .schedule import measure_throughput

    numerics = OFFICIAL if arguments.numerics == "official" else FLOAT32
    numerics, speed, prefix = numerics.but(batch_invariant=True), None, None
    if arguments.draft:
        speed = measure_throughput(model, numerics, (1, 2, 4, 6))
    if store is not None:
        strategy = arguments.strategy or ("zero" if arguments.exact else "bounded")
        prefix = PrefixCache(model, store, strategy, period=arguments.period)
    return {
        "numerics": numerics,
        "chunk": arguments.chunk,
        "exact": arguments.exact,
        "draft": arguments.draft,
        "steps_per_second": speed,
        "prefix": prefix,
        "page_tokens": arguments.page_tokens,
        "progress": _show_progress if sys.stderr.isatty() else None,
        "finished": lambda summary: print(f"\n[{summary}]", file=sys.stderr),
    }


def _prompt_ids(model, arguments):
    from .prompt import encode_prompt

    text = arguments.prompt
    if text.startswith("@"):
        text = Path(text[1:]).read_text(encoding="utf-8")
    if not arguments.chat:
        if arguments.effort is not None:
            raise ValueError("effort: only a --chat prompt has one")
        return model.tokenizer.encode(text)
    thinking = arguments.effort is not None
    options = {"effort": arguments.effort} if thinking else {}
    message = {"role": "user", "content": text}
    return encode_prompt(model.tokenizer, [message], thinking=thinking, **options)


def _show_progress(done, total):
    width = 30 * done // total
    end = "\n" if done == total else ""
    print(f"\rprompt [{'#' * width:<30}] {done}/{total}", end=end, file=sys.stderr, flush=True)


def _train(arguments):
    from .train.command import main_train

    main_train(arguments)


def _data(arguments):
    from .train.data import main_data

    main_data(arguments)


def _ledger(arguments):
    from . import Config
    from .families import MODELS
    from .ledger_tables import breakdown, report

    if any(context < 1 for context in arguments.context):
        raise ValueError("context: expected positive token counts")
    if arguments.dir is not None:
        print(breakdown(Config.load(arguments.dir), arguments.context))
    else:
        print(report(list(MODELS.values()), arguments.context))
    if arguments.figures:
        from . import figures

        arguments.figures.mkdir(parents=True, exist_ok=True)
        for name in ("kv_bytes", "decode_flops", "strategies"):
            path = arguments.figures / f"{name}.png"
            getattr(figures, f"draw_{name}")(path)
            print(f"wrote {path}")


def _bench(arguments):
    if arguments.train:
        from .train.bench import report as training

        for line in training(arguments.device):
            print(line, flush=True)
        return
    from .bench import context_report, report

    for line in report(arguments.prompt, arguments.steps):
        print(line, flush=True)
    print()
    for line in context_report():
        print(line, flush=True)


def _kernels(arguments):
    try:
        from dsv41_kernels.overview import report
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}; in a checkout put kernels/ on PYTHONPATH") from None
    return 1 if report() else 0
