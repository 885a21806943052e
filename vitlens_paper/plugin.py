"""Commands, data sets, recipes and models that this package adds to vitlens.

`pyproject.toml` names these functions.
"""

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
    sources.register("vtab/TASK", "vitlens_paper.vtab_samples:vtab")
    sources.register("vtab800/TASK", "vitlens_paper.vtab_samples:vtab800")
    sources.FORMATS[".tar"] = "vitlens_paper.shards:shards"
    for task in TASKS.values():
        if not task.group:
            sources.ALIASES[task.name] = task.source


def register_recipes() -> None:
    """Register the paper's recipes, its choices in the model, and its objectives without labels."""
    from vitlens.train.model import VARIANTS, Variants
    from vitlens.train.objectives import OBJECTIVES, RENAMED, Objective
    from vitlens.train.recipes import register
    from vitlens_paper import masked, variants
    from vitlens_paper.recipes import paper_recipes

    VARIANTS[variants.NAME] = Variants(
        values=variants.SETTINGS,
        meanings=variants.MEANINGS,
        resolve=variants.resolve,
        check=variants.check,
        check_former=variants.check_former,
        upgrade=variants.upgrade,
    )
    for name, meaning in masked.OBJECTIVES.items():
        OBJECTIVES[name] = Objective(meaning, masked.build, masked.check)
    RENAMED["vitlens.train.masked.MaskedPatches"] = "vitlens_paper.masked.MaskedPatches"
    for recipe in paper_recipes():
        register(recipe)


def register_models() -> None:
    """Register the paper's variants of Vision Transformers, with timm and as models that can be captured."""
    from vitlens.recorder import supported
    from vitlens.recorder.supported import timm
    from vitlens_paper import variants  # registers its architecture with timm

    supported.FAMILIES[f"{variants.__name__}.PaperTransformer"] = timm.Timm
    supported.FAMILIES[f"{variants.__name__}.FactoredTransformer"] = timm.Timm
    timm.ATTENTION.add(f"{variants.__name__}.PlacedAttention")
