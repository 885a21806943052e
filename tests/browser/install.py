"""Find the browser for the tests, or install one: Debian's as root, Playwright's otherwise. For `make browser`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def found() -> str | None:
    """$CHROMIUM, then `chromium` on the path, then Playwright's own; None if there is none."""
    if path := os.environ.get("CHROMIUM") or shutil.which("chromium"):
        return path
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None


def main() -> int:
    if os.environ.get("NO_BROWSER") == "1":
        print("NO_BROWSER=1: no browser is looked for, and the tests that need one are left out.")
        return 0
    if path := found():
        print(f"The tests use {path}.")
        return 0
    if hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get"):
        commands = [["apt-get", "update", "-q"], ["apt-get", "install", "-y", "-q", "chromium"]]
    else:
        commands = [[sys.executable, "-m", "playwright", "install", "chromium"]]
    for command in commands:
        if subprocess.run(command).returncode:
            print(f"`{' '.join(command)}` failed. The tests that need a browser will fail and say so.", file=sys.stderr)
            return 0  # the other tests have their say first
    print(f"The tests use {found()}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
