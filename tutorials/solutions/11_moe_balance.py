# %% [markdown]
# # Solutions to 11 · DeepSeekMoE and balance by bias, per modality
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** The bias is in the sort and nowhere else. A stable sort gives a tie to the lower expert.


# %% tags=["exercise"]
def route_one(logits, bias, k):
    """logits (E,) f32, bias (E,) f32 -> (E,) f32; the weights of the k chosen sum to 1.5"""
    s = score(logits)
    chosen = np.argsort(-(s + bias), kind="stable")[:k]
    weight = np.zeros_like(s)
    weight[chosen] = s[chosen] / s[chosen].sum() * np.float32(1.5)
    return weight


check("11.route_one", route_one)

# %% [markdown]
# **2.** Loads add up over machines, signs do not. Comparing $E \cdot \mathrm{load}$ with the sum
# keeps everything in integers, so a load on the mean stays there.


# %% tags=["exercise"]
def balanced(bias, loads):
    """bias (E,) f32, loads (machines, E) int -> (E,) f32, moved by 0.001, 0 or -0.001"""
    load = loads.sum(axis=0)
    move = np.sign(load.sum() - len(load) * load)
    return bias + np.float32(0.001) * move.astype(np.float32)


check("11.balanced", balanced)

# %% [markdown]
# **3.** All three matrices have the same number of elements, and each row is a multiple of 32. A
# block of 32 takes 16 bytes of codes and one of scale.


# %% tags=["exercise"]
def bytes_of_expert(hidden, width):
    """hidden, width: multiples of 32 -> int; two matrices hidden to width, one back"""
    return 3 * hidden * width // 32 * 17


check("11.bytes_of_expert", bytes_of_expert)
