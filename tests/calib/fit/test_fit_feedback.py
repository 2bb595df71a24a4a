"""Moments of queries: chunks are the whole."""

from dataclasses import replace

import pytest
import tiny
import torch
from feeding import rotary
from torch import Tensor

from kvq_calib.fit.statistics import QueryMoments
from kvq_calib.model import find as models
from kvq_calib.model.streamed import Stream
from kvq_calib.run import calibrate as runs
from kvq_calib.run import plan as plans
from kvq_calib.run.run import Run
from kvq_calib.text import corpus
from kvq_runtime.artifact import artifact
from kvq_runtime.artifact.recipe_text import read
from kvq_runtime.fit import feedback as fits
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import rope
from kvq_runtime.recipe import preset

GEOMETRY = Geometry(1, 2, 16)
GROUP, TOKENS = 3, 24  # query heads of one KV head


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tables(tokens: int = TOKENS, channels: int = 16) -> tuple[Tensor, Tensor]:
    return rotary(Geometry(1, 1, channels)).tables(torch.arange(tokens)[None])


def heads(sequences: int = 8) -> Tensor:
    """Queries before RoPE, all heads, [N, T, H·G, D]: a few directions, other ones for each KV head."""
    mix = gaussian(2, 1, 16, 16, seed=1) * torch.exp(-0.4 * torch.arange(16))
    return (gaussian(sequences, TOKENS, 2, GROUP, 16) @ mix.squeeze(1).mT[None, None]).flatten(2, 3)


def slow(q_NTGD: Tensor) -> Tensor:
    """E[q qᵀ] of each KV head, token by token."""
    found = torch.zeros(2, 16, 16, dtype=torch.float64)
    for number in range(2 * GROUP):
        rows = q_NTGD[:, :, number].flatten(0, 1).double()
        found[number // GROUP] += sum(torch.outer(row, row) for row in rows)
    return found / (q_NTGD.shape[0] * q_NTGD.shape[1] * GROUP)


def test_moments_of_chunks_are_those_of_all_queries_of_a_kv_head():
    q, total = heads(), QueryMoments(GEOMETRY)
    for part in q.split(3):
        partial = QueryMoments(GEOMETRY)
        partial.update(part, tables())
        total.merge(partial)
    found = total.value()
    assert torch.allclose(found.before, slow(q), rtol=1e-5, atol=1e-5)
    assert torch.allclose(found.after, slow(rope.rotate(q, *tables())), rtol=1e-5, atol=1e-5)
    assert total.sums["count"] == 8 * TOKENS * GROUP and found.sequence == TOKENS * GROUP


# ---- in a run ----


@pytest.mark.slow
def test_a_run_fits_the_moves_of_the_models_own_queries(tmp_path):
    """The artifact's tensors against queries captured once more; and the bytes of another run."""
    folder = tmp_path / "model"
    folder.mkdir()
    tiny.save(folder, layers=2)
    tiny.text(folder)
    files = models.resolve(str(folder))
    chain = read("aqua-2bit+key.axis=channel+value.axis=channel")
    chain = replace(chain, name="chain", key=replace(chain.key, feedback=preset("squat-pre-2bit").key.feedback))
    recipes = (preset("squat-2bit"), preset("squat-pre-2bit"), preset("aqua-2bit"), chain)
    made = plans.make(files, recipes, str(folder / "corpus.txt"), samples=6, seq_len=256, held_out=2)
    artifacts = runs.calibrate(Run(made, files, tmp_path / "run"))
    stream, geometry, total = Stream(files), made.geometry, QueryMoments(made.geometry)
    tokens_BT = corpus.select(made.corpus, files.path, made.samples, made.seq_len, made.seed).tokens_BT[:4]
    q_NTC = stream.layer(0).forward(stream.embed(tokens_BT), queries=True).q_NTC
    assert q_NTC is not None and made.chunks[0] == range(4)
    total.update(q_NTC.unflatten(-1, (-1, geometry.head_size)), stream.rope(256))
    found = total.value()
    for recipe in recipes[:2]:
        stage = recipe.key.feedback
        for name, move in fits.moves(stage, found.moment(stage.queries), 0.0, None).items():
            assert torch.equal(artifacts[recipe.name].tensors[f"layers.0.key.feedback.{name}"], move)
    # about a mean that turns with the position, which keys after RoPE have too, rounding is what it is before
    post, pre = (artifacts[recipe.name].fit["layers"][0]["key"]["mean_energy"] for recipe in recipes[:2])
    assert post == pytest.approx(pre, rel=1e-3)
    # the first layer of the chain has its own side, without feedback
    names = {name for name in artifacts["chain"].tensors if "feedback" in name}
    assert names == {"layers.1.key.feedback.update_1"}
    again = runs.calibrate(Run(made, files, tmp_path / "again"))
    assert all(artifact.to_bytes(again[name]) == artifact.to_bytes(artifacts[name]) for name in again)
