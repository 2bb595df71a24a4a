"""Explain the parameters of the flows once; Prefect shows it beside each of them."""

from typing import Annotated, Any

from pydantic import Field


def _about(description: str, **bounds: Any) -> Any:
    """A field's description where Prefect 3.8 keeps it: `Field(description=...)` it replaces by the docstring's."""
    return Field(json_schema_extra={"description": description}, **bounds)


Model = Annotated[str, _about("A name of `kvq-calibrate --list-models`, a folder, or org/name on the Hub")]
Models = Annotated[list[str], _about("Models, one after the other: catalog names, folders, Hub ids")]
Revision = Annotated[str | None, _about("Commit, tag or branch of a Hub model")]
Recipes = Annotated[list[str], _about("Recipes to fit, all in one pass over the model: `kvq recipes`")]
Bits = Annotated[list[float], _about("For the recipes `auto` and `auto-vocab`: bits per element, an artifact for each")]
Corpus = Annotated[
    str | None,
    _about(".txt, .jsonl(.gz, .zst), .parquet, or org/name[:config][@revision]; empty: the model's"),
]
Samples = Annotated[int | None, _about("Sequences, held-out ones included; empty: the model's", ge=2)]
Length = Annotated[int | None, _about("Tokens per sequence; empty: the model's", ge=2)]
Seed = Annotated[int, _about("Of the choice of text; the same seed gives the same artifact, bit for bit")]
Device = Annotated[str, _about("cpu, cuda, cuda:1")]
CheckpointEvery = Annotated[
    float | None,
    _about("Seconds between two checkpoints of what memory holds; 0: each layer is one; empty: 300", ge=0),
]
Registry = Annotated[str | None, _about("file:///folder or hf://org; empty: $KVQ_REGISTRY, else $KVQ_HOME/registry")]
Push = Annotated[str | None, _about("Publish to this registry as well: hf://org")]
Name = Annotated[str | None, _about("Of the artifact; empty: MODEL-RECIPE")]
Version = Annotated[str | None, _about("1.2.0; empty: the next number")]
Windows = Annotated[int | None, _about("Windows of held-out text to measure on; empty: few", ge=1)]
Also = Annotated[
    list[str] | None,
    _about("Texts of other kinds to measure on too, NAME=SOURCE; [none]: none; empty: the model's"),
]
Baselines = Annotated[list[str], _about("Measured beside: unfitted recipes, or artifacts")]
PerplexityRatio = Annotated[
    float | None, _about("Allowed at most: perplexity of a full encode over that of 16 bit; empty: no bound", gt=0)
]
Divergence = Annotated[
    float | None,
    _about("Allowed at most: KL divergence of a full encode from 16 bit, nats per token; empty: no bound", gt=0),
]
TimeoutHours = Annotated[
    float, _about("Hours after which a model's run fails; its retry goes on where it stopped", gt=0)
]
Artifacts = Annotated[list[str], _about("Names in the registry, all of one model")]
Alias = Annotated[str, _about("The alias whose version is in use")]
Promote = Annotated[bool, _about("Measure the newest version too, and point the alias to it if it keeps the bounds")]
WeekSeed = Annotated[int | None, _about("Of the choice of text; empty: another one every week")]
