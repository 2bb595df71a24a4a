"""Offer a model the artifact that was fitted to the model it was fine-tuned from.

Weights differ, shapes and RoPE do not: what the artifact costs on the fine-tune is measured before anything is fitted,
and within the job's bounds it is published with the fine-tune's fingerprint, its tensors and what its fit measured as
they were.
"""

import hashlib
import warnings
from dataclasses import replace

from kvq_calib.model.files import ModelFiles
from kvq_runtime.artifact import artifact, fingerprint
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.registry.resolve import load_artifact


def found(reference: str, registry: str | None, files: ModelFiles) -> Artifact:
    """The artifact that a reference means. ValueError for one of models of another shape."""
    made = load_artifact(reference, registry)
    if made.fingerprint.geometry != files.geometry:
        raise ValueError(
            f"--reuse {reference} was fitted to {made.fingerprint.geometry}, and {files.id} has {files.geometry}; "
            "give an artifact of the model it was fine-tuned from"
        )
    return made


def offered(reference: str, registry: str | None, files: ModelFiles) -> Artifact:
    """The same as an artifact of this model. ArtifactError if more than the weights differs."""
    base = found(reference, registry, files)
    own = files.fingerprint()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the weights differ is what is asked
        fingerprint.check_match(base.fingerprint, own, allow_other_weights=True)
    given = base.provenance
    source = {
        "artifact": reference.rstrip("/").rpartition("/")[2],
        "sha256": hashlib.sha256(artifact.to_bytes(base)).hexdigest(),
        "model": given.get("model"),
        "revision": given.get("revision"),
    }
    about = {name: said for name, said in given.items() if name not in ("quantization", "loader")}
    return replace(base, fingerprint=own, provenance=about | files.provenance | {"reused": source})
