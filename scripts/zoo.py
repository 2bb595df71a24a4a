"""Put fitted artifacts into the registry `artifacts/zoo`, with cards that have the losses of all texts.

    python -m scripts.zoo artifacts/zoo REGISTRY FOLDER NAME ...    newest versions of REGISTRY; FOLDER: of their model

Published are the artifact, its records of `kvq eval` on TEXTS, and a card that has them beside BESIDE's, which are of
`benchmarks/results/real/losses.jsonl`; the version becomes `production`. Begin with no folder: old versions would stay.
"""

import json
import sys
from pathlib import Path

from benchmarks.losses import LOSSES, TEXTS
from kvq_calib.report import card
from kvq_runtime.artifact import artifact
from kvq_runtime.registry.evaluation_records import parse
from kvq_runtime.registry.resolve import open_registry

BESIDE = "kivi-4bit"


def main(target: Path, source: str, folder: Path, *names: str) -> None:
    """Publish each name."""
    lines = list(map(json.loads, LOSSES.read_text().splitlines()))
    fitted, zoo = open_registry(source), open_registry(str(target))
    for name in names:
        state = fitted.state(name)
        version = state.versions[max(state.versions)]
        data = Path(fitted.fetch(name, version)).read_bytes()
        own = [one for one in fitted.evaluations(version.sha256, name) if one["protocol"]["text"]["source"] in TEXTS]
        model = own[0]["protocol"]["model"]
        beside = [one for one in lines if one["result"]["recipe"] == BESIDE and one["protocol"]["model"] == model]
        records = sorted(own, key=lambda one: list(TEXTS).index(one["protocol"]["text"]["source"])) + beside
        text = card.card(artifact.from_bytes(data), list(map(parse, records)), name, card.license_of(folder))
        made = zoo.publish(name, data, None, {"README.md": text.encode()})
        for one in own:
            zoo.add_evaluation(one, name)
        zoo.promote(name, made.version)
        print(f"{name}: {len(data) / 1e6:.1f} MB, {len(own)} texts")


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
