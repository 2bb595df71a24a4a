"""Name the papers that a recipe's stages and policies come from, by their numbers on arXiv."""

from kvq_runtime.recipe import Recipe
from kvq_runtime.stages.stage import Stage

AQUA, GEAR, HIGGS, KIVI, KVQUANT = "2501.19392", "2403.05527", "2411.17525", "2402.02750", "2401.18079"
H2O, OSCAR, POLAR, QTIP, SHADOW = "2306.14048", "2605.17757", "2502.02617", "2406.11235", "2410.21465"
QUAROT, SQUAT, SVDQ, TURBO = "2404.00456", "2503.24358", "2502.15304", "2504.19874"
WUSH, ZIPCACHE = "2609.38121", "2405.14256"
# (slot, kind) of a stage, or of a policy, to papers. What is older than arXiv, or general knowledge, is not listed.
PAPERS: dict[tuple[str, str], tuple[str, ...]] = {
    **{("predict", kind): (AQUA,) for kind in ("linear", "low_rank", "mlp")},
    **{("rotate", kind): (SVDQ,) for kind in ("basis", "output_basis", "query_basis")},
    **{("rotate", "oscar"): (OSCAR,), ("rotate", "wush"): (WUSH,), ("feedback", "query_orthogonal"): (SQUAT,)},
    **{("quantize", "grid"): (HIGGS,), ("quantize", "trellis"): (QTIP,), ("quantize", "lloyd"): (TURBO,)},
    **{("quantize", kind): (POLAR,) for kind in ("polar", "polar_fitted")},
    **{("quantize", "nuq"): (KVQUANT,), ("quantize", "mixed"): (SVDQ,), ("quantize", "separable"): (ZIPCACHE,)},
    **{("quantize", "rtn_clipped"): (OSCAR,), ("correct", "sparse"): (KVQUANT,)},
    **{("correct", kind): (GEAR,) for kind in ("low_rank", "low_rank_sparse")},
    **{("select", "heavy"): (H2O,), ("select", "chunks"): (SHADOW,)},
}


def papers(recipe: Recipe) -> list[str]:
    """Numbers on arXiv, sorted, of the papers whose methods are in a recipe."""
    parts: list[tuple[str, str]] = [(policy.slot, policy.kind) for policy in recipe.policies]
    found: set[str] = set()
    for scheme in recipe.schemes:
        stages: list[Stage | None] = [scheme.predict, scheme.rotate, scheme.feedback, scheme.quantize, scheme.correct]
        parts += [(stage.slot, stage.kind) for stage in stages if stage is not None]
        if scheme.axis == "channel" and scheme.quantize.kind == "rtn":
            found.add(KIVI)
        if scheme.rotate is not None and (scheme.rotate.kind, scheme.quantize.kind) == ("hadamard", "rtn"):
            found.add(QUAROT)
    return sorted(found.union(*(PAPERS.get(part, ()) for part in parts)))
