"""`python -m vitlens` is the `vitlens` command."""

from vitlens.cli import main

main()
