"""Make a release: version, notes, commit and tag; sdists and wheels, checked. Uploads nothing.

python .ci/release.py 0.2.0            in this tree: `make release VERSION=0.2.0` (RELEASING.md)
python .ci/release.py 0.2.0 --dry-run  in a clone below build/release; this tree does not change
python .ci/release.py 0.2.0 --build    only the files, of a commit that has this version
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import version as one
from packaging.version import InvalidVersion, Version

import build as builder
from build import ROOT, folders, git

FROM_CLONE = re.compile(r"""-c (?:\\?["'])?(?:\$DS_CORE/)?dist/constraints\.txt(?:\\?["'])? """)
STEPS = re.compile(
    r"^ *# ds_core's wheels, from its repository\..*?(?=^ *- run: pip install)",
    re.MULTILINE | re.DOTALL,
)
AFTER = (
    "    # in a clone, after `make wheels`",
    " in a clone of ds_core, after `make wheels`",
    ", with DS_CORE=a clone of ds_core after `make wheels`",
    "DS_CORE is a clone of ds_core in which `make wheels` has run.\n\n",
)
WORK = Path("build") / "release"


class Refused(Exception):
    """What stands against the release."""


def say(text: str) -> None:
    """A line of progress, with the time."""
    print(f"{datetime.datetime.now():%H:%M:%S}  {text}", flush=True)


def run(
    words: Sequence[str | Path],
    root: Path,
    env: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> None:
    """Run a command; Refused where it fails. quiet: its output is shown only then."""
    kept = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if quiet else {}
    done = subprocess.run(
        [str(w) for w in words], cwd=root, env=env, check=False, text=True, **kept
    )
    if done.returncode:
        said = f":\n{done.stdout}" if quiet else ""
        raise Refused(f"`{' '.join(map(str, words[:6]))}` ended with {done.returncode}{said}")


def check_tree(root: Path, number: str, at_tag: bool) -> None:
    """The tree is clean, and the version is newer than every one that has a tag."""
    if changed := git(root, "status", "--porcelain"):
        raise Refused(f"the working tree has changes:\n{changed}")
    if not git(root, "rev-parse", "HEAD"):
        raise Refused(f"{root} is no clone of the repository")
    if at_tag:
        if number != one.version(root):
            raise Refused(f"this commit has version {one.version(root)}, not {number}")
        if wrong := one.other(root):
            raise Refused(f"another version is in {', '.join(map(str, wrong))}")
        return
    tags = git(root, "tag", "--list", "v*").split()
    newest = max((Version(tag[1:]) for tag in tags), default=None)
    if newest is not None and Version(number) <= newest:
        raise Refused(f"{number} is not newer than {newest}, which has a tag")
    if Version(number) < Version(one.version(root)):
        raise Refused(f"{number} is older than {one.version(root)}, the version of this tree")


def write_notes(root: Path, number: str) -> None:
    """Move the fragments of changes/ into CHANGELOG.md."""
    fragments = [file for file in (root / "changes").glob("*.md") if file.name != "README.md"]
    if not fragments:
        raise Refused("changes/ has no fragments: there is nothing to release")
    words = ["-m", "towncrier", "build", "--yes", "--version", number, "--dir", root]
    run([sys.executable, *words], root, quiet=True)
    say(f"notes: {len(fragments)} fragments are in CHANGELOG.md")


def notes(root: Path, number: str) -> str:
    """The section of CHANGELOG.md for this version."""
    text = (root / "CHANGELOG.md").read_text("utf-8")
    found = re.search(rf"^## {re.escape(number)} .*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise Refused(f"CHANGELOG.md has no section for {number}")
    return found[0].strip() + "\n"


def as_published(text: str) -> str:
    """Install lines as they are once an index has this release."""
    text = STEPS.sub("", FROM_CLONE.sub("", text))
    for words in AFTER:
        text = text.replace(words, "")
    return text


def source_of(root: Path, place: Path) -> Path:
    """The files of the commit, with install lines for those who have no clone."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    archive = place.with_suffix(".tar")
    run(["git", "archive", "--output", archive.absolute(), "HEAD"], root)
    with tarfile.open(archive) as tar:
        tar.extractall(place, filter="data")
    archive.unlink()
    for folder in folders(place):
        package = [file for each in folder.glob("ds_*") for file in each.rglob("*")]
        for file in [folder / "README.md", *package]:
            if file.is_file() and file.suffix in (".md", ".py", ".jinja"):
                text = file.read_text("utf-8")
                if (changed := as_published(text)) != text:
                    file.write_text(changed, "utf-8")
    return place


def digests(folder: Path) -> dict[str, str]:
    """File name -> SHA-256."""
    files = sorted(file for file in folder.iterdir() if file.suffix in (".whl", ".gz"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def build_twice(source: Path, out: Path, number: str) -> None:
    """Sdists and pure wheels; again from the unpacked sdists, which must give the same wheels."""
    shutil.rmtree(out, ignore_errors=True)
    builder.build(folders(source), out, number, ("sdist", "wheel"))
    again = source.with_name("again")
    shutil.rmtree(again, ignore_errors=True)
    for sdist in sorted(out.glob("*.tar.gz")):
        with tarfile.open(sdist) as tar:
            tar.extractall(again / "unpacked", filter="data")
    builder.build(sorted((again / "unpacked").iterdir()), again / "wheels", number)
    first, second = digests(out), digests(again / "wheels")
    wheels = {name: found for name, found in first.items() if name.endswith(".whl")}
    if differ := [name for name in wheels if second.get(name) != wheels[name]]:
        raise Refused(f"a wheel from the sdist is another: {', '.join(differ)}")
    if len(wheels) != len(folders(source)) or len(first) != 2 * len(wheels):
        raise Refused(f"{len(first)} files of {len(folders(source))} distributions")
    shutil.rmtree(again)


def build_binary(source: Path, out: Path, number: str) -> list[str]:
    """Wheels with compiled libraries, where there is a compiler; in another process, whose
    environment asks for them."""
    if shutil.which("c++") is None and shutil.which("g++") is None:
        say("no C++ compiler: no binary wheels")
        return []
    place = source.with_name("binary")  # beside wheels, hatchling leaves the libraries there
    words = [sys.executable, ROOT / ".ci" / "build.py", place, "--root", source, "--binary", number]
    run(words, source, {**os.environ, "DS_BUILD_OPS": "1"})
    made = sorted(place.glob("*.whl"))
    for wheel in made:
        shutil.move(wheel, out / wheel.name)
    shutil.rmtree(place)
    return [wheel.name for wheel in made]


def check_files(out: Path) -> None:
    """Metadata, and that READMEs can be rendered where packages are published."""
    files = [out / name for name in digests(out)]
    run([sys.executable, "-m", "twine", "check", "--strict", *files], out, quiet=True)
    say(f"twine check --strict: {len(files)} files passed")


def check_wheels(root: Path, out: Path) -> None:
    """The tests of wheels, on these."""
    env = {**os.environ, "DSCORE_WHEELS": str(out), "PYTHONPATH": "tests"}
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "tests/wheels/test_wheels.py",
        "-m",
        "not integration",
    ]
    run(words, root, env)


def write_sums(out: Path) -> None:
    """SHA256SUMS, as `sha256sum --check` reads it."""
    rows = [f"{digest}  {name}\n" for name, digest in digests(out).items()]
    (out / "SHA256SUMS").write_text("".join(rows), "utf-8")


def dry_clone(root: Path) -> Path:
    """A clone of HEAD, below build/."""
    place = root / WORK / "clone"
    shutil.rmtree(place, ignore_errors=True)
    run(["git", "clone", "-q", "--no-hardlinks", root, place], root)
    for key in ("user.name", "user.email"):
        run(["git", "config", key, git(root, "config", key) or "release"], place)
    return place


def commit_of(root: Path, number: str) -> None:
    """The version and the notes, as a commit."""
    write_notes(root, number)
    run(["git", "commit", "-q", "--all", "-m", f"Release {number}"], root)
    say(f"commit {git(root, 'rev-parse', '--short', 'HEAD')}: Release {number}")


def set_time(root: Path) -> None:
    """Files in archives have the time of the commit, so that another build gives the same bytes."""
    os.environ["SOURCE_DATE_EPOCH"] = git(root, "log", "-1", "--format=%ct")


def release(root: Path, options: argparse.Namespace) -> Path:
    """All steps in `root`; gives the folder of the files."""
    number, out, work = options.number, options.root / "dist", options.root / WORK
    if options.dry_run:
        out = work / "dist"
    if options.binary:
        set_time(root)
        out.mkdir(parents=True, exist_ok=True)
        say(
            f"binary wheels: {', '.join(build_binary(source_of(root, work / 'source'), out, number))}"
        )
        return out
    if not options.build:
        changed = one.write(number, root)
        say(f"version {number}: {len(changed)} files changed")
        commit_of(root, number)
    set_time(root)
    source = source_of(root, work / "source")
    build_twice(source, out, number)
    say(f"{len(digests(out))} sdists and wheels; a wheel built from its sdist is the same file")
    if not options.pure:
        binary = build_binary(source, out, number)
        say(f"binary wheels: {', '.join(binary) or 'none'}")
    (out / "NOTES.md").write_text(notes(root, number), "utf-8")
    write_sums(out)
    check_files(out)
    if options.skip_tests:
        say("test-wheels: skipped")
    else:
        check_wheels(root, out)
        say("test-wheels: passed")
    return out


def main(words: Sequence[str] | None = None) -> int:
    """Make the release, or say why not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("number", metavar="VERSION")
    parser.add_argument("--dry-run", action="store_true", help="in a clone; nothing here changes")
    parser.add_argument("--build", action="store_true", help="the files alone, of this commit")
    parser.add_argument("--pure", action="store_true", help="no binary wheels")
    parser.add_argument("--binary", action="store_true", help="binary wheels alone; with --build")
    parser.add_argument("--skip-tests", action="store_true", help="do not run test-wheels")
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args(words)
    options.root = options.root.absolute()
    start = time.monotonic()
    try:
        options.number = str(Version(options.number))
        check_tree(options.root, options.number, options.build)
        say(f"{options.root}: clean, {options.number} fits")
        root = dry_clone(options.root) if options.dry_run else options.root
        out = release(root, options)
        if not options.build:
            run(["git", "tag", "-a", f"v{options.number}", "-m", f"ds_core {options.number}"], root)
    except (Refused, InvalidVersion) as error:
        print(f"no release: {error}", file=sys.stderr)
        return 1
    where = out.relative_to(options.root)
    say(f"{len(digests(out))} files and SHA256SUMS in {where}, {time.monotonic() - start:.0f} s")
    if options.dry_run:
        print(f"A dry run: commit and tag are in {WORK / 'clone'} alone. Nothing was uploaded.")
    elif not options.build:
        print(
            f"Next: git push origin HEAD v{options.number}   (RELEASING.md). Nothing was uploaded."
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
