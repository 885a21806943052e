"""The same functions from a shell: `vitlens inspect`, `explain`, `app`, `train`, `study`, `evaluate`, `models` …

A wrong option, path or file ends with one sentence and exit code 2; if some images of several could not be read, the
rest is done and the exit code is 1.
"""

from __future__ import annotations

import sys

import typer

from vitlens.commands.evaluating import evaluate
from vitlens.commands.looking import explain, explorer, inspect
from vitlens.commands.paper import models, table
from vitlens.commands.studying import study
from vitlens.commands.training import train

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__.split("\n")[0])
WrongCommandLine = typer.BadParameter.__base__  # click's UsageError, wherever the installed typer has it from


@app.callback()
def _vitlens() -> None:
    """A microscope for Vision Transformers."""


app.command()(inspect)
app.command()(explain)
app.command(name="app")(explorer)
app.command()(train)
app.command()(study)
app.command()(evaluate)
app.command()(models)
app.command()(table)


def main() -> None:
    """The `vitlens` command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot print a name shows its code instead
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(None if sys.argv[1:] else ["--help"], prog_name="vitlens", standalone_mode=False)
        if code == 130:
            raise KeyboardInterrupt
        raise SystemExit(code)
    except WrongCommandLine as error:
        asked = f"{error.ctx.command_path} --help" if error.ctx else "vitlens --help"
        print(f"vitlens: {error.format_message().rstrip('.')}; see `{asked}`.", file=sys.stderr)
        raise SystemExit(2) from None
    except (ValueError, OSError, MemoryError, FloatingPointError, ModuleNotFoundError) as error:
        print(f"vitlens: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except (KeyboardInterrupt, typer.Abort):
        print("vitlens: stopped.", file=sys.stderr)
        raise SystemExit(130) from None
    except RuntimeError as error:
        from vitlens.recorder.running import out_of_memory

        if not out_of_memory(error):
            raise
        print("vitlens: Memory ran out; take smaller batches or images, or --stream them.", file=sys.stderr)
        raise SystemExit(2) from None
