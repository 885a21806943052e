"""First guesses of users work, or end in one sentence written by vitlens."""

from guesses import answers


def test_guesses_work_or_are_answered():
    for code, expected, got in answers():
        assert expected in got and (got == "works") == (expected == "works"), f"{code}: {got}"
        assert not got.startswith("RAW"), f"{code}: {got}"
