"""The command line: `vitlens inspect`, `explain`, `app`, `train`, `evaluate`, `ablate`, `compute`,
`models` and `table`.

A wrong option, path or file ends the command with one line on stderr and exit code 2. If only some of several images
cannot be read, the command does the rest and exits with 1.
"""

from __future__ import annotations

import sys

import typer

from vitlens.commands.ablating import ablate
from vitlens.commands.computing import compute
from vitlens.commands.evaluating import evaluate
from vitlens.commands.looking import explain, explorer, inspect
from vitlens.commands.options import grouped
from vitlens.commands.paper import models, table
from vitlens.commands.training import train

COMMANDS = {
    "inspect": inspect, "explain": explain, "app": explorer, "train": train, "evaluate": evaluate,
    "ablate": ablate, "compute": compute, "models": models, "table": table,
}  # fmt: skip

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help="A microscope for Vision Transformers.")
for _name, _command in COMMANDS.items():
    app.command(name=_name)(grouped(_command))
WrongCommandLine = typer.BadParameter.__base__  # click's UsageError, wherever the installed typer has it from


def main() -> None:
    """Run the `vitlens` command and exit."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # show a character that the terminal's encoding lacks as an escape
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(None if sys.argv[1:] else ["--help"], prog_name="vitlens", standalone_mode=False)
    except WrongCommandLine as error:
        asked = f"{error.ctx.command_path} --help" if error.ctx else "vitlens --help"
        code = _fail(f"{error.format_message().rstrip('.')}; see `{asked}`.")
    except (ValueError, OSError, MemoryError, FloatingPointError, ModuleNotFoundError) as error:
        code = _fail(" ".join(str(error).split()))
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except RuntimeError as error:
        from vitlens.recorder.forward import out_of_memory

        if not out_of_memory(error):
            raise
        code = _fail("Memory ran out; take smaller batches or images, or --stream them.")
    if code == 130:
        _fail("stopped.")
    raise SystemExit(code)


def _fail(message: str) -> int:
    print(f"vitlens: {message}", file=sys.stderr)
    return 2
