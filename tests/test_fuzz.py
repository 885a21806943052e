"""A hundred random folders, image files and checkpoints with fixed seeds. `python -m tests.fuzz` draws more."""

import pytest
from fuzz import KINDS, run


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_random_cases_are_right_or_refused_in_a_sentence(kind):
    run(kind, examples=100, number=20)
