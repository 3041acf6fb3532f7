"""When a site that could not take part is polled again."""

from fedstill.deployment.waiting import Refusals


def test_a_site_that_was_away_is_polled_at_once_and_one_that_stayed_is_not() -> None:
    refusals = Refusals()
    for _ in range(3):
        refusals.add("north", "its data could not be read")
        refusals.add("south", "its data could not be read")
    assert not refusals.due("north")
    refusals.forget_pauses(present={"south"})
    assert refusals.due("north")
    assert not refusals.due("south")
    assert set(refusals.reasons) == {"north", "south"}
