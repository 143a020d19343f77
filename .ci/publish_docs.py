"""Put a built site into the branch gh-pages, beside those of other versions.

    python .ci/publish_docs.py site v1.2.3     into the folder 1.2.3
    python .ci/publish_docs.py site main       into the folder latest

The folder is replaced as a whole. index.html at the top lists all versions and leads to the newest
release, or to latest where there is none. What else the branch holds stays.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

BRANCH = "gh-pages"
ATTEMPTS = 5
RELEASE = re.compile(r"\d+(\.\d+)+")
WHO = ("-c", "user.name=docs", "-c", "user.email=docs@users.noreply.github.com")


def git(folder: Path, *words: str) -> str:
    """What a git command in `folder` prints."""
    return subprocess.run(
        ["git", *WHO, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


def folder_of(ref: str) -> str:
    """The folder of a branch or tag: v1.2.3 -> 1.2.3, main -> latest."""
    if ref == "main":
        return "latest"
    if not re.fullmatch(r"v" + RELEASE.pattern, ref):
        raise SystemExit(f"{ref}: sites are published for main and for tags such as v1.2.3")
    return ref[1:]


def versions(pages: Path) -> list[str]:
    """The versions that the branch holds: releases, the newest first, then latest."""
    names = [folder.name for folder in pages.iterdir() if (folder / "index.html").exists()]
    releases = [name for name in names if RELEASE.fullmatch(name)]
    releases.sort(key=lambda name: [int(part) for part in name.split(".")], reverse=True)
    return releases + [name for name in names if name == "latest"]


def index(names: Sequence[str]) -> str:
    """The page at the top."""
    rows = "\n".join(f'<li><a href="{name}/">{name}</a></li>' for name in names)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={names[0]}/">
<title>ds_core: documentation</title>
<p>The documentation of the newest version: <a href="{names[0]}/">{names[0]}</a>. All versions:</p>
<ul>
{rows}
</ul>
"""


def publish(site: Path, ref: str, repository: Path) -> None:
    """Commit `site` to the branch and push it to the remote origin of `repository`.

    When another version was published meanwhile, it begins again from there.
    """
    name = folder_of(ref)
    if not (site / "index.html").exists():
        raise SystemExit(f"{site} has no index.html: run make docs first")
    for attempt in range(ATTEMPTS):
        with tempfile.TemporaryDirectory() as folder:
            pages = Path(folder) / "pages"
            git(repository, "worktree", "add", "--detach", "--no-checkout", str(pages))
            try:
                put(site, name, pages)
                return
            except subprocess.CalledProcessError as error:
                if "push" not in error.cmd or attempt == ATTEMPTS - 1:
                    raise SystemExit(f"{' '.join(error.cmd)}: {error.stderr}") from None
            finally:
                git(repository, "worktree", "remove", "--force", str(pages))


def put(site: Path, name: str, pages: Path) -> None:
    """Replace the folder `name` of the branch in the working tree `pages`, and push."""
    if git(pages, "ls-remote", "--heads", "origin", BRANCH):
        git(pages, "fetch", "-q", "--depth", "1", "origin", BRANCH)
        git(pages, "checkout", "-q", "--detach", "FETCH_HEAD")
    else:
        git(pages, "checkout", "-q", "--orphan", f"new-{BRANCH}")
        git(pages, "rm", "-rfq", "--ignore-unmatch", ".")
    shutil.rmtree(pages / name, ignore_errors=True)
    shutil.copytree(site, pages / name)
    (pages / ".nojekyll").touch()
    (pages / "index.html").write_text(index(versions(pages)), "utf-8")
    git(pages, "add", "--all", "--force")
    if git(pages, "status", "--porcelain"):
        git(pages, "commit", "-qm", f"The site of {name}")
        git(pages, "push", "-q", "origin", f"HEAD:refs/heads/{BRANCH}")


def main(arguments: Sequence[str]) -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("site", type=Path, help="what make docs wrote")
    parser.add_argument("ref", help="main, or a tag such as v1.2.3")
    parser.add_argument("--repository", type=Path, default=Path.cwd())
    given = parser.parse_args(arguments)
    publish(given.site.resolve(), given.ref, given.repository)


if __name__ == "__main__":
    main(sys.argv[1:])
