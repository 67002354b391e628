# %% [markdown]
# # Solutions to 05 · The lightning indexer and top-k
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** All of left has lower entry numbers, so with left in front a stable sort takes the lower
# entry on a tie. Then put the winners back in order.


# %% tags=["exercise"]
def merge(left, left_scores, right, right_scores, k):
    """left, right: entry numbers, ascending, all of left before all of right; scores f32 beside
    them -> (k,) int, the best k of both, ascending"""
    both = np.concatenate([left, right])
    order = np.argsort(-np.concatenate([left_scores, right_scores]), kind="stable")[:k]
    return np.sort(both[order])


check("05.merge", merge)

# %% [markdown]
# **2.** An open pair has no entry, so n // 2 rounds down. The pool holds everything until 16,384.


# %% tags=["exercise"]
def scanned_bytes(n):
    """n tokens of context -> int, bytes of index keys"""
    return 68 * (3 * (n // 2) + n + 4 * min(n, 16_384))


check("05.scanned_bytes", scanned_bytes)

# %% [markdown]
# **3.** Each open head adds G w q; the heads add up because they share the key.


# %% tags=["exercise"]
def key_gradient(G, q, w, k):
    """G (N,), q (I, J), w (I,), k (N, J), all f64 -> (N, J)"""
    is_open = q @ k.T > 0  # (I, N)
    return (G * w[:, None] * is_open).T @ q


check("05.key_gradient", key_gradient)
