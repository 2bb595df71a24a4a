"""Publish an artifact on a Hugging Face Hub from Python, as a version of a name: `kvq push` does it from a registry."""

from kvq_runtime.artifact import artifact, folder
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.registry.hub.client import Access, using
from kvq_runtime.registry.hub.registry import HubRegistry
from kvq_runtime.registry.reference import HUB, Reference, hub_org, parse


def push_to_hub(
    made: Artifact,
    repo_id: str,
    *,
    version: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
) -> str:
    """Publish an artifact as a version of "org/name", with a card and kvq_config.json; returns "org/name@1.2.0".

    made      what `load_artifact` returned
    repo_id   a model repository, which is made if there is none; one that holds other things is refused
    version   its number; None is the next
    private   whether a repository that is made is private; None is the Hub's default
    token     of the Hub; None is that of huggingface_hub
    The same bytes are published once: their version is returned again. No alias is moved: `kvq promote` does that.
    Raises ValueError for other text, Conflict for a number that is taken or a repository that is used otherwise,
    PermissionError or RuntimeError if the Hub refuses or does not answer.
    """
    target = parse(repo_id)
    if not isinstance(target, Reference) or target.by != "default" or not target.registry:
        raise ValueError(f"push_to_hub to {repo_id!r:.160}; use ORG/NAME, as in my-org/qwen2.5-7b-aqua-2bit")
    org, data = hub_org(target.registry) or "", artifact.to_bytes(made)
    place = f"{org}/{target.name}"
    files = folder.beside(made, data, f"{HUB}{place}")
    with using(Access(token)):
        published = HubRegistry(org, private).publish(target.name, data, version, files)
    return f"{place}@{published.version}"
