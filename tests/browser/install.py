"""Find the browsers for the tests, or install them: Debian's as root, Playwright's otherwise. For `make browser`."""

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


def missing() -> list[list[str]]:
    """Commands that install what is missing."""
    packages = []
    if not found():
        packages.append("chromium")
    if not shutil.which("firefox-esr"):
        packages.append("firefox-esr")
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    if packages and is_root and shutil.which("apt-get"):
        return [["apt-get", "update", "-q"], ["apt-get", "install", "-y", "-q", *packages]]
    if "chromium" in packages:
        return [[sys.executable, "-m", "playwright", "install", "chromium"]]
    return []


if __name__ == "__main__" and os.environ.get("NO_BROWSER") != "1":
    for command in missing():
        subprocess.run(command)  # the other tests run even if this fails
    print(f"The tests use {found()} and {shutil.which('firefox-esr') or 'no Firefox'}.")
