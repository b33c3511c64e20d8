"""Checks that a bundle's manifest and archive name nothing outside of the bundle. Both are untrusted input."""

from __future__ import annotations

import os
import re
import stat
import tarfile
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

from bedplate.errors import ExternalFailure
from bedplate.run.prepare import MANIFEST as PREPARED_MANIFEST
from bedplate.values.bundle import MANIFEST, SUMS, TOP, Bundle, BundledFile
from bedplate.values.quoting import is_safe

MODEL, PREPARED = "model", "prepared"
MOST_NAME_BYTES = 255
MOST_LINKS = 40
"""Links on one path; as many as Linux follows."""
MALFORMED = (tarfile.TarError, EOFError, ValueError, KeyError, OverflowError, RecursionError, MemoryError)
"""What tarfile raises for archives that nobody's tar wrote."""
_PREPARED_NAME = re.compile(r"[0-9a-f]{4,64}")
_PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+_-]+ --hash=sha256:[0-9a-f]{64}")


def make_unsafe_bundle(path: Path, why: str) -> ExternalFailure:
    return ExternalFailure(f"{path} is not safe to open: {why}", hint="check where the bundle is from")


def is_plain_name(name: str) -> bool:
    """Whether the text is the name of one file in its folder, on every system."""
    return (
        name not in ("", ".", "..")
        and not any(letter in "/\\" or not is_safe(letter) for letter in name)
        and len(os.fsencode(name)) <= MOST_NAME_BYTES
    )


def is_plain_path(path: str) -> bool:
    return all(is_plain_name(part) for part in path.split("/"))


class ManifestTree:
    """The files of a manifest as a tree, with links resolved as a kernel would."""

    def __init__(self, bundle: Bundle) -> None:
        self.files = {_fold(file.path): file for file in bundle.files}
        self.folders = {above for file in bundle.files for above in _list_parents(file.path)}
        self._owned = [[PREPARED, name] for name in bundle.prepared]

    def resolve_link(self, path: str) -> str | None:
        """Return the listed file or folder that a link leads to; `None` if the link is not allowed.

        Only converted weights contain links, to other converted weights.
        """
        found: list[str] = []
        left, links = path.split("/")[::-1], 0
        while left:
            part = left.pop()
            if part == "..":
                if not found:
                    return None
                found.pop()
            elif part not in ("", "."):
                found.append(part)
                entry = self.files.get(_fold("/".join(found)))
                if entry is not None and entry.link is not None:
                    links += 1
                    if links > MOST_LINKS or entry.link.startswith("/") or not entry.link:
                        return None
                    found.pop()
                    left += entry.link.split("/")[::-1]
        target = "/".join(found)
        exists = _fold(target) in self.files or target in self.folders
        owned = path.split("/")[:2] in self._owned and found[:2] in self._owned and len(found) > 2
        return target if exists and owned else None


def find_manifest_problem(bundle: Bundle) -> str | None:
    """Return why the manifest names something outside of the bundle, or the same file twice."""
    if problem := find_path_problem(bundle.files):
        return problem
    tree = ManifestTree(bundle)
    for file in bundle.files:
        if file.link is not None and tree.resolve_link(file.path) is None:
            return f"the link {file.path} leads out of it"
    return _find_folder_problem(bundle, tree)


def find_path_problem(files: Sequence[BundledFile]) -> str | None:
    """Return which path leads out of the bundle, is listed twice, or is below a file."""
    seen: set[str] = set()
    for file in files:
        if not is_plain_path(file.path):
            return f"the path {file.path} leads out of it"
        if (key := _fold(file.path)) in seen:
            return f"it lists {file.path} twice, or another name that differs only in case"
        if key in (_fold(MANIFEST), _fold(SUMS)) or file.size_bytes < 0:
            return f"its entry for {file.path} is not valid"
        seen.add(key)
    for file in files:
        if blocked := next((above for above in _list_parents(file.path) if _fold(above) in seen), None):
            return f"the path {file.path} is below {blocked}, which is not a folder"
    return None


def _find_folder_problem(bundle: Bundle, tree: ManifestTree) -> str | None:
    for name in bundle.prepared:
        record = tree.files.get(f"{PREPARED}/{name}/{PREPARED_MANIFEST}")
        if _PREPARED_NAME.fullmatch(name) is None or record is None or record.link is not None:
            return f"the converted weights {name} are not one of its folders"
    for path in (bundle.plan.source or bundle.plan.model).files:
        entry = tree.files.get(_fold(path)) if is_plain_path(path) else None
        if entry is None or entry.link is not None or not path.startswith(f"{MODEL}/"):
            return f"the model's file {path} is not one of its files"
    return None


def _list_parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def list_unlisted(files: Sequence[BundledFile], root: Path) -> Iterator[str]:
    """Yield every file and link below `root` that the manifest does not list."""
    listed = {file.path for file in files} | {MANIFEST, SUMS}
    for folder, folders, names in os.walk(root):
        above = Path(folder)
        for name in sorted([*names, *(name for name in folders if (above / name).is_symlink())]):
            if (path := (above / name).relative_to(root).as_posix()) not in listed:
                yield path


def find_file_problem(file: BundledFile, root: Path) -> str | None:
    """Compare type and size of a file with its manifest entry, without following any link."""
    path = root / file.path
    if path.parent.resolve() != root.resolve() / Path(file.path).parent:
        return "is behind a link"
    try:
        found = path.lstat()
    except OSError:
        return "is missing"
    if file.link is not None:
        same = stat.S_ISLNK(found.st_mode) and os.readlink(path) == file.link  # noqa: PTH115 - Path changes the text
        return None if same else "is not the link that was packed"
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file"
    if found.st_mode & (stat.S_ISUID | stat.S_ISGID):
        return "is a setuid or setgid program"
    if found.st_size != file.size_bytes:
        return f"has {found.st_size:,} bytes instead of {file.size_bytes:,}"
    return None


def list_members(archive: tarfile.TarFile, path: Path) -> dict[str, tarfile.TarInfo]:
    """Return the archive's files and links by their path in the bundle; refuse an archive with anything else."""
    found: dict[str, tarfile.TarInfo] = {}
    end, last = path.stat().st_size, -1
    for member in archive:
        if member.offset <= last or member.size < 0 or member.offset_data + member.size > end:
            raise tarfile.ReadError("a member's position or size is not possible")
        last = member.offset
        top, _, inner = member.name.partition("/")
        if member.isdir() and top == TOP and (not inner or is_plain_path(inner)):
            continue
        if top != TOP or not is_plain_path(inner):
            raise make_unsafe_bundle(path, f"the archive's path {member.name} leads out of it")
        if not (member.isreg() or member.issym()) or member.issparse() or member.mode & 0o7000:
            raise make_unsafe_bundle(path, f"{member.name} is neither a plain file nor a symbolic link")
        if (key := _fold(inner)) in found:
            raise make_unsafe_bundle(path, f"the archive contains {member.name} twice")
        found[key] = member
    return {member.name.partition("/")[2]: member for member in found.values()}


def check_pins(text: str, path: Path) -> None:
    """Refuse requirements that would install anything but the bundle's own wheels: another URL, file or option."""
    for line in text.splitlines():
        if _PIN.fullmatch(line) is None:
            raise make_unsafe_bundle(path, f"{line!r} is not a package with its version and hash")


def _fold(path: str) -> str:
    """Return the same key for names that are the same file on a file system that ignores case."""
    return unicodedata.normalize("NFC", path).casefold()
