"""The numbers of `golden.py` equal the frozen ones."""

import pytest

from tests.golden.golden import FUNCTIONS, computed, difference, frozen


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_equal_the_frozen_ones(name):
    values, expected = computed(name), frozen(name)
    assert values.keys() == expected.keys()
    for key, value in values.items():
        assert value.shape == expected[key].shape, key
        assert difference(key, value, expected[key]) <= 1, key
