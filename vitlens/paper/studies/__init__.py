"""The paper in miniature: kinds of models on more and more images (Fig. 3, 4), choices one by one (Table 8, Fig. 9)."""

from vitlens.paper.studies.designs import STUDIES, register, study
from vitlens.paper.studies.figures import FIGURES, figure
from vitlens.paper.studies.grid import Cell, Study
from vitlens.paper.studies.inside import insides, read_insides, write_insides
from vitlens.paper.studies.networks import Network, Variant, trained
from vitlens.paper.studies.running import run_study
from vitlens.paper.studies.spreading import estimate
from vitlens.paper.studies.table import against, curves, lead, rates, read_table, scales, seeds_needed, write_table
from vitlens.paper.studies.trial import five_shot

__all__ = [
    "FIGURES", "STUDIES", "Cell", "Network", "Study", "Variant", "against", "curves", "estimate", "figure",
    "five_shot", "insides", "lead", "rates", "read_insides", "read_table", "register", "run_study", "scales",
    "seeds_needed", "study", "trained", "write_insides", "write_table",
]  # fmt: skip
