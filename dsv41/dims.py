"""Which letter stands for which axis?

Shapes are written with these letters everywhere: `# (T, H, C)` in a margin, `x (T, D) f32` in a
docstring. Three letters have a second life that the text around them makes plain: (N, K) of a
weight are its outputs and inputs, B in draft.py and schedule.py counts the tokens of a draft or of
a step, and in equations A, B and C may be matrices. `table(config)` prints the letters with their
sizes in a given model; axes that depend on the input have no size there.
"""

# letter -> (what it counts, its size as a function of the config, or None)
DIMS = {
    "T": ("tokens in one call, all requests end to end", None),
    "R": ("requests in one call", None),
    "D": ("channels of the hidden state", lambda c: c.hidden_size),
    "S": ("residual streams", lambda c: c.hc_mult),
    "H": ("attention heads", lambda c: c.num_attention_heads),
    "C": ("channels of a head, and of the shared latent", lambda c: c.head_dim),
    "U": ("rotated channel pairs", lambda c: c.qk_rope_head_dim // 2),
    "Q": ("rank of the query latent", lambda c: c.q_lora_rank),
    "G": ("groups of heads in the output projection", lambda c: c.o_groups),
    "O": ("rank of each group's output", lambda c: c.o_lora_rank),
    "W": ("tokens in the sliding window", lambda c: c.sliding_window),
    "N": ("compressed entries of a request", None),
    "m": ("tokens per compressed entry (1 or 2)", None),
    "K": ("entries selected per query", lambda c: c.index_topk),
    "I": ("indexer heads", lambda c: c.index_n_heads),
    "J": ("channels of an indexer head", lambda c: c.index_head_dim),
    "B": ("blocks in the candidate pool", lambda c: c.candidate_topk_blocks),
    "P": (
        "entries in one query's pool",
        lambda c: c.candidate_topk_blocks * c.candidate_block_size,
    ),
    "Z": ("bytes of a stored record (its channels under FLOAT32)", None),
    "E": ("routed experts", lambda c: c.n_routed_experts),
    "k": ("experts per token", lambda c: c.num_experts_per_tok),
    "F": ("channels inside an expert", lambda c: c.moe_intermediate_size),
    "V": ("vocabulary", lambda c: c.vocab_size),
}


def table(config):
    """The letters, their sizes in `config`, and their meanings, one line each."""
    lines = []
    for letter, (meaning, size) in DIMS.items():
        shown = "" if size is None else f"{size(config):,}"
        lines.append(f"{letter}  {shown:>8}  {meaning}")
    return "\n".join(lines)
