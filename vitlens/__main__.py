"""`python -m vitlens` is the `vitlens` command."""

from vitlens.commands import main

main()
