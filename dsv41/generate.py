"""How does one prompt become a text that appears piece by piece?

`stream_text` puts a single request into an Engine (engine.py), turns tokens into text as soon as
they are whole characters, and says at the end what it took: how many prompt tokens were run (fewer
than the prompt has, if a stored prefix was found), the time to the first token, tokens per second,
and how many drafts were kept at each verification. `Model.generate` and the command line call it.
"""

import time
from dataclasses import dataclass

import numpy as np

from .engine import Engine


@dataclass(frozen=True)
class Summary:
    """What a finished request cost."""

    prompt_tokens: int
    computed: int  # prompt tokens that were run: all, or a replay and what follows the hit
    new_tokens: int
    first_token: float  # seconds from submission
    seconds: float
    accepted: float | None  # mean drafts kept per verification

    def __str__(self):
        rate = (self.new_tokens - 1) / max(self.seconds - self.first_token, 1e-9)
        drafts = "" if self.accepted is None else f", {self.accepted:.2f} drafts kept per step"
        return (
            f"{self.computed} of {self.prompt_tokens} prompt tokens run, first token after "
            f"{self.first_token:.2f} s, {self.new_tokens} tokens, {rate:.1f} tokens/s{drafts}"
        )


def summarise(request):
    """Request -> Summary, once its first token is there."""
    now = time.perf_counter()
    accepted = float(np.mean(request.accepted)) if request.accepted else None
    return Summary(
        len(request.prompt),
        request.computed,
        len(request.tokens),
        request.first_token - request.started,
        now - request.started,
        accepted,
    )


def stream_text(
    model, prompt, max_tokens, sampling, *, stop=None, progress=None, finished=None, **options
):
    """Generate from text or ids and yield pieces of text, never half a character.

    progress: called with (prompt tokens done, of how many) while the prompt is read; finished:
    called with the Summary at the end. options: those of Engine.
    """
    ids = prompt if not isinstance(prompt, str) else model.tokenizer.encode(prompt)
    engine = Engine(model, **options)
    request = engine.submit(ids, max_tokens, sampling, stop)
    stream, reported = model.tokenizer.stream(), False
    while engine.busy:
        for _, tokens in engine.step():
            shown = [t for t in tokens if t not in request.stop]
            yield "".join(stream.push(t) for t in shown)
        if progress and not reported:
            done = len(request.prompt) if request.tokens else engine.cache.length[request.slot]
            progress(done, len(request.prompt))
            reported = bool(request.tokens)
    yield stream.flush()
    if finished:
        finished(summarise(request))
