"""Tests of the API server that the driver is tested against: through the real client, as any cluster would be."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from kubernetes import client, watch

from tests.integration.kubernetes_api import KubernetesApi, selects
from tests.integration.support import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

ask = asyncio.to_thread
"""The client blocks, so it is called in a thread."""


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    server = KubernetesApi()
    server.second_s = 0.3
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def connection(api: KubernetesApi) -> client.ApiClient:
    configuration = client.Configuration()
    configuration.host = api.url
    return client.ApiClient(configuration)


@pytest.fixture
def pods(connection: client.ApiClient) -> client.CoreV1Api:
    return client.CoreV1Api(connection)


@pytest.fixture
def jobs(connection: client.ApiClient) -> client.BatchV1Api:
    return client.BatchV1Api(connection)


def pod(name: str = "p", image: str = "any", labels: dict[str, str] | None = None, **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": labels or {}, **metadata},
        "spec": {"containers": [{"name": "m", "image": image}]},
    }


def job(name: str = "j", image: str = "any", **spec: Any) -> dict[str, Any]:
    template = {"metadata": {"labels": {"of": name}}, "spec": {**pod(image=image)["spec"], "restartPolicy": "Never"}}
    return {"metadata": {"name": name}, "spec": {"template": template, **spec}}


async def fails(status: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the reason of an answer that has this status."""
    with pytest.raises(client.ApiException) as caught:
        await ask(function, *args, **kwargs)
    assert caught.value.status == status
    return str(caught.value.body)


# --- objects ----------------------------------------------------------------------------------------------------------


async def test_create_get_list_delete(pods: client.CoreV1Api) -> None:
    """An object exists from its creation to its deletion; each creation gives a new uid."""
    made = await ask(pods.create_namespaced_pod, "default", pod())
    read = await ask(pods.read_namespaced_pod, "p", "default")
    assert read.metadata.uid == made.metadata.uid
    assert "AlreadyExists" in await fails(409, pods.create_namespaced_pod, "default", pod())
    await ask(pods.delete_namespaced_pod, "p", "default", grace_period_seconds=0)
    assert "NotFound" in await fails(404, pods.read_namespaced_pod, "p", "default")
    await fails(404, pods.delete_namespaced_pod, "p", "default")
    again = await ask(pods.create_namespaced_pod, "default", pod())
    assert again.metadata.uid != made.metadata.uid
    assert int(again.metadata.resource_version) > int(made.metadata.resource_version)


async def test_names_are_generated(pods: client.CoreV1Api) -> None:
    """generateName gives a new name each time."""
    body = pod(generateName="p-")
    del body["metadata"]["name"]
    names = {(await ask(pods.create_namespaced_pod, "default", body)).metadata.name for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("p-") for name in names)


async def test_namespaces_are_apart(pods: client.CoreV1Api) -> None:
    """The same name may exist in each namespace."""
    for namespace in ("a", "b"):
        await ask(pods.create_namespaced_pod, namespace, pod())
    assert len((await ask(pods.list_namespaced_pod, "a")).items) == 1


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("", "abc"),
        ("k", "ab"),
        ("!k", "c"),
        ("k=1", "a"),
        ("k==1", "a"),
        ("k!=1", "bc"),
        ("k in (1, 2)", "ab"),
        ("k notin (1,3)", "bc"),
        ("k,l=x", "b"),
        ("k in (1,2),!l", "a"),
    ],
)
async def test_label_selectors_choose_objects(pods: client.CoreV1Api, selector: str, names: str) -> None:
    """Selectors are equality, sets, existence, and combinations."""
    for name, labels in (("a", {"k": "1"}), ("b", {"k": "2", "l": "x"}), ("c", {})):
        await ask(pods.create_namespaced_pod, "default", pod(name, labels=labels))
    listed = await ask(pods.list_namespaced_pod, "default", label_selector=selector)
    assert "".join(each.metadata.name for each in listed.items) == names


async def test_field_selectors_choose_objects(pods: client.CoreV1Api) -> None:
    """A field selector finds one object by its name."""
    for name in "ab":
        await ask(pods.create_namespaced_pod, "default", pod(name))
    listed = await ask(pods.list_namespaced_pod, "default", field_selector="metadata.name=b")
    assert [each.metadata.name for each in listed.items] == ["b"]
    assert selects(pod("a"), "", "metadata.name!=b")


async def test_a_list_in_pages_is_of_one_moment(api: KubernetesApi, pods: client.CoreV1Api) -> None:
    """Pages of one list show the state at its beginning; a list whose history is gone must be restarted."""
    for name in "abcde":
        await ask(pods.create_namespaced_pod, "default", pod(name))
    page = await ask(pods.list_namespaced_pod, "default", limit=2)
    api.delete("pods", "e", {"gracePeriodSeconds": 0})
    names = [each.metadata.name for each in page.items]
    version = page.metadata.resource_version
    while token := page.metadata._continue:
        page = await ask(pods.list_namespaced_pod, "default", limit=2, _continue=token)
        names += [each.metadata.name for each in page.items]
        assert page.metadata.resource_version == version
    assert names == list("abcde")
    page = await ask(pods.list_namespaced_pod, "default", limit=2)
    api.compact()
    assert "Expired" in await fails(
        410, pods.list_namespaced_pod, "default", limit=2, _continue=page.metadata._continue
    )


async def test_a_stale_update_is_a_conflict(pods: client.CoreV1Api) -> None:
    """Of two updates that read the same version, only the first succeeds."""
    await ask(pods.create_namespaced_pod, "default", pod())
    await until_ready(pods)
    first, second = [await ask(pods.read_namespaced_pod, "p", "default") for _ in range(2)]
    first.metadata.labels = {"by": "first"}
    await ask(pods.replace_namespaced_pod, "p", "default", first)
    second.metadata.labels = {"by": "second"}
    assert "modified" in await fails(409, pods.replace_namespaced_pod, "p", "default", second)
    await ask(pods.patch_namespaced_pod, "p", "default", {"metadata": {"labels": {"by": None, "new": "1"}}})
    assert (await ask(pods.read_namespaced_pod, "p", "default")).metadata.labels == {"new": "1"}


async def until_ready(pods: client.CoreV1Api, name: str = "p") -> Any:
    while True:
        read = await ask(pods.read_namespaced_pod, name, "default")
        if any(each.type == "Ready" and each.status == "True" for each in read.status.conditions or ()):
            return read


async def test_invalid_object_is_not_stored(api: KubernetesApi, pods: client.CoreV1Api) -> None:
    """Names and labels have restricted alphabets."""
    assert "RFC 1123" in await fails(422, pods.create_namespaced_pod, "default", pod("Not_A_Name"))
    assert "labels" in await fails(422, pods.create_namespaced_pod, "default", pod(labels={"k": "a b"}))
    assert "labels" in await fails(422, pods.create_namespaced_pod, "default", pod(labels={"k": "a" * 64}))
    assert not api.objects


async def test_rights_and_quotas_are_enforced(api: KubernetesApi, pods: client.CoreV1Api) -> None:
    """Forbidden requests and those above a quota get 403; requests are counted either way."""
    api.quota["pods"] = 0
    assert "exceeded quota" in await fails(403, pods.create_namespaced_pod, "default", pod())
    api.rights = {("", "pods", "list")}
    assert "cannot create" in await fails(403, pods.create_namespaced_pod, "default", pod())
    await ask(pods.list_namespaced_pod, "default")
    assert api.requests == {("", "pods", "create"): 2, ("", "pods", "list"): 1}


# --- deletion ---------------------------------------------------------------------------------------------------------


async def test_a_precondition_that_is_not_met(pods: client.CoreV1Api) -> None:
    """A request for another object than the existing one is a conflict."""
    made = await ask(pods.create_namespaced_pod, "default", pod())
    other = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid="other"))
    assert "precondition" in await fails(409, pods.delete_namespaced_pod, "p", "default", body=other)
    same = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=made.metadata.uid))
    await ask(pods.delete_namespaced_pod, "p", "default", body=same)


async def test_a_pod_has_its_grace(api: KubernetesApi, pods: client.CoreV1Api) -> None:
    """A running pod is marked first, and gone when it has stopped or its grace is over."""
    api.behave("any", stops_at_once=False)
    await ask(pods.create_namespaced_pod, "default", pod())
    await until_ready(pods)
    marked = await ask(pods.delete_namespaced_pod, "p", "default")
    assert marked.metadata.deletion_timestamp is not None
    assert marked.metadata.deletion_grace_period_seconds == 30
    api.pass_time(29)
    await asyncio.sleep(0.01)
    assert api.has("pods", "p")
    api.pass_time(1)
    await until(lambda: not api.objects)


async def test_finalizers_keep_an_object(api: KubernetesApi, jobs: client.BatchV1Api) -> None:
    """It stays, marked, until its finalizers are removed; a second deletion changes nothing."""
    body = job()
    body["metadata"]["finalizers"] = ["example.org/f"]
    await ask(jobs.create_namespaced_job, "default", body)
    for _ in range(2):
        await ask(jobs.delete_namespaced_job, "j", "default", propagation_policy="Background")
    assert api.get("jobs", "j")["metadata"]["deletionTimestamp"]
    await ask(jobs.patch_namespaced_job, "j", "default", {"metadata": {"finalizers": None}})
    await until(lambda: not api.objects)


@pytest.mark.parametrize("policy", ["Background", "Foreground", "Orphan"])
async def test_dependents_go_with_their_owner(api: KubernetesApi, jobs: client.BatchV1Api, policy: str) -> None:
    """Dependents are removed after their owner or before it, or stay."""
    await ask(jobs.create_namespaced_job, "default", job())
    await until(lambda: api.all_of("pods"))
    api.behave("any", stops_at_once=False)
    await until(lambda: "podIP" in api.all_of("pods")[0]["status"])
    await ask(jobs.delete_namespaced_job, "j", "default", propagation_policy=policy)
    await asyncio.sleep(0.02)
    assert api.has("jobs", "j") == (policy == "Foreground")
    await until(lambda: len(api.all_of("pods")) == 1)
    [dependent] = api.all_of("pods")
    assert ("deletionTimestamp" in dependent["metadata"]) == (policy != "Orphan")
    api.pass_time(30)
    if policy != "Orphan":
        await until(lambda: not api.objects)
    else:
        assert not dependent["metadata"]["ownerReferences"]


async def test_garbage_is_what_has_no_owner_left(api: KubernetesApi, pods: client.CoreV1Api) -> None:
    """An object with two owners goes with the second of them."""
    owners = [await ask(pods.create_namespaced_pod, "default", pod(name)) for name in "ab"]
    references = [
        {"apiVersion": "v1", "kind": "Pod", "name": each.metadata.name, "uid": each.metadata.uid} for each in owners
    ]
    await ask(pods.create_namespaced_pod, "default", pod("c", ownerReferences=references))
    api.delete("pods", "a", {"gracePeriodSeconds": 0})
    await asyncio.sleep(0.01)
    assert api.has("pods", "c")
    api.delete("pods", "b", {"gracePeriodSeconds": 0})
    await until(lambda: not api.objects)


# --- watches ----------------------------------------------------------------------------------------------------------


def watched(pods: client.CoreV1Api, version: str, **options: Any) -> list[tuple[str, str]]:
    """Return type and name of the events of one watch; in a thread."""
    options = {"timeout_seconds": 1, **options}
    response = pods.list_namespaced_pod(
        "default", watch=True, resource_version=version, _preload_content=False, **options
    )
    lines = watch.watch.iter_resp_lines(response)
    events = [client.ApiClient().deserialize(_Text(line), "object") for line in lines if line.strip()]
    return [(event["type"], event["object"].get("metadata", {}).get("name", "")) for event in events]


class _Text:
    def __init__(self, data: str) -> None:
        self.data = data


async def test_a_watch_tells_what_happened_since_its_version(api: KubernetesApi, pods: client.CoreV1Api) -> None:
    """Events come in order from the list's version on, before and after its opening, until timeoutSeconds are over."""
    api.behave("any", has_room=False)
    api.create("pods", pod("before"))
    await until(lambda: "conditions" in api.get("pods", "before")["status"])
    version = (await ask(pods.list_namespaced_pod, "default")).metadata.resource_version
    api.delete("pods", "before")
    task = asyncio.create_task(ask(watched, pods, version))
    await until(lambda: api.watchers)
    api.create("pods", pod("new"))
    assert await task == [("DELETED", "before"), ("ADDED", "new"), ("MODIFIED", "new")]
    assert not api.watchers


async def test_a_watch_sees_objects_come_into_its_selection_and_leave_it(
    api: KubernetesApi, pods: client.CoreV1Api
) -> None:
    """For a label selector an added label is a new object, and a removed one is a deletion."""
    api.behave("any", has_room=False)
    version = (await ask(pods.list_namespaced_pod, "default")).metadata.resource_version
    api.create("pods", pod("x"))
    api.patch("pods", "x", {"metadata": {"labels": {"k": "1"}}})
    api.patch("pods", "x", {"metadata": {"labels": {"k": None}}})
    assert await ask(watched, pods, version, label_selector="k") == [("ADDED", "x"), ("DELETED", "x")]


@pytest.mark.parametrize("in_stream", [False, True])
async def test_a_version_that_is_forgotten(api: KubernetesApi, pods: client.CoreV1Api, *, in_stream: bool) -> None:
    """410 Gone comes as a status or as an event; a version within the kept history is valid."""
    api.says_gone_in_stream = in_stream
    version = (await ask(pods.list_namespaced_pod, "default")).metadata.resource_version
    api.create("pods", pod())
    await until_ready(pods)
    api.compact()
    if in_stream:
        assert await ask(watched, pods, version) == [("ERROR", "")]
    else:
        assert "Expired" in await fails(410, watched, pods, version)
    version = (await ask(pods.list_namespaced_pod, "default")).metadata.resource_version
    assert await ask(watched, pods, version) == []


async def test_a_watch_lasts_whole_seconds(pods: client.CoreV1Api) -> None:
    """Other limits are refused."""
    assert "BadRequest" in await fails(400, watched, pods, "100", timeout_seconds=0.4)


async def test_watch_that_asks_for_bookmarks_gets_one_at_its_end(api: KubernetesApi, pods: client.CoreV1Api) -> None:
    """A watch that asks for bookmarks gets one at its end at the latest."""
    assert await ask(watched, pods, "100", allow_watch_bookmarks=True) == [("BOOKMARK", "")]


async def test_server_comes_back_on_the_same_port(api: KubernetesApi, pods: client.CoreV1Api) -> None:
    """Stopped, it refuses connections; restarted, it has its earlier state."""
    await ask(pods.create_namespaced_pod, "default", pod())
    url = api.url
    await api.stop()
    with pytest.raises(Exception, match="refused"):
        await ask(pods.list_namespaced_pod, "default")
    await api.start()
    assert api.url == url
    assert len((await ask(pods.list_namespaced_pod, "default")).items) == 1


# --- the cluster ------------------------------------------------------------------------------------------------------


async def test_a_pod_starts_step_by_step(api: KubernetesApi, pods: client.CoreV1Api) -> None:
    """A pod waits, runs, and is ready; each step is an event."""
    version = (await ask(pods.list_namespaced_pod, "default")).metadata.resource_version
    await ask(pods.create_namespaced_pod, "default", pod())
    assert (await until_ready(pods)).status.pod_ip
    assert [kind for kind, _ in await ask(watched, pods, version)] == ["ADDED", "MODIFIED", "MODIFIED"]


async def test_a_job_makes_pods_until_one_succeeds_or_it_gives_up(api: KubernetesApi, jobs: client.BatchV1Api) -> None:
    """It tries as often as its limit says; then it is finished, and removed after its time."""
    api.behave("bad", outcome="crash")
    api.behave("good", outcome="complete")
    await ask(jobs.create_namespaced_job, "default", job("fails", "bad", backoffLimit=2, ttlSecondsAfterFinished=10))
    await ask(jobs.create_namespaced_job, "default", job("succeeds", "good"))
    await until(lambda: all(len(each["status"].get("conditions", ())) == 2 for each in api.all_of("jobs")))
    conditions = {each["metadata"]["name"]: each["status"]["conditions"][-1]["type"] for each in api.all_of("jobs")}
    assert conditions == {"fails": "Failed", "succeeds": "Complete"}
    assert len(api.all_of("pods", "of=fails")) == 3
    api.pass_time(10)
    await until(lambda: [each["metadata"]["name"] for each in api.all_of("jobs")] == ["succeeds"])
    await until(lambda: not api.all_of("pods", "of=fails"))


async def test_deadlines_end_jobs(api: KubernetesApi, jobs: client.BatchV1Api, pods: client.CoreV1Api) -> None:
    """A Job at its deadline loses its pod; a pod at its own deadline is stopped, and stays as it is."""
    await ask(jobs.create_namespaced_job, "default", job(activeDeadlineSeconds=5))
    body = pod()
    body["spec"]["activeDeadlineSeconds"] = 5
    await ask(pods.create_namespaced_pod, "default", body)
    await until_ready(pods)
    await until(lambda: all("podIP" in each["status"] for each in api.all_of("pods")))
    api.pass_time(6)
    await until(lambda: len(api.all_of("pods")) == 1 and "conditions" in api.get("jobs", "j")["status"])
    assert api.get("pods", "p")["status"]["reason"] == "DeadlineExceeded"
    assert api.get("jobs", "j")["status"]["conditions"][0]["reason"] == "DeadlineExceeded"


@pytest.mark.parametrize("version", [(1, 30), (1, 36)])
async def test_end_of_a_job_is_reported_before_its_pods_are_gone(api: KubernetesApi, version: tuple[int, int]) -> None:
    """This holds since 1.31; before, only its end is reported."""
    api.version = version
    api.behave("any", stops_at_once=False)
    api.create("jobs", job(activeDeadlineSeconds=5))
    await until(lambda: any("podIP" in each["status"] for each in api.all_of("pods")))
    api.pass_time(6)
    await until(lambda: "conditions" in api.get("jobs", "j")["status"])
    conditions = api.get("jobs", "j")["status"]["conditions"]
    assert [each["type"] for each in conditions] == ["Failed" if version < (1, 31) else "FailureTarget"]
    api.pass_time(40)
    await until(lambda: api.get("jobs", "j")["status"]["conditions"][-1]["type"] == "Failed")
    assert {each["reason"] for each in api.get("jobs", "j")["status"]["conditions"]} == {"DeadlineExceeded"}


async def test_a_rehearsal_stores_nothing(api: KubernetesApi, pods: client.CoreV1Api) -> None:
    """The answer equals that of a real request."""
    await ask(pods.create_namespaced_pod, "default", pod(), dry_run="All")
    assert not api.objects
    api.pod_security = "restricted"
    assert "violates PodSecurity" in await fails(403, pods.create_namespaced_pod, "default", pod(), dry_run="All")
    api.quota["pods"] = 0
    assert "exceeded quota" in await fails(403, pods.create_namespaced_pod, "default", pod(), dry_run="All")


async def test_rights_are_loaded_after_the_start(api: KubernetesApi, pods: client.CoreV1Api) -> None:
    """Until then all requests are refused, except the version."""
    api.has_loaded_rights = False
    assert 'cannot list resource \\"pods\\"' in await fails(403, pods.list_namespaced_pod, "default")
    version = await ask(
        pods.api_client.call_api, "/version", "GET", response_type="object", _return_http_data_only=True
    )
    assert version == {"major": "1", "minor": "36+"}
