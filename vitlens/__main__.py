"""`python -m vitlens` is the `vitlens` command."""

from vitlens.commands.cli import main

main()
