"""AQUA-KV whose decode rebuilds nothing: keys are predicted after RoPE, values from the values below alone.

    k_l = R_t μ_l + z_l,   z_l = z_{l-1} W_l + b_l + r_l    so    q · k_l = q · R_t μ_l + const + Σ_j q_j · r_j,
    q_l = q,   q_{j-1} = q_j W_jᵀ

and for values Σ p v_l = const + Σ_j (Σ p r_j) W_{j+1} … W_l: a query goes down the chain of layers to the anchor, reads
the packed residuals of each, and no key or value is made (`attention/absorbed.py`). The chain is cut at the anchors,
every g layers, which predict their mean alone: a layer reads the residuals of (g + 1) / 2 layers on average. With
`-star` a layer is predicted from its anchor alone, and reads those of two at most.

Keys have to be predicted after RoPE: before it a query would go down the chain turned back by each token's position,
another one for every token. A prediction that commutes with RoPE, a complex number for each frequency and pair of
heads, could stand on either side of it; one of all channels, fitted after RoPE, contains it, and keeps beside it what
slow frequencies share. On the demo model they explain 7 to 10% and 22 to 32% of the variance of a layer's keys, where
74 to 93% are before RoPE (benchmarks/records). Values have no position; they lose what this layer's keys told.

What a layer reads is together one description of its keys: with as many bits it could have been stored by itself. So
this saves bits held, not bits read. Bits in a name are those of all layers, anchors among them.

Source: Shutova et al., 2025 (AQUA-KV), algorithm 1, with its variants "keys after RoPE" and "values from values alone".
Differs: anchors, `-star` and the order in which decode attention multiplies are ours; layer 0 has no more bits.
"""

from dataclasses import replace

from kvq_runtime.recipe import Family, Recipe, Scheme
from kvq_runtime.recipes import higgs
from kvq_runtime.stages.predict import Linear

FAMILY = Family(
    look=("sky", "s"),
    golden=("aqua-absorbed-2bit-2", "aqua-absorbed-2bit-4-star"),
    varied=("aqua-absorbed",),
)


def absorbed(name: str, scheme: Scheme, key: Linear, value: Linear, summary: str) -> Recipe:
    """AQUA-KV in the form that is attended to without rebuilding, over any rounding, the same in all layers."""
    keys, values = replace(scheme, predict=key), replace(scheme, predict=value)
    return Recipe(f"aqua-absorbed-{name}", keys, values, "post", summary=f"AQUA-KV, attended to packed: {summary}")


def recipes() -> list[Recipe]:
    """2 bits: chains of 2 layers, and stars of 4; longer chains are a setting, `all.predict.anchor_every=4`."""
    two, chain, star = higgs.scheme("2bit"), Linear(anchor_every=2), Linear(anchor_every=4, reads="anchor")
    summary = "2 bits, predicted from anchors every 4 layers"
    return [
        absorbed("2bit-2", two, chain, replace(chain, keys=False), "2 bits, an anchor every 2 layers"),
        absorbed("2bit-4-star", two, star, replace(star, keys=False), summary),
    ]
