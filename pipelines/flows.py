"""The flows of `flows.yaml`: calibrate one model on demand, or a list of them every night; look for drift every week.

Every parameter is explained once, by its type; Prefect shows that beside it.
"""

from datetime import UTC, datetime
from typing import Annotated, Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import State
from pydantic import Field

from kvq_calib.evaluate import held_out
from kvq_calib.flow.flow import calibrated, failed
from kvq_calib.job.job import Job
from kvq_calib.model import catalog
from kvq_runtime.cli.table import percent
from kvq_runtime.registry.rating import Bounds, Refused
from kvq_runtime.registry.reference import PRODUCTION

DRIFTED = "Drifted"  # the name of the state, and so of the event prefect.flow-run.Drifted


def _about(description: str, **bounds: Any) -> Any:
    """A field's description where Prefect 3.8 keeps it: `Field(description=...)` it replaces by the docstring's."""
    return Field(json_schema_extra={"description": description}, **bounds)


Model = Annotated[str, _about("A name of `kvq-calibrate --list-models`, a folder, or org/name on the Hub")]
Models = Annotated[list[str], _about("Models, one after the other: catalog names, folders, Hub ids")]
Revision = Annotated[str | None, _about("Commit, tag or branch of a Hub model")]
Recipes = Annotated[list[str], _about("Recipes to fit, all in one pass over the model: `kvq recipes`")]
Bits = Annotated[list[float], _about("For the recipe `auto`: bits per element, an artifact for each")]
Corpus = Annotated[
    str | None, _about(".txt, .jsonl(.gz, .zst), .parquet, or org/name[:config][@revision]; empty: the model's")
]
Samples = Annotated[int | None, _about("Sequences, held-out ones included; empty: the model's", ge=2)]
Length = Annotated[int | None, _about("Tokens per sequence; empty: the model's", ge=2)]
Seed = Annotated[int, _about("Of the choice of text; the same seed gives the same artifact, bit for bit")]
Device = Annotated[str, _about("cpu, cuda, cuda:1")]
CheckpointEvery = Annotated[
    float | None, _about("Seconds between two checkpoints of what memory holds; 0: each layer is one; empty: 300", ge=0)
]
Registry = Annotated[str | None, _about("file:///folder or hf://org; empty: $KVQ_REGISTRY, else $KVQ_HOME/registry")]
Push = Annotated[str | None, _about("Publish to this registry as well: hf://org")]
Name = Annotated[str | None, _about("Of the artifact; empty: MODEL-RECIPE")]
Version = Annotated[str | None, _about("1.2.0; empty: the next number")]
Windows = Annotated[int | None, _about("Windows of held-out text to measure on; empty: few", ge=1)]
Also = Annotated[
    list[str] | None, _about("Texts of other kinds to measure on too, NAME=SOURCE; [none]: none; empty: the model's")
]
Baselines = Annotated[list[str], _about("Measured beside: unfitted recipes, or artifacts")]
PerplexityRatio = Annotated[
    float | None, _about("Allowed at most: perplexity of a full encode over that of 16 bit; empty: no bound", gt=0)
]
Divergence = Annotated[
    float | None,
    _about("Allowed at most: KL divergence of a full encode from 16 bit, nats per token; empty: no bound", gt=0),
]
Beyond = Annotated[
    float | None,
    _about(
        "Allowed at most: share of blocks with errors beyond 99.9% of calibration's; empty: no bound",
        ge=0,
        le=1,
    ),
]
TimeoutHours = Annotated[
    float, _about("Hours after which a model's run fails; its retry goes on where it stopped", gt=0)
]
Artifacts = Annotated[list[str], _about("Names in the registry, all of one model")]
Alias = Annotated[str, _about("The alias whose version is in use")]
Promote = Annotated[bool, _about("Measure the newest version too, and point the alias to it if it keeps the bounds")]
WeekSeed = Annotated[int | None, _about("Of the choice of text; empty: another one every week")]


@flow(name="on-demand", flow_run_name="{model}", persist_result=False)
def on_demand(
    model: Model,
    recipes: Recipes = ["aqua-2bit"],  # noqa: B006  (Prefect shows it, and nothing changes it)
    bits: Bits = [],  # noqa: B006
    revision: Revision = None,
    corpus: Corpus = None,
    samples: Samples = None,
    seq_len: Length = None,
    seed: Seed = 0,
    device: Device = "cpu",
    checkpoint_every: CheckpointEvery = None,
    registry: Registry = None,
    push: Push = None,
    name: Name = None,
    version: Version = None,
    eval_windows: Windows = None,
    also: Also = None,
    baselines: Baselines = [],  # noqa: B006
    max_perplexity_ratio: PerplexityRatio = None,
    max_kl: Divergence = None,
    max_beyond: Beyond = None,
    timeout_hours: TimeoutHours = 24,
) -> list[dict] | State:
    """Fit, measure, publish. An artifact that does not keep the bounds is not published, and the run fails with why."""
    settings = {name: value for name, value in locals().items() if name != "timeout_hours"}
    try:
        done = calibrated(Job.from_settings(**settings), 3600 * timeout_hours)
    except Refused as refused:  # no fault of the code: without its traceback
        return failed(str(refused), data=refused)
    return [artifact.record() for artifact in done]


@flow(name="nightly", persist_result=False)
def nightly(
    models: Models,
    recipes: Recipes = ["aqua-2bit"],  # noqa: B006  (Prefect shows it, and nothing changes it)
    corpus: Corpus = None,
    samples: Samples = None,
    seq_len: Length = None,
    seed: Seed = 0,
    device: Device = "cpu",
    checkpoint_every: CheckpointEvery = None,
    registry: Registry = None,
    push: Push = None,
    eval_windows: Windows = None,
    also: Also = None,
    max_perplexity_ratio: PerplexityRatio = None,
    max_kl: Divergence = None,
    max_beyond: Beyond = None,
    timeout_hours: TimeoutHours = 8,
) -> list[dict] | State:
    """Fit, measure and publish each model in turn, every recipe of it.

    Where nothing changed (code, model, text, settings) the bytes are the same, and so is the version: a quiet night
    publishes nothing. One model's failure does not keep the next from its turn; the run then fails with all reasons.
    Names that can mean no model are told at its beginning.
    """
    settings = {name: value for name, value in locals().items() if name not in ("models", "timeout_hours")}
    rows, reasons, known = [], [], []
    for model in models:
        try:
            catalog.check(model)
            known.append(model)
        except ValueError as error:
            reasons.append(f"{model}: {error}")
    if reasons:
        get_run_logger().error("; ".join(reasons))
    for model in known:
        try:
            done = calibrated(Job.from_settings(model=model, **settings), 3600 * timeout_hours)
            rows += [artifact.record() for artifact in done]
        except Exception as error:  # whatever it was, the next model gets its turn
            reasons.append(f"{model}: {error}")
    return failed("; ".join(reasons)) if reasons else rows


check = task(name="measure", cache_policy=NO_CACHE, persist_result=False)(held_out.check_drift)


@flow(name="drift", flow_run_name="{model}", persist_result=False)
def drift(
    artifacts: Artifacts,
    model: Model,
    corpus: Corpus,
    windows: Windows = 16,
    length: Length = None,
    seed: WeekSeed = None,
    alias: Alias = PRODUCTION,
    promote: Promote = False,
    device: Device = "cpu",
    registry: Registry = None,
    max_perplexity_ratio: PerplexityRatio = 1.05,
    max_kl: Divergence = None,
    max_beyond: Beyond = None,
) -> list[str] | State:
    """Measure published versions on fresh text; their records go to the registry. The run ends as Drifted, and promotes
    nothing, where one is too bad."""
    text_seed = held_out.week(datetime.now(UTC).date()) if seed is None else seed
    bounds = Bounds(max_perplexity_ratio, max_kl, max_beyond)
    checked = check(
        artifacts, model, corpus or "demo", bounds, text_seed, windows or 16, length, alias, promote, device, registry
    )
    rows = [
        {
            "artifact": result.artifact,
            "perplexity": "not measured" if result.perplexity is None else percent(result.perplexity - 1),
            "protocol": result.protocol,
            "KL": result.kl,
            "failed": "; ".join(result.failed),
            "promoted": result.promoted,
        }
        for result in checked
    ]
    create_table_artifact(rows, key="kvq-drift", description=f"{model} on {corpus}, seed {text_seed}")
    drifted = [f"{result.artifact} has drifted. {reason}" for result in checked for reason in result.failed]
    if drifted:
        return failed("; ".join(drifted), name=DRIFTED)
    return [result.artifact for result in checked]
