#!/usr/bin/env bash
# From nothing to a streamed answer with three commands. Needs python3 (3.11 or newer) with venv, and a package index.
#   first_answer.sh [PACKAGE] [FOLDER]     PACKAGE: a requirement, a wheel or a checkout; default: bedplate
set -euo pipefail
package="${1:-bedplate}"
folder="${2:-bedplate-env}"

python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$package"
"$folder/bin/bedplate" run builtin "Why is the sky blue? Answer in two sentences."
