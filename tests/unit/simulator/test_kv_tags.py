"""The blocks that KvTags returns when a name is closed."""

from __future__ import annotations

from tests.doubles.sglang.kv_tags import KvTags


def test_a_close_gives_back_what_no_other_name_has_in_the_order_of_the_context() -> None:
    """A prefix that two programs share stays as long as one of them does."""
    tags = KvTags()
    tags.add("a", tags.open("a"), [1, 2, 3])
    tags.add("b", tags.open("b"), [1, 2, 4])
    tags.add("a", tags.open("a"), [1, 2, 3, 5])
    assert tags.tagged_count == 5
    assert tags.close("a") == [3, 5]
    assert tags.close("b") == [1, 2, 4]
    assert tags.tagged_count == 0


def test_closing_twice_or_what_never_was_gives_nothing_back() -> None:
    """SGLang answers 200 to both."""
    tags = KvTags()
    tags.add("a", tags.open("a"), [1])
    assert tags.close("a") == [1]
    assert tags.close("a") == tags.close("never") == []
    assert not tags.is_open("a")


def test_request_running_when_its_name_closed_is_not_tagged() -> None:
    """A reused name is another incarnation."""
    tags = KvTags()
    before = tags.open("a")
    tags.close("a")
    assert tags.open("a") == tags.open("a") != before
    tags.add("a", before, [1, 2])
    assert tags.tagged_count == 0
