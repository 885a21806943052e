"""Fixtures of all forms."""

import matplotlib.pyplot as plt
import pytest


@pytest.fixture(autouse=True)
def closed_figures():
    """Close the figures that a test has opened in pyplot, as other tests expect none."""
    yield
    plt.close("all")
