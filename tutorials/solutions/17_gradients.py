# %% [markdown]
# # Solutions to 17 · Gradients by hand
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** Each query is a small attention over the rows that exist. `np.add.at` adds what several
# queries, or one query twice, want of a record.


# %% tags=["exercise"]
def records_gradient(D, q, records, rows, sink):
    """D, q (T, H, C), records (N, C), rows (T, n) int, sink (H,) -> (N, C), all f64"""
    total = np.zeros_like(records)
    for t in range(len(rows)):
        seen = rows[t][rows[t] >= 0]
        np.add.at(total, seen, attend_back(D[t], q[t], records[seen], sink)[1])
    return total


check("17.records_gradient", records_gradient)

# %% [markdown]
# **2.** The way back starts where the way there ended: first the columns, then the softmax.


# %% tags=["exercise"]
def one_round(dB, Z, eps):
    """dB, Z (S, S) f64, B = softmax and one column pass -> dZ (S, S)"""
    softmax = np.exp(Z - Z.max(axis=1, keepdims=True))
    softmax = softmax / softmax.sum(axis=1, keepdims=True)
    divisor = (softmax + eps).sum(axis=0, keepdims=True) + eps
    B = (softmax + eps) / divisor
    d = (dB - np.sum(dB * B, axis=0, keepdims=True)) / divisor
    return softmax * (d - np.sum(d * softmax, axis=1, keepdims=True))


check("17.one_round", one_round)

# %% [markdown]
# **3.** What was read decides the gradient. What is stored takes the step, and keeps its digits.


# %% tags=["exercise"]
def master_step(master, x, target, lr):
    """master (n, 32) f64, x (T, 32), target (T, n) -> the new master (n, 32)"""
    gap = x @ fp4(master).T - target
    return master - lr * gap.T @ x


check("17.master_step", master_step)
