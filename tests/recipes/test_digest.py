"""A recipe that was published keeps its name, JSON and bits: artifacts, plans and registries are named by them."""

import hashlib
import json

import pytest

from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import families
from kvq_runtime.store.memory import asymptotic_bits

GEOMETRY = Geometry(layers=4, kv_heads=2, head_size=64)
DIGESTS = {
    "aqua": "6d32e7ab44f2afa4",
    "aqua_klt": "9c8817ea583674c8",
    "aqua_metric": "53296b426108579b",
    "exact": "29bd8f81c83c6a9c",
    "gear": "8377900426814ab9",
    "h2o": "2683093df0e701f0",
    "higgs": "fb5a66229f7e0c17",
    "kivi": "b2deef7a01e10e21",
    "kvquant": "29b9b1aa79a1eb4d",
    "polar": "107c752cdb712434",
    "quarot": "4f1b04f60b270a49",
    "rtn": "081ca7ffabac8e76",
    "squat": "69af89bd6a572993",
    "subkv": "c96853f9588b08bd",
    "svdq": "ef2de99aa5bdb210",
    "turboquant": "b5a6936e2ce73b2d",
    "zipcache": "b118cd4ec70cd3e0",
}


def digest(family: str) -> str:
    """Of all recipes of a family: name, JSON, and bits per element of a model of this geometry."""
    stated = [(one.name, one.to_json(), round(asymptotic_bits(one, GEOMETRY), 9)) for one in families()[family]]
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()[:16]


@pytest.mark.parametrize("family", families())
def test_recipes_stay_what_they_are(family):
    assert digest(family) == DIGESTS[family], "a new recipe may be added to a family, and its digest here; none changed"
