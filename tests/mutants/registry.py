"""Mutants of what happens to a file: disk, artifact, registry."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    # ---- artifact
    Mutant(
        "header-gap",
        "bytes between tensors are not looked at",
        "kvq_runtime/artifact/header.py",
        "if begin != end:",
        "if begin < end:",
        ("artifact/test_header.py",),
    ),
    Mutant(
        "artifact-content",
        "a changed file loads",
        "kvq_runtime/artifact/artifact.py",
        "if content != stated:",
        "if False:",
        ("artifact/test_artifact.py", "artifact/test_header.py"),
    ),
    Mutant(
        "artifact-finite",
        "NaN loads",
        "kvq_runtime/artifact/artifact.py",
        "if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):",
        "if False:",
        ("artifact/test_artifact.py", "artifact/test_header.py"),
    ),
    # ---- registry
    Mutant(
        "rollback-race",
        "a promote between look and rollback is undone in silence",
        "kvq_runtime/registry/registry.py",
        "            _check_unmoved(state, alias, before)\n            return Rollback",
        "            return Rollback",
        (
            "registry/test_overtaken.py",
            "registry/test_registry.py",
            "registry/test_publishers.py",
            "registry/test_hub.py",
        ),
    ),
    Mutant(
        "newest-yanked",
        "a yanked version is the newest",
        "kvq_runtime/registry/events.py",
        "for version in self.versions.values() if version.yanked is None]\n        return max",
        "for version in self.versions.values()]\n        return max",
        ("registry/test_registry.py",),
    ),
    Mutant(
        "version-model",
        "another model is no new major version",
        "kvq_runtime/registry/versions.py",
        "if old.schema != new.schema or other_model:",
        "if old.schema != new.schema:",
        ("registry/test_registry.py",),
    ),
    # ---- disk
    Mutant(
        "replace-sync",
        "a renamed file is not lasting before the next step",
        "kvq_runtime/disk/files.py",
        '    sync(path.parent)\n    faults.point("replace.synced")',
        '    faults.point("replace.synced")',
        ("registry/test_faults.py",),
    ),
    # ---- registry
    Mutant(
        "gc-named",
        "gc removes what a version names",
        "kvq_runtime/registry/local/upkeep.py",
        "if path.name not in named and _older(path, before)]",
        "if _older(path, before)]",
        ("registry/test_upkeep.py",),
    ),
    Mutant(
        "gc-young",
        "gc removes a blob that a publish has just written again",
        "kvq_runtime/registry/local/upkeep.py",
        "if not _older(aside, before) or path.name in named_blobs(registry):",
        "if path.name in named_blobs(registry):",
        ("registry/test_overtaken.py", "registry/test_upkeep.py", "registry/test_publishers.py"),
    ),
    Mutant(
        "publish-again",
        "a blob that gc took before the event that names it is not written again",
        "kvq_runtime/registry/local/registry.py",
        "if not self.blob(hash_of(content).hexdigest()).exists():",
        "if False:",
        ("registry/test_overtaken.py", "registry/test_upkeep.py", "registry/test_publishers.py"),
    ),
    Mutant(
        "hub-gc-parent",
        "gc on a Hub deletes a file that a publish has just named",
        "kvq_runtime/registry/hub/upkeep.py",
        'commit_message="remove unnamed files", parent_commit=head.commit)',
        'commit_message="remove unnamed files")',
        ("registry/test_overtaken.py", "registry/test_hub_damage.py"),
    ),
    Mutant(
        "hub-patience",
        "a Hub that asks for an hour is waited for",
        "kvq_runtime/registry/hub/client.py",
        "if delay is None or delay > MAX_WAIT or",
        "if delay is None or",
        ("registry/test_overtaken.py", "registry/test_hub_network.py"),
    ),
]
