"""Lock files are complete and name no index; environments are installed from them, and nothing else is accepted."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from pathlib import Path

import pytest
from tests.run.test_environments import Tiny, list_leftovers, make_wheel, own_home, wheels
from tests.run.test_environments_torch import add_requirement

from bedplate.cli.lock_files import FOLDER, LockRequest, list_requests
from bedplate.engines import EnvironmentRecipe, get_engine, load_engines
from bedplate.errors import ExternalFailure
from bedplate.progress import SilentProgress
from bedplate.run import locks
from bedplate.run.engine_listing import LockStatus, find_lock_status
from bedplate.run.environments import (
    EngineEnvironment,
    find_environment,
    get_environment_path,
    install_bare_packages,
    list_installed,
    make_environment,
)
from bedplate.run.lock_maker import LockedPackage, format_requirements, parse_parents
from bedplate.run.locks import (
    PLATFORMS,
    Lock,
    compute_recipe_digest,
    find_lock,
    find_platform,
    format_lock,
    list_hashes,
    make_bare_recipe,
    parse_lock,
    select_packages,
)
from bedplate.run.wheels import normalize_name
from bedplate.values.decision import Device

__all__ = ["own_home", "wheels"]
REQUESTS = list(list_requests())
LINE = re.compile(
    r"# [^:/]+(: .*)?|[a-z0-9-]+==[A-Za-z0-9.+!]+( ; python_version == '[\d.]+'( or python_version == '[\d.]+')*)? \\"
    r"|    --hash=sha256:[0-9a-f]{64}( \\)?"
)
needs_locks = pytest.mark.skipif(find_platform() not in PLATFORMS, reason="this platform has no lock files")


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


# the files in the repository


def read_lock(request: LockRequest) -> Lock:
    return parse_lock(request.path.read_text(encoding="utf-8"))


def test_every_recipe_has_a_current_lock_and_there_is_no_other_file() -> None:
    assert [request.path.name for request in REQUESTS if not request.is_current] == [], "run `make locks`"
    assert {path for path in FOLDER.iterdir() if path.name != "__pycache__"} == {one.path for one in REQUESTS}


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda one: one.path.stem)
def test_lock_has_the_pins_of_the_recipe_with_hashes(request_: LockRequest) -> None:
    text, lock = request_.path.read_text(encoding="utf-8"), read_lock(request_)
    assert [line for line in text.splitlines() if not LINE.fullmatch(line)] == []
    assert "://" not in text
    if lock.reason is not None:
        assert not lock.requirements
        return
    for python in lock.pythons:
        hashes = list_hashes(lock.requirements, python)
        assert hashes and all(hashes.values())
        removed = {*lock.elsewhere, *request_.recipe.removes}
        for pin in (*request_.recipe.packages, *request_.recipe.bare):
            plain = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?(==[\w.]+)", pin)
            if plain and pin not in removed:
                assert f"{normalize_name(plain[1])}{plain[2]}" in hashes
        names = [pin.partition("==")[0] for pin in hashes]
        assert len(names) == len(set(names)), "two versions of one package"
        assert not set(names) & {normalize_name(name) for name in request_.recipe.removes}


def test_no_lock_for_cpus_has_packages_for_gpus() -> None:
    for request in REQUESTS:
        names = {pin.partition("==")[0] for pin in list_hashes(read_lock(request).requirements, "3.12")}
        assert not [name for name in names if name.startswith(("nvidia-", "cuda-"))], request.path.name


@pytest.mark.parametrize("engine", [one for one in load_engines() if load_engines()[one].recipe is not None])
def test_every_engine_is_locked_or_says_why(engine: str) -> None:
    status = find_lock_status(load_engines()[engine], None)
    assert status is not None and status.locked == (status.reason is None)


@needs_locks
def test_the_engine_of_the_built_in_model_is_locked() -> None:
    assert find_lock_status(get_engine("llama.cpp"), "cpu") == LockStatus(locked=True)


def test_gpu_builds_of_pytorch_are_not_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    for engine in ("vllm", "pytorch", "exllamav3"):
        status = find_lock_status(get_engine(engine), "cuda")
        assert status is not None and "depends on the GPU and its driver" in str(status.reason)


# reading and writing


def test_a_lock_is_read_as_it_was_written() -> None:
    lock = Lock(recipe="ab", pythons=("3.11", "3.12"), elsewhere=("torch==1",), requirements="a==1 \\\n    --hash=x\n")
    assert parse_lock(format_lock("Locked packages: a", lock)) == lock
    empty = Lock(recipe="ab", reason="a has no wheel")
    assert parse_lock(format_lock("Locked packages: a", empty)) == empty


def test_wheels_that_differ_by_python_have_markers() -> None:
    pure, old, new = LockedPackage("1", ("aa",)), LockedPackage("2", ("bb", "cc")), LockedPackage("2", ("dd",))
    only = LockedPackage("3", ("ee",))
    text = format_requirements(
        {"3.11": {"p": pure, "q": old, "r": only}, "3.12": {"p": pure, "q": old}, "3.13": {"p": pure, "q": new}}
    )
    assert text == (
        "p==1 \\\n    --hash=sha256:aa\n"
        "q==2 ; python_version == '3.11' or python_version == '3.12' \\\n"
        "    --hash=sha256:bb \\\n    --hash=sha256:cc\n"
        "q==2 ; python_version == '3.13' \\\n    --hash=sha256:dd\n"
        "r==3 ; python_version == '3.11' \\\n    --hash=sha256:ee\n"
    )
    assert select_packages(text, ["r", "p"]) == text.split("q==2")[0] + "r==3" + text.rpartition("r==3")[2]


def test_reads_which_package_requires_another() -> None:
    text = (
        "filelock==4.2\n    # via\n    #   huggingface-hub\n    #   torch\n"
        "torch==2.13.0\n    # via -r wanted.in\nmpmath==1.3\n    # via sympy\n"
    )
    assert parse_parents(text) == {
        "filelock": {"huggingface-hub", "torch"}, "torch": {"-r wanted.in"}, "mpmath": {"sympy"}
    }  # fmt: skip


# installing


def lock_tiny(monkeypatch: pytest.MonkeyPatch, wheel: Path, **fields: object) -> Lock:
    """Gives Tiny a lock with the hash of a wheel."""
    assert Tiny.recipe is not None
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    requirements = f"bedplate-tiny-engine==1.0 \\\n    --hash=sha256:{digest}\n"
    given = {"recipe": compute_recipe_digest(Tiny.recipe, None), "pythons": ("3.11", "3.12", "3.13", "3.14", "3.15")}
    lock = Lock(**{**given, "requirements": requirements, **fields})  # type: ignore[arg-type]
    monkeypatch.setattr(locks, "_read_locks", lambda name, where: (lock,) if name == "tiny" else ())
    monkeypatch.setattr(locks, "find_platform", lambda: PLATFORMS[0])
    return lock


@pytest.fixture
def wheel(wheels: Path) -> Path:
    return next(wheels.glob("*.whl"))


def test_installs_from_the_lock(wheel: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock_tiny(monkeypatch, wheel)
    said = Notes()
    made = make_environment(Tiny(), said)
    assert made.locked and made.packages == ("bedplate-tiny-engine==1.0",)
    assert find_environment(Tiny()) == made and not any("locked" in note for note in said.notes)


def test_a_package_with_another_hash_is_refused(wheel: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock_tiny(monkeypatch, wheel)
    make_wheel(wheel.parent, "bedplate-tiny-engine", "1.0", {"bedplate_tiny_engine.py": "answer = 666\n"})
    with pytest.raises(ExternalFailure) as caught:
        make_environment(Tiny())
    assert "ash mismatch" in str(caught.value.cause), caught.value.cause
    assert "different file than the pinned one" in str(caught.value.hint)
    assert list_installed() == [] and list_leftovers(own_home) == []


def test_a_dependency_that_the_lock_lacks_is_not_installed(
    wheel: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(wheel.parent, "bedplate-tiny-extra", "1.0", {"bedplate_tiny_extra.py": ""})
    add_requirement(wheel, "bedplate-tiny-extra")
    lock_tiny(monkeypatch, wheel)
    assert make_environment(Tiny()).packages == ("bedplate-tiny-engine==1.0",)


def test_another_lock_has_another_environment(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Tiny.recipe is not None
    before = get_environment_path(Tiny(), Tiny.recipe)
    lock_tiny(monkeypatch, wheel)
    first = get_environment_path(Tiny(), Tiny.recipe)
    lock_tiny(monkeypatch, wheel, requirements="bedplate-tiny-engine==1.0\n")
    assert len({before, first, get_environment_path(Tiny(), Tiny.recipe)}) == 3


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"recipe": "0" * 16}, "there is no lock for these packages on linux-x86_64"),
        ({"pythons": ("3.6",)}, "there is no lock for Python 3."),
        ({"reason": "tiny has no wheel"}, "tiny has no wheel"),
    ],
)
def test_without_a_matching_lock_the_index_is_used_and_a_note_says_so(
    wheel: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], reason: str
) -> None:
    lock_tiny(monkeypatch, wheel, **fields)
    said = Notes()
    made = make_environment(Tiny(), said)
    assert not made.locked and any(f"Tiny is not locked: {reason}" in note for note in said.notes)


def test_locks_can_be_ignored(wheel: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock_tiny(monkeypatch, wheel, requirements="bedplate-tiny-engine==1.0 --hash=sha256:" + "0" * 64 + "\n")
    monkeypatch.setenv("BEDPLATE_IGNORE_LOCKS", "1")
    assert not make_environment(Tiny()).locked


def test_packages_that_the_index_lacks_are_installed_without_a_hash(
    wheel: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(wheel.parent, "bedplate-tiny-torch", "1.0", {"bedplate_tiny_torch.py": ""})
    lock_tiny(monkeypatch, wheel, elsewhere=("bedplate-tiny-torch==1.0",))
    said = Notes()
    made = make_environment(Tiny(), said)
    assert made.packages == ("bedplate-tiny-engine==1.0", "bedplate-tiny-torch==1.0") and not made.locked
    assert any("the other packages are locked" in note for note in said.notes)


def test_bare_packages_are_installed_from_their_lock(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = ["bedplate-tiny-engine==1.0", "bedplate-tiny-absent==1.0"]
    lock_tiny(monkeypatch, wheel, recipe=compute_recipe_digest(make_bare_recipe(*packages), None))
    right = wheel.read_bytes()
    make_wheel(wheel.parent, "bedplate-tiny-engine", "1.0", {"bedplate_tiny_engine.py": "answer = 666\n"})
    with pytest.raises(ExternalFailure):
        install_bare_packages("tiny", packages, tmp_path / "target", "installing", packages[:1])
    wheel.write_bytes(right)
    install_bare_packages("tiny", packages, tmp_path / "target", "installing", packages[:1])
    assert (tmp_path / "target" / "bedplate_tiny_engine.py").is_file()


def make_source_package(folder: Path, name: str, version: str, witness: Path) -> None:
    """A source package whose build backend leaves a file."""
    backend = f"""
import pathlib, zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    pathlib.Path({str(witness)!r}).touch()
    name = "{name.replace("-", "_")}-{version}"
    with zipfile.ZipFile(f"{{folder}}/{{name}}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("bedplate_tiny_source.py", "")
        wheel.writestr(f"{{name}}.dist-info/METADATA", "Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        wheel.writestr(f"{{name}}.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{{name}}.dist-info/RECORD", "")
    return f"{{name}}-py3-none-any.whl"
"""
    project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    project += f'[project]\nname = "{name}"\nversion = "{version}"\n'
    base = f"{name.replace('-', '_')}-{version}"
    with tarfile.open(folder / f"{base}.tar.gz", "w:gz") as archive:
        for file, text in {
            "pyproject.toml": project,
            "backend.py": backend,
            "PKG-INFO": "Metadata-Version: 2.1\n",
        }.items():
            member = tarfile.TarInfo(f"{base}/{file}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))


class FromSource(Tiny):
    recipe = EnvironmentRecipe(
        packages=("bedplate-tiny-source==1.0",), download_bytes=1, disk_bytes=1, check="import bedplate_tiny_source"
    )


def test_nothing_is_built_from_source_unless_asked_for(
    wheels: Path, own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    witness = tmp_path / "built"
    make_source_package(wheels, "bedplate-tiny-source", "1.0", witness)
    with pytest.raises(ExternalFailure) as caught:
        make_environment(FromSource())
    assert "BEDPLATE_ALLOW_SOURCE_BUILDS=1" in str(caught.value.hint)
    assert not witness.exists()
    monkeypatch.setenv("BEDPLATE_ALLOW_SOURCE_BUILDS", "1")
    assert make_environment(FromSource()).packages == ("bedplate-tiny-source==1.0",)
    assert witness.exists()


# a real engine


@needs_locks
def test_a_real_engine_is_installed_from_its_lock(llama_environment: EngineEnvironment) -> None:
    assert llama_environment.locked


@needs_locks
def test_a_manipulated_hash_of_a_real_engine_is_refused(
    llama_environment: EngineEnvironment, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = get_engine("llama.cpp")
    assert engine.recipe is not None
    lock, _ = find_lock(engine.id, engine.recipe)
    assert lock is not None
    digest = re.search(r"sha256:([0-9a-f]{64})", lock.requirements)
    assert digest is not None
    wrong = f"{int(digest[1], 16) ^ 1:064x}"
    changed = Lock(recipe=lock.recipe, pythons=lock.pythons, requirements=lock.requirements.replace(digest[1], wrong))
    monkeypatch.setattr(locks, "_read_locks", lambda name, where: (changed,))
    with pytest.raises(ExternalFailure) as caught:
        make_environment(engine)
    assert "Hash mismatch for `xllamacpp" in str(caught.value.cause)
    assert list_installed() == [] and list_leftovers(own_home) == []


def test_device_decides_which_lock_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("UV_TORCH_BACKEND", raising=False)
    recipe = EnvironmentRecipe(packages=("torch==2.13.0",), download_bytes=1, disk_bytes=1, check="")
    devices: tuple[Device, ...] = ("cuda", "rocm", "xpu")
    for device in devices:
        assert find_lock("any", recipe, device).lock is None
