"""The notation of a replica."""

from __future__ import annotations

import pytest

from thunderagent.backends.discovery.base import (
    PodSelection,
    Wanted,
    ranks_count_of,
    refuse_twins,
    replica_id_of,
    shown_url,
    wanted_of,
)
from thunderagent.errors import DiscoveryError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("http://a:8000", Wanted("http://a:8000")),
        (" https://a/ ", Wanted("https://a")),
        ("http://me:secret@a:1/base/", Wanted("http://me:secret@a:1/base")),
        ("http://[::1]:8000#dp=4", Wanted("http://[::1]:8000", 4)),
        ("http://a:8000/#dp=auto", Wanted("http://a:8000", "auto")),
    ],
)
def test_a_url_is_read(text: str, wanted: Wanted) -> None:
    assert wanted_of(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        *("", "a:8000", "ftp://a", "http://", "http://:8000", "http://a:x", "http://a:99999", "http://a:0"),
        *("http://a/v1", "http://a?x=1", "http://a b", "http://[::1", "http://a#", "http://a#dp", "http://a#dp=x")[:-3],
        *("http://a#dp=0", "http://a#dp=2000", "http://a#dp=2&dp=3", "http://a#dp=-1", "http://a#dp=²"),
    ],
)
def test_broken_replica_entry_is_refused(text: str) -> None:
    with pytest.raises(DiscoveryError):
        wanted_of(text)


def test_a_replica_is_named_by_its_address_and_rank_and_never_by_a_password() -> None:
    assert replica_id_of("http://me:secret@a:1/x") == "a:1/x"
    assert replica_id_of("https://a:1", 3) == "a:1/3"
    assert shown_url("http://me:secret@a:1") == "http://a:1"
    with pytest.raises(DiscoveryError, match=r"^http://a:1 is named twice$"):
        refuse_twins([wanted_of("http://a:1"), wanted_of("http://me:secret@a:1")])


def test_ranks_are_a_number_or_auto() -> None:
    assert (ranks_count_of("8"), ranks_count_of("auto")) == (8, "auto")


@pytest.mark.parametrize(
    ("text", "selection"),
    [
        ("default/app=vllm:8000", PodSelection("default", "app=vllm", "8000")),
        (" n/a.b/c=d,e in (f, g):http-api ", PodSelection("n", "a.b/c=d,e in (f, g)", "http-api")),
    ],
)
def test_a_selection_of_pods_is_read(text: str, selection: PodSelection) -> None:
    assert PodSelection.read(text) == selection


@pytest.mark.parametrize(
    "text", ["", "default", "app=vllm:80", "/a=b:80", "n/:80", "n/a=b", "n/a=b:", "n/a=b:0", "n/a=b:70000", "n/a=b:x_y"]
)
def test_selector_that_selects_no_pods_is_refused(text: str) -> None:
    with pytest.raises(DiscoveryError, match="NAMESPACE/SELECTOR:PORT"):
        PodSelection.read(text)
