"""Mutants of calibration and evaluation."""

from tests.mutants.mutant import Mutant

FITTED_ON = (
    "calib/run/test_fit_by_hand.py",
    "calib/fit/test_fit_feedback.py",
    "calib/run/test_run.py",
    "calib/run/test_budget_run.py",
)

MUTANTS = [
    # ---- run
    Mutant(
        "held-out-means",
        "means are fitted on held-out text, too",
        "kvq_calib/run/passes.py",
        "if index < run.plan.fitted_chunks:",
        "if True:",
        FITTED_ON,
    ),
    Mutant(
        "held-out-fit",
        "predictions and ranges are fitted on held-out text, too",
        "kvq_calib/run/calibrate.py",
        "run, fitted = work.run, range(work.run.plan.fitted_chunks)",
        "run, fitted = work.run, range(len(work.run.plan.chunks))",
        FITTED_ON,
    ),
    Mutant(
        "held-out-errors",
        "errors are measured on fitted text",
        "kvq_calib/run/passes.py",
        "(plan.held_out == 0 or index >= plan.fitted_chunks)",
        "True",
        FITTED_ON,
    ),
    Mutant(
        "layer-sealed",
        "a finished layer's record lacks the digest of a file",
        "kvq_calib/run/checkpoint.py",
        "digests = _seal(sorted(path for path in partial.iterdir() if path.is_file()))",
        "digests = _seal(sorted(path for path in partial.iterdir() if path.is_file())[1:])",
        (
            "calib/run/test_run.py",
            "calib/run/test_preflight.py",
        ),
    ),
    # ---- fit
    Mutant(
        "fit-sinks",
        "exact sinks are fitted on",
        "kvq_calib/fit/scheme.py",
        "mask = (torch.arange(count * size, device=x.device) >= sinks)",
        "mask = (torch.arange(count * size, device=x.device) >= 0)",
        FITTED_ON,
    ),
    Mutant(
        "fill-sinks",
        "what is encoded in a fit has exact sinks in it",
        "kvq_calib/fit/scheme.py",
        "clamp(min=sinks)[None]",
        "clamp(min=0)[None]",
        FITTED_ON,
    ),
    # ---- run
    Mutant(
        "fit-decoded",
        "predictions are fitted on exact layers below, where they read decoded ones",
        "kvq_calib/run/passes.py",
        "return scheme.predict is not None and scheme.predict.fitted_on_exact",
        "return scheme.predict is not None",
        FITTED_ON,
    ),
    # ---- fit
    Mutant(
        "gptq",
        "the error of a rounded group is added where it should be taken away",
        "kvq_calib/fit/gptq.py",
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
    ),
    Mutant(
        "water-fill",
        "bits go to the channels that gain least",
        "kvq_calib/fit/allocate.py",
        "argsort(descending=True, stable=True)[:budget]",
        "argsort(descending=False, stable=True)[:budget]",
        ("calib/fit/test_allocate.py", "calib/fit/test_basis.py"),
    ),
    # ---- evaluate
    Mutant(
        "gate-nan",
        "a figure that is no number passes every bound",
        "kvq_calib/evaluate/gate.py",
        "if not found[name] <= bound",
        "if found[name] > bound",
        ("calib/evaluate/test_held_out.py",),
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
        "ledger-code",
        "what was measured by older code is taken again",
        "kvq_calib/evaluate/record.py",
        "environment=used, code=code())",
        "environment=used)",
        ("calib/evaluate/test_full.py",),
    ),
    # ---- job
    Mutant(
        "preflight-disk",
        "a run begins that the disk cannot end",
        "kvq_calib/job.py",
        'if free < needs["disk"]:',
        "if False:",
        ("calib/run/test_preflight.py", "calib/cli/test_calibrate_cli.py", "calib/model/test_models.py"),
    ),
    Mutant(
        "preflight-memory",
        "a run begins that memory cannot hold a layer of",
        "kvq_calib/job.py",
        'if memory < needs["layer"] + needs["chunk"]:',
        "if False:",
        ("calib/run/test_preflight.py", "calib/cli/test_calibrate_cli.py", "calib/model/test_models.py"),
    ),
    # ---- evaluate
    Mutant(
        "ledger-settings",
        "numbers of another setting of a recipe are taken again",
        "kvq_calib/evaluate/record.py",
        "json.dumps([subject.sha256, recipe.to_json()], sort_keys=True)",
        "json.dumps([subject.sha256, recipe.name], sort_keys=True)",
        ("calib/evaluate/test_full.py", "calib/evaluate/test_compare.py"),
    ),
]
