"""The paper in miniature: models of three kinds trained on more and more images (its Fig. 3 and 4), by one recipe."""

from vitlens.paper.studies.designs import STUDIES, Cell, Study, register, study
from vitlens.paper.studies.networks import Network, trained
from vitlens.paper.studies.running import five_shot, run_study
from vitlens.paper.studies.table import curves, lead, read_table, write_table

__all__ = [
    "STUDIES", "Cell", "Network", "Study", "curves", "five_shot", "lead", "read_table", "register", "run_study",
    "study", "trained", "write_table",
]  # fmt: skip
