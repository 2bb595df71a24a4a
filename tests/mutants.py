"""Break the code in known ways, one at a time, and see which tests notice: `python tests/mutants.py --suite short`.

Each mutant is tried in a copy of the tree, against the tests that ought to see it, until the first that fails. `short`
is what `make test` takes, `all` what `make test-all` takes; `--base DIR` tries the same mutants on another checkout,
with all tests that it has. A mutant that survives is a fault that could come back unseen.

    python tests/mutants.py --suite short                 every mutant
    python tests/mutants.py --suite all --only gptq rope  those whose names contain a word
    python tests/mutants.py --list

What torch and transformers take to start is paid once: each mutant is a process forked from this one.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUITES = {"short": ["-m", "not slow and not all_recipes"], "all": []}
REWRITTEN = "ignore::pytest.PytestAssertRewriteWarning"  # of plugins that transformers has imported
LIMIT = 900  # seconds for a mutant; one that hangs is noticed, too


@dataclass(frozen=True)
class Mutant:
    """One change that a test has to notice.

    before, after   text that stands once in `file`, and what it becomes
    tests           files of tests/, those that ought to see it first
    was             `file`, and where other `before`, in commit 953bbc7, whose tests are all in one folder
    """

    name: str
    breaks: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    was: tuple[str, ...] = ()

    def place(self, root: Path) -> tuple[Path, str, str]:
        """The file to change in a checkout, and the two texts; a ValueError where the text is not there once."""
        places = [(self.file, self.before, self.after)]
        if self.was:
            places.append((self.was[0], *(self.was[1:] or (self.before, self.after))))
        for file, before, after in places:
            if (root / file).is_file() and (root / file).read_text().count(before) == 1:
                return root / file, before, after
        raise ValueError(f"{self.name}: {self.file} has not once the text {self.before!r}; say where it is now")


CONTRACT, EDGES = "recipes/test_contract.py", "recipes/test_edges.py"
KERNEL = "kernels/test_attention_kernel.py"
RUN = ("calib/fit/test_fit_feedback.py", "calib/run/test_run.py", "calib/run/test_budget_run.py")
MUTANTS = [
    # ---- ops
    Mutant(
        "rtn-step",
        "the largest number of a group is beyond the last code",
        "kvq_runtime/ops/rtn.py",
        "step = ((high - low.float()).clamp_min_(0) / (2**bits - 1)).half()",
        "step = ((high - low.float()).clamp_min_(0) / 2**bits).half()",
        ("ops/test_rtn.py",),
    ),
    Mutant(
        "rtn-absmax",
        "symmetric codes are decoded off centre",
        "kvq_runtime/ops/rtn.py",
        "start = step * (-(2**bits - 1) / 2) if low is None",
        "start = step * (-(2**bits) / 2) if low is None",
        ("ops/test_rtn.py", "codec/test_codec.py"),
    ),
    Mutant(
        "pack-count",
        "of padded bytes the wrong codes are dropped",
        "kvq_runtime/ops/pack.py",
        "plane = _streams(byte, width)[..., :count] if",
        "plane = _streams(byte, width)[..., -count:] if",
        ("ops/test_pack.py",),
    ),
    Mutant(
        "rope-part",
        "of a partly rotated head, channels are paired as if all turned",
        "kvq_runtime/ops/rope.py",
        "if 2 * half < x_NTHD.shape[-1]:",
        "if 2 * half > x_NTHD.shape[-1]:",
        ("ops/test_rope.py", "codec/test_codec.py"),
        ("kvq_runtime/rope.py",),
    ),
    Mutant(
        "rope-scaling",
        "RoPE with a factor is undone without it",
        "kvq_runtime/ops/rope.py",
        "return rotate(x_NTHD.float(), cos / norm, -sin / norm)",
        "return rotate(x_NTHD.float(), cos, -sin)",
        ("ops/test_rope.py", EDGES),
        ("kvq_runtime/rope.py",),
    ),
    Mutant(
        "feedback-sign",
        "the error of a block is pushed away from where it is made up for",
        "kvq_runtime/ops/feedback.py",
        "moves.append(-torch.cholesky_solve(",
        "moves.append(torch.cholesky_solve(",
        ("stages/test_feedback.py",),
        ("kvq_runtime/ops/feedback.py", "found.append(-torch.cholesky_solve(", "found.append(torch.cholesky_solve("),
    ),
    Mutant(
        "latent-floor",
        "uniform codes of latent channels are cut off, not rounded",
        "kvq_runtime/ops/latent.py",
        ".round_().clamp_(0, 2**bits - 1)",
        ".floor_().clamp_(0, 2**bits - 1)",
        ("ops/test_latent.py", "calib/fit/test_basis.py"),
    ),
    Mutant(
        "grid-scale",
        "a group's scale is its deviation, not the one of least error",
        "kvq_runtime/ops/grid.py",
        "(rms * dot / norm).half()",
        "rms.half()",
        ("ops/test_grid.py",),
    ),
    # ---- codec
    Mutant(
        "codec-mean",
        "the mean is added where it should be removed",
        "kvq_runtime/codec/codec.py",
        "x = x - self.mean(context)",
        "x = x + self.mean(context)",
        ("codec/test_codec.py",),
        ("kvq_runtime/codec.py",),
    ),
    Mutant(
        "codec-predicted",
        "what is predicted is not taken away before rounding",
        "kvq_runtime/codec/codec.py",
        "return x if predicted is None else x - predicted.float()",
        "return x",
        ("codec/test_codec.py", CONTRACT),
        ("kvq_runtime/codec.py",),
    ),
    Mutant(
        "codec-below",
        "a prediction reads the nearest layer in place of each one it names",
        "kvq_runtime/codec/codec.py",
        "context.below[depth - 1][which]",
        "context.below[0][which]",
        ("codec/test_codec.py",),
        ("kvq_runtime/codec.py",),
    ),
    # ---- store
    Mutant(
        "sinks-put",
        "sinks are read as they decode",
        "kvq_runtime/store/layer.py",
        "out_BTC[:, : stop - start] = self.sinks_2BSC[role, :, start:stop]",
        "pass",
        ("recipes/test_contract.py",),
        ("kvq_runtime/sinks.py", "out_BTC[:, : stop - start] = stream.sinks_BSC[:, start:stop]", "pass"),
    ),
    Mutant(
        "select-blocks",
        "reordered rows keep the blocks of others",
        "kvq_runtime/store/layer.py",
        "{name: field.index_select(0, rows) for name, field in slab.items()}",
        "dict(slab)",
        (CONTRACT,),
        ("kvq_runtime/stream.py",),
    ),
    Mutant(
        "crop-block",
        "a crop inside a block keeps the block",
        "kvq_runtime/store/layer.py",
        "self._restore(length // self.window.block, survivors_2BTC)",
        "self._restore(-(-length // self.window.block), survivors_2BTC)",
        ("recipes/test_contract.py",),
        (
            "kvq_runtime/stream.py",
            "self.blocks = length // self.side.block",
            "self.blocks = -(-length // self.side.block)",
        ),
    ),
    Mutant(
        "padding-filled",
        "padded slots are encoded as they are",
        "kvq_runtime/store/encode.py",
        "source = self.positions.source(start, start + size, store.window.sinks)",
        "source = None",
        ("recipes/test_contract.py",),
        ("kvq_runtime/flush.py", "x_BTC = x_BTC.gather(1, taken).where((source >= 0)[..., None], 0.0)", "pass"),
    ),
    Mutant(
        "nan-padding",
        "a NaN in a padded slot stops the model",
        "kvq_runtime/store/encode.py",
        "bad_BT &= self.positions.real_BT[:, start : start + x_BTC.shape[1]]",
        "pass",
        ("recipes/test_edges.py",),
        ("kvq_runtime/flush.py", "bad_BT &= timeline.real_BT[:, start : start + x_BTC.shape[1]]", "pass"),
    ),
    Mutant(
        "report-exact",
        "16 bits are counted as 8",
        "kvq_runtime/store/memory.py",
        "exact_bytes=2 * elements,",
        "exact_bytes=elements,",
        ("store/test_memory.py",),
        ("kvq_runtime/memory.py",),
    ),
    Mutant(
        "report-all",
        "what is shared is left out of the bits of all",
        "kvq_runtime/store/memory.py",
        "all_bits=8 * (sequence + shared) / max(1, elements)",
        "all_bits=8 * sequence / max(1, elements)",
        ("store/test_memory.py",),
        ("kvq_runtime/memory.py",),
    ),
    # ---- policies
    Mutant(
        "window-crop",
        "votes of cropped tokens count",
        "kvq_runtime/policies/dynamic_window.py",
        "        if length < self._seen:\n            self._restore(length, {})",
        "        pass",
        ("policies/test_window.py",),
        (
            "kvq_runtime/attention/votes.py",
            "for at, gaps in self._gaps.items() if at <= length}",
            "for at, gaps in self._gaps.items()}",
        ),
    ),
    Mutant(
        "hitters-sinks",
        "heavy hitters may push out the sinks",
        "kvq_runtime/policies/heavy_hitters.py",
        "rate_BW.masked_fill(sink_BW, torch.inf).argsort(",
        "rate_BW.argsort(",
        ("policies/test_h2o.py",),
        ("kvq_runtime/hitters.py",),
    ),
    Mutant(
        "hitters-rate",
        "attention is divided by how many came before, not after",
        "kvq_runtime/policies/heavy_hitters.py",
        "after = asked.flip(1).cumsum(1).flip(1)",
        "after = asked.cumsum(1)",
        ("policies/test_h2o.py",),
        ("kvq_runtime/hitters.py",),
    ),
    Mutant(
        "prompt-sinks",
        "exact sinks are fitted to",
        "kvq_runtime/policies/prompt_fit.py",
        "fitted, positions_T = seen & (rank_T > store.window.sinks),",
        "fitted, positions_T = seen,",
        ("policies/test_online.py",),
        (
            "kvq_runtime/online.py",
            "own, positions_T = seen & (rank_T > stream.side.sinks),",
            "own, positions_T = seen,",
        ),
    ),
    # ---- attention
    Mutant(
        "causal",
        "each query sees the token after it",
        "kvq_runtime/attention/reference.py",
        ".tril_(length - count)[None, None]",
        ".tril_(length - count + 1)[None, None]",
        ("attention/test_attend.py",),
        ("kvq_runtime/attention/attend.py",),
    ),
    Mutant(
        "long-maximum",
        "slabs are merged without the largest score: large ones overflow",
        "kvq_runtime/attention/long_query.py",
        "top_YN = torch.maximum(before_YN, s_YNT.amax(-1))",
        "top_YN = torch.where(torch.isfinite(torch.maximum(before_YN, s_YNT.amax(-1))), 0.0, -torch.inf)",
        ("kernels/test_fused.py",),
        ("kvq_runtime/attention/tall.py",),
    ),
    Mutant(
        "fused-padding",
        "padding told in a decode step is not looked at",
        "kvq_runtime/attention/padding.py",
        "(length == last + 1 and count == 1 and not self.positions.told)",
        "(length == last + 1 and count == 1)",
        ("kernels/test_fused.py",),
        (
            "kvq_runtime/attention/fused.py",
            "(length == last + 1 and count == 1 and not self.timeline.told)",
            "(length == last + 1 and count == 1)",
        ),
    ),
    Mutant(
        "hf-scale",
        "the model's own factor of scores is ignored",
        "kvq_runtime/hf/attention.py",
        "scale = query.shape[-1] ** -0.5 if scaling is None else scaling",
        "scale = query.shape[-1] ** -0.5",
        ("attention/test_attend.py", "hf/test_generate.py", "hf/test_h2o_models.py"),
    ),
    # ---- kernels
    Mutant(
        "softmax-fade",
        "what was summed before a larger score is not scaled down",
        "kvq_runtime/kernels/attend/softmax.py",
        "b_total = b_total * b_fade[None, :] + b_w",
        "b_total = b_total + b_w",
        ("kernels/test_attention_kernel.py",),
        ("kvq_runtime/kernels/softmax.py", "total = total * fade[None, :] + w", "total = total + w"),
    ),
    Mutant(
        "merge-maximum",
        "splits are merged without the largest score: large ones overflow",
        "kvq_runtime/kernels/attend/merge.py",
        'b_top = tl.where(b_top == float("-inf"), 0.0, b_top)',
        'b_top = tl.where(b_top == float("-inf"), 0.0, 0.0 * b_top)',
        ("kernels/test_attention_kernel.py",),
        (
            "kvq_runtime/kernels/merge.py",
            'top = tl.where(top == float("-inf"), 0.0, top)',
            'top = tl.where(top == float("-inf"), 0.0, 0.0 * top)',
        ),
    ),
    Mutant(
        "merge-window",
        "the weights of sinks and window are left out of the sum",
        "kvq_runtime/kernels/attend/merge.py",
        "b_total, b_sums = b_total + b_share, b_sums + b_exact",
        "b_total, b_sums = b_total, b_sums + b_exact",
        ("kernels/test_attention_kernel.py",),
        (
            "kvq_runtime/kernels/merge.py",
            "total, sums = total + share, sums + exact",
            "total, sums = total, sums + exact",
        ),
    ),
    Mutant(
        "unpack-pair",
        "of two codes looked up at once the second is lost in the first",
        "kvq_runtime/kernels/attend/unpack.py",
        "b_index |= codes_int32(b_runs, STREAMS + STREAM, BITS) << BITS",
        "b_index |= codes_int32(b_runs, STREAMS + STREAM, BITS)",
        ("kernels/test_unpack.py", "kernels/test_attention_kernel.py"),
        (
            "kvq_runtime/kernels/unpack.py",
            "code |= integer(parts, STREAMS + STREAM, BITS) << BITS",
            "code |= integer(parts, STREAMS + STREAM, BITS)",
        ),
    ),
    # ---- stages
    Mutant(
        "low-rank",
        "the directions with the least error are kept",
        "kvq_runtime/stages/low_rank.py",
        "vectors_NHDD[..., -self.rank :]",
        "vectors_NHDD[..., : self.rank]",
        ("stages/test_low_rank.py",),
    ),
    Mutant(
        "sparse-rest",
        "outliers leave zeros behind, which stretch the range",
        "kvq_runtime/stages/sparse.py",
        "median.expand(place.shape)",
        "torch.zeros_like(median).expand(place.shape)",
        ("stages/test_sparse.py",),
    ),
    Mutant(
        "escape-wanted",
        "tokens that found no slot are not counted",
        "kvq_runtime/stages/escape.py",
        "wanted = wants_NT.sum(1, keepdim=True)",
        "wanted = (place >= 0).sum(1, keepdim=True)",
        ("stages/test_escape.py",),
    ),
    # ---- artifact
    Mutant(
        "header-gap",
        "bytes between tensors are not looked at",
        "kvq_runtime/artifact/header.py",
        "if begin != end:",
        "if begin < end:",
        ("artifact/test_header.py",),
        ("kvq_runtime/header.py",),
    ),
    Mutant(
        "artifact-content",
        "a changed file loads",
        "kvq_runtime/artifact/artifact.py",
        "if content != stated:",
        "if False:",
        ("artifact/test_artifact.py", "artifact/test_header.py"),
        ("kvq_runtime/artifact.py",),
    ),
    Mutant(
        "artifact-finite",
        "NaN loads",
        "kvq_runtime/artifact/artifact.py",
        "if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):",
        "if False:",
        ("artifact/test_artifact.py", "artifact/test_header.py"),
        ("kvq_runtime/artifact.py",),
    ),
    # ---- registry
    Mutant(
        "rollback-race",
        "a promote between look and rollback is undone in silence",
        "kvq_runtime/registry/registry.py",
        "            _check_unmoved(state, alias, before)\n            return Rollback",
        "            return Rollback",
        ("registry/test_registry.py", "registry/test_publishers.py", "registry/test_hub.py"),
        ("kvq_runtime/registries/changes.py",),
    ),
    Mutant(
        "newest-yanked",
        "a yanked version is the newest",
        "kvq_runtime/registry/events.py",
        "for version in self.versions.values() if version.yanked is None]\n        return max",
        "for version in self.versions.values()]\n        return max",
        ("registry/test_registry.py",),
        ("kvq_runtime/registries/events.py",),
    ),
    Mutant(
        "version-model",
        "another model is no new major version",
        "kvq_runtime/registry/versions.py",
        "if old.schema != new.schema or other_model:",
        "if old.schema != new.schema:",
        ("registry/test_registry.py",),
        ("kvq_runtime/registries/versions.py",),
    ),
    Mutant(
        "replace-sync",
        "a renamed file is not lasting before the next step",
        "kvq_runtime/disk/files.py",
        '    sync(path.parent)\n    faults.point("replace.synced")',
        '    faults.point("replace.synced")',
        ("registry/test_faults.py",),
        ("kvq_runtime/files.py",),
    ),
    Mutant(
        "gc-named",
        "gc removes what a version names",
        "kvq_runtime/registry/local/upkeep.py",
        "if path.name not in named and _older(path, before)]",
        "if _older(path, before)]",
        ("registry/test_upkeep.py",),
        ("kvq_runtime/registries/upkeep.py",),
    ),
    Mutant(
        "gc-young",
        "gc removes a blob that a publish has just written again",
        "kvq_runtime/registry/local/upkeep.py",
        "if not _older(aside, before) or path.name in named_blobs(registry):",
        "if path.name in named_blobs(registry):",
        ("registry/test_upkeep.py", "registry/test_publishers.py"),
        ("kvq_runtime/registries/upkeep.py",),
    ),
    Mutant(
        "hub-patience",
        "a Hub that asks for an hour is waited for",
        "kvq_runtime/registry/hub/client.py",
        "if delay is None or delay > MAX_WAIT or",
        "if delay is None or",
        ("registry/test_hub_network.py",),
        ("kvq_runtime/registries/hub_api.py", "if wait is None or wait > LONGEST or", "if wait is None or"),
    ),
    # ---- calibration
    Mutant(
        "held-out-means",
        "means are fitted on held-out text, too",
        "kvq_calib/run/passes.py",
        "if index < run.plan.fitted_chunks:",
        "if True:",
        RUN,
        ("kvq_calib/chunks.py",),
    ),
    Mutant(
        "held-out-errors",
        "errors are measured on fitted text",
        "kvq_calib/run/passes.py",
        "index >= plan.fitted_chunks or plan.held_out == 0",
        "True",
        RUN,
        ("kvq_calib/chunks.py",),
    ),
    Mutant(
        "fit-sinks",
        "exact sinks are fitted on",
        "kvq_calib/fit/scheme.py",
        "mask = (torch.arange(count * size, device=x.device) >= sinks)",
        "mask = (torch.arange(count * size, device=x.device) >= 0)",
        RUN,
        ("kvq_calib/fit/layer.py",),
    ),
    Mutant(
        "gptq",
        "the error of a rounded group is added where it should be taken away",
        "kvq_calib/fit/predict.py",
        "weight[end:] -= upper[start:end, end:].mT @ errors_KO",
        "weight[end:] += upper[start:end, end:].mT @ errors_KO",
        ("calib/fit/test_fit_predict.py",),
    ),
    Mutant(
        "variance",
        "the mean is left in the variance",
        "kvq_calib/fit/statistics.py",
        'variance = (self.sums["xx"] / count - mean.square()).clamp_min(0)',
        'variance = self.sums["xx"] / count',
        ("calib/fit/test_statistics.py",),
        ("kvq_calib/statistics.py",),
    ),
    Mutant(
        "water-fill",
        "bits go to the channels that gain least",
        "kvq_calib/fit/allocate.py",
        "argsort(descending=True, stable=True)[:budget]",
        "argsort(descending=False, stable=True)[:budget]",
        ("calib/fit/test_allocate.py", "calib/fit/test_basis.py"),
    ),
    Mutant(
        "gate-nan",
        "a figure that is no number passes every bound",
        "kvq_calib/evaluate/gate.py",
        "if not found[name] <= bound",
        "if found[name] > bound",
        ("calib/evaluate/test_held_out.py",),
        ("kvq_calib/gate.py",),
    ),
    Mutant(
        "gate-nothing",
        "an evaluation that has encoded nothing keeps every bound",
        "kvq_calib/evaluate/gate.py",
        "        return [f\"a bound cannot be judged; {'; '.join(measured.reasons(record))}\"]",
        "        return []",
        ("calib/evaluate/test_full.py",),
    ),
    Mutant(
        "full-late",
        "a full encode encodes after the layer has been read",
        "kvq_calib/evaluate/full.py",
        "self.blocks.encoder.flush(layer)",
        "pass",
        ("calib/evaluate/test_full.py",),
    ),
    Mutant(
        "reads-sinks",
        "exact sinks are counted as decoded",
        "kvq_calib/evaluate/reads.py",
        "range(min(self.blocks.recipe.window.sinks, encoded), encoded)",
        "range(encoded)",
        ("calib/evaluate/test_full.py",),
    ),
    Mutant(
        "perplexity-spread",
        "the standard error is too small",
        "kvq_calib/evaluate/perplexity.py",
        "for gap in gaps) / (len(gaps) - 1)",
        "for gap in gaps) / len(gaps)",
        ("calib/evaluate/test_evaluate.py",),
    ),
    Mutant(
        "preflight-disk",
        "a run begins that the disk cannot end",
        "kvq_calib/job.py",
        'if free < needs["disk"]:',
        "if False:",
        ("calib/cli/test_calibrate_cli.py", "calib/model/test_models.py"),
    ),
    Mutant(
        "ledger-settings",
        "numbers of another setting of a recipe are taken again",
        "kvq_calib/evaluate/record.py",
        "json.dumps([subject.sha256, recipe.to_json()], sort_keys=True)",
        "json.dumps([subject.sha256, recipe.name], sort_keys=True)",
        ("calib/evaluate/test_full.py", "calib/evaluate/test_compare.py"),
    ),
]


# ---- trying them


def copied(root: Path, folder: Path) -> Path:
    """The files of a checkout that git knows or would take, in a folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, folder / name)
    return folder


def paths(mutant: Mutant, root: Path) -> list[str]:
    """Its tests in a checkout, whether they lie in rooms or all together."""
    found = [
        next((p for p in (f"tests/{name}", f"tests/{Path(name).name}") if (root / p).exists()), "")
        for name in mutant.tests
    ]
    return list(filter(None, found))


def forked(root: Path, arguments: list[str]) -> tuple[int, str]:
    """pytest's exit code and the end of its output, in a child of this process; 124: it took too long."""
    with tempfile.TemporaryFile() as out:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
                os.chdir(root)
                sys.path[:] = [str(root), *(path for path in sys.path if Path(path) != ROOT)]
                os.environ["PYTHONPATH"] = str(root)
                import pytest

                code = int(pytest.main(arguments))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        end, ended = time.monotonic() + LIMIT, 0
        while not ended and time.monotonic() < end:
            time.sleep(0.05)
            ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        out.seek(0)
        said = out.read().decode(errors="replace")
    return (os.waitstatus_to_exitcode(status) if ended else 124), said


def tried(mutant: Mutant, root: Path, marks: list[str]) -> tuple[str, float, str]:
    """(killed, survived or broken; seconds; the test that noticed)."""
    file, before, after = mutant.place(root)
    text, begun = file.read_text(), time.monotonic()
    file.write_text(text.replace(before, after))
    try:
        options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "-rfE", "-W", REWRITTEN, *marks]
        code, said = forked(root, [*options, *paths(mutant, root)])
    finally:
        file.write_text(text)
    spent = time.monotonic() - begun
    noticed = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if code == 1 and noticed:
        return "killed", spent, noticed[0].split(" - ")[0].partition(" ")[2]
    if code == 124:
        return "killed", spent, f"nothing ended in {LIMIT} s"
    return ("survived" if code == 0 else f"broken ({code})"), spent, "" if code == 0 else said[-300:].replace("\n", " ")


def main() -> int:
    """Try the mutants that are asked for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--suite", choices=SUITES, default="short")
    parser.add_argument("--only", nargs="*", default=[], help="those whose names contain one of these")
    parser.add_argument("--base", type=Path, help="another checkout, tried with all of its tests")
    parser.add_argument("--list", action="store_true", help="print them, and try nothing")
    given = parser.parse_args()
    chosen = [one for one in MUTANTS if not given.only or any(word in one.name for word in given.only)]
    if given.list:
        print(*(f"{one.name:<20} {one.file}: {one.breaks}" for one in chosen), sep="\n")
        return 0
    import scipy.integrate  # noqa: F401
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before transformers imports triton
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.dont_write_bytecode = True
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        root = copied(given.base or ROOT, Path(folder))
        print("| mutant | breaks | result | s | noticed by |\n|---|---|---|---|---|", flush=True)
        for one in chosen:
            result, spent, by = tried(one, root, [] if given.base else SUITES[given.suite])
            survived += result != "killed"
            print(f"| {one.name} | {one.breaks} | {result} | {spent:.0f} | {by} |", flush=True)
    print(f"\n{len(chosen) - survived} of {len(chosen)} killed")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
