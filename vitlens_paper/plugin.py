"""What this package adds to vitlens: commands, data sets and recipes. `pyproject.toml` names these functions."""

import typer


def add_commands(app: typer.Typer) -> None:
    """Add `evaluate`, `ablate` and `paper` to the command line."""
    from vitlens_paper import cli

    cli.add_commands(app)


def register_data() -> None:
    """Register VTAB-1k, the data sets of the paper's transfer experiments, and WebDataset shards."""
    from vitlens.data import sources
    from vitlens_paper.tasks import TASKS

    sources.register("wds/OWNER/SET", "vitlens_paper.shards:webdataset")
    sources.register("vtab/TASK", "vitlens_paper.vtab:vtab")
    sources.register("vtab800/TASK", "vitlens_paper.vtab:vtab800")
    sources.FORMATS[".tar"] = "vitlens_paper.shards:shards"
    sources.ALIASES.update({task.name: task.source for task in TASKS.values() if not task.group})


def register_recipes() -> None:
    """Register the recipes of the paper's Tables 3 and 4."""
    from vitlens.train.recipes import register
    from vitlens_paper.recipes import paper_recipes

    for recipe in paper_recipes():
        register(recipe)
