"""Numbers of weights: comparable over replicas, one for an update however many calls it takes."""

from __future__ import annotations

from thunderagent.backends import backend_of
from thunderagent.backends.poller import ReplicaEndpoint
from thunderagent.proxy.fleet.known import MOST_VERSIONS_COUNT, KnownReplica, Weights


def replicas(count: int) -> list[KnownReplica]:
    """Return replicas that share what is known of versions."""
    weights = Weights()
    return [
        KnownReplica(ReplicaEndpoint(str(at), f"http://127.0.0.1:{at}", backend_of("vllm")), weights=weights)
        for at in range(1, count + 1)
    ]


def test_calls_while_nothing_is_granted_are_one_update() -> None:
    """Of each the cache is in doubt all the same."""
    (one,) = replicas(1)
    serials = {one.cache_serial}
    for number in (1, 2):
        one.set_suspended(is_suspended=True)
        for _ in range(3):
            one.weights_changed("", renewed=True)
            assert one.weight_number == number
            serials.add(one.cache_serial)
        one.set_suspended(is_suspended=False)
    assert len(serials) == 7
    for number in (3, 4):
        one.weights_changed("", renewed=True)  # nobody stopped grants for it
        assert one.weight_number == number


def test_version_has_one_number_on_all_replicas() -> None:
    """Also on one that loaded it in parts, goes back to it, or is first seen with it."""
    one, parts, late = replicas(3)
    for version in ("1", "2", "3"):
        one.weights_changed(version, renewed=True)
    for version in ("1", "1", "2", "2", "2", "3"):
        parts.weights_changed(version, renewed=True)
    late.weights_named("3")
    assert [each.weight_number for each in (one, parts, late)] == [3, 3, 3]
    serial = one.cache_serial
    one.weights_changed("2", renewed=True)
    assert one.weight_number == 2
    assert one.cache_serial > serial


def test_name_alone_is_no_update() -> None:
    """Neither one that follows its weights, nor one that is said again and again."""
    one, other = replicas(2)
    one.weights_named("default")
    one.weights_changed("", renewed=True)
    for _ in range(3):
        one.weights_changed("default", renewed=False)  # its engine still says so
    assert one.weight_number == 1
    one.weights_changed("7", renewed=False)
    assert (one.weight_number, one.weight_version) == (1, "7")
    other.weights_changed("7", renewed=True)
    assert other.weight_number == 1
    one.weights_changed("8", renewed=False)  # a trainer that only tells the name
    assert one.weight_number == 2


def test_names_are_bounded_and_changes_are_heard() -> None:
    """The oldest name is forgotten."""
    weights, heard = Weights(), list[str]()
    weights.on_change.append(heard.append)
    for number in range(MOST_VERSIONS_COUNT + 1):
        assert weights.number_of(str(number), number) == number
    assert weights.number_of("1", 0) == 1
    assert weights.number_of("0", 77) == 77
    weights.changed("a")
    assert heard == ["a"]
    assert weights.next_serial() < weights.next_serial()
