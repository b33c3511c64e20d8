"""The README.txt and the scripts in a bundle for a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bedplate.deploy.air_gap import IMAGES, MODELS
from bedplate.values.bundle import MANIFEST, SUMS, ClusterBundle, ClusterModel
from bedplate.values.quoting import join_posix_shell, quote_posix_shell
from bedplate.values.units import format_size

PLATFORM, LAYOUT, CARRIED, BUILT, FETCHED = "platform", "bedplate", "images", "built", "FETCHED.SHA256SUMS"
"""Paths in the bundle: the emitted files; OCI layouts of bedplate, of other images and of built ones; hashes."""

_README = """bedplate bundle for an air-gapped cluster ({target})

Made {made_at} by bedplate {version}.

1. With network access: ./fetch.sh downloads what the bundle lacks: {lacks}.
   It needs skopeo{hf}. Options are given to skopeo copy: ./fetch.sh --src-creds USER:PASSWORD
2. Copy this folder to the site, and check the copy:
      sha256sum --check --quiet {sums}; sha256sum --check --quiet {fetched}
3. At the site: ./push.sh pushes the images to the mirror. It needs skopeo. Options are given to skopeo copy.
4. At the site: create the namespace, and the Secrets that the headers of {platform}/*.yaml name. Then run ./apply.sh.
   It needs kubectl. It applies the volumes and Jobs, copies the models into the pods of the Jobs, compares their hashes
   there, waits for the Jobs, and applies the rest.

All scripts can be run again; what is complete is not copied again.

Contents
  {platform}/    the files for the cluster; {images} lists the images, {models} the models
{contents}  {manifest}    the manifest: images, models, and every file with its size and sha256
{by_hand}"""

_FETCH = """#!/bin/sh
# Downloads what the bundle lacks. Run it with network access. It needs {needs}. Options are given to skopeo copy.
set -eu
cd "$(dirname "$0")"
{steps}
find {folders} -type f -exec sha256sum {{}} + > {fetched}
"""

_PUSH = """#!/bin/sh
# Pushes the images to the mirror. Run it at the site. It needs skopeo. Options are given to skopeo copy.
set -eu
cd "$(dirname "$0")"
{steps}
"""

_APPLY = """#!/bin/sh
# Applies the volumes and the Jobs that fill them, copies the models, and applies the rest. It needs kubectl.
set -eu
cd "$(dirname "$0")"
namespace={namespace}

run_in_pod() {{  # COMMAND: in the container that waits for the files
    kubectl exec -i -n "$namespace" -c wait "$pod" -- "$@"
}}

find_pod() {{
    pod=$(kubectl get pod -n "$namespace" -l "job-name=$1" --field-selector=status.phase=Pending -o name | head -n 1)
    [ -n "$pod" ] && run_in_pod true < /dev/null > /dev/null 2>&1
}}

copy_model() {{  # JOB FOLDER PATH MARKER: the files of a folder to a path on the volume of a Job
    if [ "$(kubectl get job "$1" -n "$namespace" -o 'jsonpath={{.status.succeeded}}')" = 1 ]; then
        echo "$1 is complete"
        return
    fi
    if [ ! -d "$2" ]; then
        echo "error: $2 is not in the bundle" >&2
        echo "hint: run ./fetch.sh where there is network access, and copy $2 here" >&2
        exit 1
    fi
    echo "copying $2 to $3 ($1)"
    until find_pod "$1"; do
        echo "waiting for a pod of $1"
        sleep 5
    done
    if run_in_pod test -e "$4" < /dev/null; then
        return
    fi
    run_in_pod mkdir -p "$3" < /dev/null
    (cd "$2" && tar -cf - -- *) | run_in_pod tar -xf - -C "$3"
    cat {sums} {fetched} 2> /dev/null | sed -n "s|^\\([0-9a-f]*\\)  $2/|\\1  |p" |
        run_in_pod sh -c 'cd "$1" && sha256sum --check --quiet' sh "$3"
    run_in_pod touch "$4" < /dev/null
}}

{first}
{steps}
{rest}
"""


def write_readme(bundle: ClusterBundle, lacks_image: str | None) -> str:
    """`lacks_image`: the gateway's image, if the bundle was made without a base for it."""
    missing = [one for one in bundle.models if one.size_bytes is None]
    lacks = [f"{len(bundle.images)} images"] if bundle.images else []
    lacks += [f"{len(bundle.built)} images that are built"] if bundle.built else []
    lacks += [f"{len(missing)} models"] if missing else []
    by_hand = (
        f"\nNot included: {lacks_image}. Build it from bedplate's Dockerfile, and push it.\n" if lacks_image else ""
    )
    own, present = bundle.own_image, sum(one.size_bytes or 0 for one in bundle.models)
    contents = f"  models/      {format_size(present)}\n" if present else ""
    contents += (
        f"  {LAYOUT}/    the image {own.name} ({own.architecture}) as an OCI layout\n" if own is not None else ""
    )
    return _README.format(
        target=bundle.target,
        made_at=bundle.made_at,
        version=bundle.bedplate,
        lacks=", ".join(lacks) or "nothing",
        hf=" and hf (pip install huggingface_hub)" if missing else "",
        sums=SUMS,
        fetched=FETCHED,
        platform=PLATFORM,
        images=IMAGES,
        models=MODELS,
        contents=contents,
        manifest=MANIFEST,
        by_hand=by_hand if lacks_image is not None else "",
    )


def write_fetch_script(bundle: ClusterBundle, architectures: Sequence[str], contexts: Mapping[str, str]) -> str:
    """Write the download of images and models; `contexts` has the folder of the Dockerfile of each built image."""
    skopeo = "skopeo copy --all"
    if len(architectures) == 1:
        skopeo = f"skopeo --override-os linux --override-arch {architectures[0]} copy"
    steps = [f'{skopeo} "$@" {_name_source(one.source)} {_name_carried(one.target)}' for one in bundle.images]
    for number, name in enumerate(bundle.built):
        replaced = [f"--build-context={one.target}=docker-image://{one.source}" for one in bundle.images]
        to = f"type=oci,tar=false,dest={BUILT}/{number}"
        steps.append(join_posix_shell(["docker", "buildx", "build", *replaced, "--output", to, contexts[name]]))
    missing = list({one.folder: one for one in bundle.models if one.size_bytes is None}.values())
    steps += [line for one in missing for line in _write_download(one)]
    folders = [*([CARRIED] if bundle.images else []), *([BUILT] if bundle.built else [])]
    folders += [one.folder for one in missing]
    needs = [
        "skopeo",
        *(["docker"] if bundle.built else []),
        *(["hf (pip install huggingface_hub)"] if missing else []),
    ]
    return _FETCH.format(
        needs=", ".join(needs), steps="\n".join(steps), folders=join_posix_shell(folders), fetched=FETCHED
    )


def _write_download(model: ClusterModel) -> Iterator[str]:
    revision = ("--revision", model.revision) if model.revision is not None else ()
    yield join_posix_shell(["hf", "download", model.name, *model.files, *revision, "--local-dir", model.folder])
    yield f"rm -rf {quote_posix_shell(f'{model.folder}/.cache')}"


def write_push_script(bundle: ClusterBundle) -> str:
    steps = [f'skopeo copy --all "$@" {_name_carried(one.target)} {_name_source(one.target)}' for one in bundle.images]
    steps += [f'skopeo copy "$@" oci:{BUILT}/{number} {_name_source(name)}' for number, name in enumerate(bundle.built)]
    if bundle.own_image is not None:
        tag = bundle.own_image.name.rpartition(":")[2]
        steps.append(f'skopeo copy "$@" oci:{LAYOUT}:{tag} {_name_source(bundle.own_image.name)}')
    return _PUSH.format(steps="\n".join(steps))


def _name_source(name: str) -> str:
    return quote_posix_shell(f"docker://{name}")


def _name_carried(target: str) -> str:
    return quote_posix_shell(f"oci:{CARRIED}:{target}")


def write_apply_script(
    bundle: ClusterBundle, jobs: Mapping[str, str], namespace: str, commands: tuple[str, str, str]
) -> str:
    """Write the steps on the cluster; `jobs` has the Job of each service that fills its volume."""
    steps = [
        join_posix_shell(["copy_model", jobs[one.service], one.folder, one.path, one.marker]) for one in bundle.models
    ]
    first, *rest = commands
    return _APPLY.format(
        namespace=quote_posix_shell(namespace), sums=SUMS, fetched=FETCHED, first=first, steps="\n".join(steps),
        rest="\n".join(rest),
    )  # fmt: skip
