"""How the lists of several hosts become the splits of an epoch."""

from __future__ import annotations

from hetero.control.split_lists import Home, HostList, Splits, hosts_of, merge


def local(*names: str) -> HostList:
    """Return a list of files of the channel `c`."""
    return HostList(names, dict.fromkeys(range(len(names)), "c"))


def test_one_list_is_everybodys() -> None:
    assert merge({"d1": HostList(("a", "b", "a"))}) == Splits(("a", "b", "a"))
    assert hosts_of(Splits(("a", "b"))) == (None, None)


def test_a_single_hosts_own_splits_keep_their_order() -> None:
    splits = merge({"d1": HostList(("a", "b"), {1: "c"})})
    assert splits == Splits(("a", "b"), (None, Home("d1", "c")))
    assert hosts_of(splits) == [None, "d1"]


def test_hosts_take_turns_whatever_their_number_of_splits() -> None:
    splits = merge({"d2": local("a", "b"), "d10": local("x", "y", "z")})
    assert splits.values == ("a", "x", "b", "y", "z")
    assert hosts_of(splits) == ["d2", "d10", "d2", "d10", "d10"]


def test_own_splits_of_the_same_name_are_different_splits() -> None:
    splits = merge({"d1": local("same"), "d2": local("same")})
    assert splits == Splits(("same", "same"), (Home("d1", "c"), Home("d2", "c")))


def test_equal_lists_without_own_splits_are_one() -> None:
    assert merge({"d1": HostList(("b", "a", "b")), "d2": HostList(("a", "b", "b"))}) == Splits(("b", "a", "b"))


def test_what_several_hosts_list_is_there_as_often_as_in_the_list_that_has_it_most_often() -> None:
    splits = merge({"d1": HostList(("a", "b")), "d2": HostList(("a", "a", "b")), "d3": HostList(())})
    assert sorted(splits.values) == ["a", "a", "b"]
    assert splits.homes == ()


def test_what_one_of_several_hosts_lists_is_its_own() -> None:
    splits = merge({"d1": HostList(("shared", "one")), "d2": HostList(("two", "shared"))})
    assert splits == Splits(("shared", "one", "two"), (None, Home("d1", ""), Home("d2", "")))


def test_nothing_listed_is_nothing() -> None:
    assert merge({"d1": HostList(()), "d2": HostList(())}) == Splits(())
