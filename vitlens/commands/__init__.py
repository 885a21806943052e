"""The commands of `vitlens`, as functions that typer reads; `vitlens.commands.cli` puts them together."""
