"""Reads a JSON list of objects, and holds each against Kubernetes' schemas in strict mode, which refuses
fields that the API does not know: those of the oldest version that lessor supports, and of the newest there are.
Prints one line a mistake, and at last how many objects were held against which versions."""

import json
import sys

import kubernetes_validate

OLDEST = "1.29"

objects = json.load(sys.stdin)
versions = [OLDEST, ".".join(kubernetes_validate.latest_version().split(".")[:2])]
failed = 0
for version in versions:
    for at, thing in enumerate(objects):
        try:
            used = kubernetes_validate.validate(thing, version, strict=True)
            assert used == version, f"the schemas used are those of {used}"
        except kubernetes_validate.ValidationError as error:
            failed += 1
            print(f"{version}: object {at}: /{'/'.join(map(str, error.path))}: {error.message}")
print(f"{len(objects)} objects against {' and '.join(versions)}: {failed} mistakes")
sys.exit(1 if failed else 0)
