"""The commands of `vitlens`, as functions that typer reads; `vitlens.cli` puts them together."""
