"""The real client works against the test Hub, and meets every fault that the Hub can be told to make."""

import io

import pytest
from hub_client import TOKEN, asked, clear
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    hf_hub_download,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

REPO = "org/name"
LARGE = bytes(range(256)) * 4096


@pytest.fixture
def api(hub) -> HfApi:
    api = HfApi(endpoint=hub.url)
    api.create_repo(REPO)
    return api


def add(api: HfApi, parent: str | None = None, **files: bytes) -> str:
    operations = [CommitOperationAdd(name.replace("_", "."), io.BytesIO(data)) for name, data in files.items()]
    return api.create_commit(REPO, operations, commit_message=f"add {list(files)}", parent_commit=parent).oid


def fetch(hub, file: str = "a.safetensors", **more) -> bytes:
    with open(hf_hub_download(REPO, file, endpoint=hub.url, **more), "rb") as found:
        return found.read()


def test_files_large_and_small_come_back(hub, api):
    oid = add(api, a_safetensors=LARGE, notes_txt=b"small")
    assert fetch(hub) == LARGE and fetch(hub, "notes.txt") == b"small"
    assert {"POST /org/name.git/info/lfs/objects/batch", "POST /org/name.git/info/lfs/objects/verify"} <= {*asked(hub)}
    info = api.repo_info(REPO)
    assert info.sha == oid and {file.rfilename for file in info.siblings} >= {"a.safetensors", "notes.txt"}
    (large,) = [file for file in api.list_repo_tree(REPO, expand=True, revision=oid) if file.path == "a.safetensors"]
    assert large.size == large.lfs.size == len(LARGE) and large.last_commit.oid == oid
    before = len(asked(hub))
    add(api, b_safetensors=LARGE)
    assert not [line for line in asked(hub)[before:] if line.startswith("PUT")]  # it is there already


def test_the_token_does_not_follow_to_another_origin(hub, api):
    add(api, a_safetensors=LARGE)
    assert fetch(hub) == LARGE
    cdn = [request for request in hub.requests if request.origin == "cdn"]
    assert cdn and not any(request.authorization for request in cdn)
    assert any(TOKEN in (request.authorization or "") for request in hub.requests)


def test_a_stale_parent_is_refused(api):
    first = api.repo_info(REPO).sha
    second = add(api, first, a_txt=b"1")
    with pytest.raises(HfHubHTTPError) as error:
        add(api, first, b_txt=b"2")
    assert error.value.response.status_code == 412
    assert api.repo_info(REPO).sha == second


def test_lists_are_paged(hub, api):
    for number in range(5):
        add(api, **{f"f{number}_txt": b"%d" % number})
    assert api.list_repo_commits(REPO)[0].title == "add ['f4_txt']"
    assert len(api.list_repo_commits(REPO)) == 6
    assert len(list(api.list_repo_tree(REPO, recursive=True))) == 6
    for number in range(4):
        api.create_repo(f"org/more-{number}")
    assert len(list(api.list_models(author="org"))) == 5
    assert list(api.list_models(author="org", filter="kvq")) == []


def test_tags_and_references(hub, api):
    first = add(api, a_txt=b"1")
    api.create_tag(REPO, tag="v1", revision=first)
    with pytest.raises(HfHubHTTPError, match="exists"):
        api.create_tag(REPO, tag="v1")
    add(api, a_txt=b"2")
    assert fetch(hub, "a.txt", revision="v1") == b"1" and fetch(hub, "a.txt") == b"2"
    assert {tag.name: tag.target_commit for tag in api.list_repo_refs(REPO).tags} == {"v1": first}
    hub.repos[REPO].tags["v1"] = api.repo_info(REPO).sha  # moved
    assert fetch(hub, "a.txt", revision="v1") == b"2"
    api.delete_tag(REPO, tag="v1")
    with pytest.raises(RevisionNotFoundError):
        fetch(hub, "a.txt", revision="v1")
    api.create_commit(REPO, [CommitOperationDelete("a.txt")], commit_message="remove")
    with pytest.raises(RemoteEntryNotFoundError):
        fetch(hub, "a.txt")


def test_a_snapshot_by_commit_asks_nothing_when_warm(hub, api):
    oid = add(api, a_safetensors=LARGE)
    snapshot_download(REPO, revision=oid, endpoint=hub.url)
    hub.requests.clear()
    snapshot_download(REPO, revision=oid, endpoint=hub.url)
    assert asked(hub) == [] and try_to_load_from_cache(REPO, "a.safetensors", revision=oid)


def test_private_and_gated(hub, api, monkeypatch, tmp_path):
    add(api, a_txt=b"1")
    hub.repos[REPO].private = True
    assert fetch(hub, "a.txt", token="hf_reader") == b"1"
    with pytest.raises(HfHubHTTPError, match="403"):
        HfApi(endpoint=hub.url, token="hf_reader").create_commit(
            REPO, [CommitOperationAdd("b.txt", b"1")], commit_message="b"
        )
    monkeypatch.delenv("HF_TOKEN")
    clear(monkeypatch, tmp_path)
    with pytest.raises(RepositoryNotFoundError):
        fetch(hub, "a.txt")
    with pytest.raises(HfHubHTTPError, match="401"):
        fetch(hub, "a.txt", token="hf_unknown")
    hub.repos[REPO].private, hub.repos[REPO].gated = False, True
    with pytest.raises(GatedRepoError):
        fetch(hub, "a.txt", token="hf_reader")


@pytest.mark.parametrize("kind, at", [("short", "GET /lfs"), ("drip", "GET /lfs"), ("reset", "PUT /lfs")])
def test_the_client_lives_through(kind, at, hub, api):
    hub.faults.add(at, kind)
    add(api, a_safetensors=LARGE)
    assert fetch(hub) == LARGE and len(hub.faults.happened) == 1


def test_a_download_that_ends_early_goes_on_where_it_was(hub, api):
    add(api, a_safetensors=LARGE * 24)
    hub.faults.add("GET /lfs", "short")
    assert fetch(hub) == LARGE * 24
    (resumed,) = [request.range for request in hub.requests if request.range]
    assert resumed == f"bytes={10 << 20}-"  # the client writes in pieces of 10 MiB


def test_a_broken_download_is_an_error_and_asked_again_succeeds(hub, api):
    add(api, a_safetensors=LARGE)
    hub.faults.add("GET /lfs", "reset")
    with pytest.raises(Exception, match="reset by peer"):  # the client goes on by itself only after an orderly end
        fetch(hub)
    assert fetch(hub) == LARGE


def test_the_client_does_not_notice_a_flipped_bit(hub, api):
    """Which is why kvq compares digests."""
    add(api, a_safetensors=LARGE)
    hub.faults.add("GET /lfs", "flip")
    assert fetch(hub) != LARGE


@pytest.mark.parametrize("status, headers", [(429, {"Retry_After": "0"}), (500, {}), (503, {})])
def test_statuses(status, headers, hub, api):
    hub.faults.add("POST .*/commit/", "status", status=status, **headers)
    with pytest.raises(HfHubHTTPError) as error:
        add(api, a_txt=b"1")
    assert error.value.response.status_code == status
    add(api, a_txt=b"1")


def test_a_lost_answer_is_a_commit_all_the_same(hub, api):
    hub.faults.add("POST .*/commit/", "lost")
    before = api.repo_info(REPO).sha
    with pytest.raises(Exception, match="disconnected|reset"):
        add(api, a_txt=b"1")
    assert api.repo_info(REPO).sha != before and fetch(hub, "a.txt") == b"1"
