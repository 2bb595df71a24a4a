"""Say once what the parameters of the flows mean; Prefect shows it beside each of them."""

from typing import Annotated, Any

from pydantic import Field


def _said(description: str, **bounds: Any) -> Any:
    """A field's description where Prefect 3.8 keeps it: `Field(description=...)` it replaces by the docstring's."""
    return Field(json_schema_extra={"description": description}, **bounds)


Model = Annotated[str, _said("A name of `kvq-calibrate --list-models`, a folder, or org/name on the Hub")]
Models = Annotated[list[str], _said("Models, one after the other: catalog names, folders, Hub ids")]
Revision = Annotated[str | None, _said("Commit, tag or branch of a Hub model")]
Recipes = Annotated[list[str], _said("Recipes to fit, all in one pass over the model: `kvq recipes`")]
Bits = Annotated[list[float], _said("For the recipe `auto`: bits per element, an artifact for each")]
Corpus = Annotated[
    str | None,
    _said(".txt, .jsonl(.gz, .zst), .parquet, or org/name[:config][@revision]; empty: the model's"),
]
Samples = Annotated[int | None, _said("Sequences, held-out ones included; empty: the model's", ge=2)]
Length = Annotated[int | None, _said("Tokens per sequence; empty: the model's", ge=2)]
Seed = Annotated[int, _said("Of the choice of text; the same seed gives the same artifact, bit for bit")]
Device = Annotated[str, _said("cpu, cuda, cuda:1")]
Registry = Annotated[str | None, _said("file:///folder or hf://org; empty: $KVQ_REGISTRY, else $KVQ_HOME/registry")]
Push = Annotated[str | None, _said("Publish to this registry as well: hf://org")]
Name = Annotated[str | None, _said("Of the artifact; empty: MODEL-RECIPE")]
Version = Annotated[str | None, _said("1.2.0; empty: the next number")]
Windows = Annotated[int | None, _said("Windows of held-out text to measure on; empty: few", ge=1)]
Baselines = Annotated[list[str], _said("Measured beside: unfitted recipes, or artifacts")]
PerplexityRatio = Annotated[
    float | None, _said("Allowed at most: perplexity over that of 16 bit; empty: no bound", gt=0)
]
Divergence = Annotated[
    float | None, _said("Allowed at most: KL divergence from 16 bit, nats per token; empty: no bound", gt=0)
]
TimeoutHours = Annotated[
    float, _said("Hours after which a model's run fails; its retry goes on where it stopped", gt=0)
]
Artifacts = Annotated[list[str], _said("Names in the registry, all of one model")]
Alias = Annotated[str, _said("The alias whose version is in use")]
Promote = Annotated[bool, _said("Measure the newest version too, and point the alias to it if it keeps the bounds")]
WeekSeed = Annotated[int | None, _said("Of the choice of text; empty: another one every week")]
