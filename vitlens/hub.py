"""The Hugging Face hub: a quick check that it can be reached, and messages about what is stored on the disk."""

from __future__ import annotations

import contextlib
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator


def reach() -> None:
    """Raise OSError at once if the hub cannot be reached. Its own libraries retry for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE is set")
    with contextlib.suppress(urllib.error.HTTPError):  # whatever it answers, it is there
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=10).close()


def announce(what: str, where: object) -> None:
    """Print what was stored and where, as in "Fetched torch/cifar10"."""
    print(f"{what} into {where}, to be kept there.", file=sys.stderr, flush=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave the hub's warnings about each of its tries unsaid: what fails in the end is said in one sentence."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
