"""Find the browser for the tests, or install one: Debian's as root, Playwright's otherwise. For `make browser`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def found() -> str | None:
    """$CHROMIUM, then `chromium` on the path, then Playwright's own, or None."""
    if path := os.environ.get("CHROMIUM") or shutil.which("chromium"):
        return path
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None


if __name__ == "__main__" and os.environ.get("NO_BROWSER") != "1":
    commands = [[sys.executable, "-m", "playwright", "install", "chromium"]]
    if hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get"):
        commands = [
            ["apt-get", "update", "-q"],
            ["apt-get", "install", "-y", "-q", "chromium", "firefox-esr"],
        ]
    for command in () if found() else commands:
        subprocess.run(command)  # the other tests run even if this fails
    print(f"The tests use {found()}.")
