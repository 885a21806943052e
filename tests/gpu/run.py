"""Run the GPU tests and write their outcomes, device and versions to a file.

python tests/gpu/run.py --out data/results/gpu-tests.json
"""

import argparse
import collections
import datetime
import json
import platform
import sys
import time
from pathlib import Path

import pytest
import timm
import torch


class Record:
    """Outcome of every test, by file."""

    def __init__(self):
        self.outcomes, self.failures = collections.defaultdict(collections.Counter), []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[Path(report.nodeid.split("::")[0]).name][report.outcome] += 1
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report):
        """A file that cannot be imported is a failure too."""
        if report.failed:
            self.failures.append(
                {"test": report.nodeid, "why": str(report.longrepr).splitlines()[-1]}
            )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    record, start = Record(), time.perf_counter()
    code = pytest.main(
        [str(Path(__file__).parent), "-q", "-p", "no:cacheprovider", "--tb=short"], plugins=[record]
    )
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
    }
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        versions["triton"] = None
    result = {
        "command": "python tests/gpu/run.py --out data/results/gpu-tests.json",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": versions,
        "date": str(datetime.date.today()),
        "seconds": round(time.perf_counter() - start, 1),
        "exit_code": int(code),
        "outcomes": {name: dict(counts) for name, counts in sorted(record.outcomes.items())},
        "failures": record.failures,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
