# %% [markdown]
# # Solutions to 18 · Optimizers
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** The decay belongs to the old weight and not to the direction. Without a gradient the
# direction is 0.95² M, and the update has full size all the same.


# %% tags=["exercise"]
def muon_weight(weight, momentum, g, lr):
    """weight, momentum, g (n, m) f64 -> (n, m), the weight after a step; inputs unchanged"""
    momentum = 0.95 * momentum + g
    direction = 0.95 * momentum + g
    update = 0.18 * np.sqrt(max(g.shape)) * newton_schulz(direction)
    return (1 - 0.1 * lr) * weight - lr * update


check("18.muon_weight", muon_weight)

# %% [markdown]
# **2.** The row moves while its size is above the threshold. Equal is not above.


# %% tags=["exercise"]
def idle_steps(ratio, beta, tau):
    """ratio: |U_i| / mean |U| in the first idle step, the mean stays -> int, full-size steps"""
    steps = 0
    while ratio * beta**steps > tau:
        steps += 1
    return steps


check("18.idle_steps", idle_steps)

# %% [markdown]
# **3.** `np.add.at` adds every value, also to a row that is named twice. The rest is the chapter's
# step, with the momentum decayed in all rows.


# %% tags=["exercise"]
def table_step(weight, momentum, rows, values, lr):
    """weight, momentum (m, n), rows (t,) int, values (t, n) f64 -> (m, n); inputs unchanged"""
    grad = np.zeros_like(weight)
    np.add.at(grad, rows, values)
    momentum = 0.95 * momentum + 0.05 * grad
    return weight - 0.18 * lr * balance(0.95 * momentum + 0.05 * grad)


check("18.table_step", table_step)
