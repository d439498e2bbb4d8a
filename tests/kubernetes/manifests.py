"""Reads YAML files as an API server reads them, holds each object against the schemas of Kubernetes in strict mode, and
prints all objects as one JSON list: manifests.py VERSION,… FILE…

Stricter than the server in two things that it takes without a word: a key that stands twice, and a bare word such as
`n` or `off`, which YAML takes for a truth value."""

import json
import sys

import kubernetes_validate
import yaml

WORDS = {"y", "n", "yes", "no", "on", "off"}
# Not of Kubernetes itself, so there is no schema here.
FOREIGN = ("cert-manager.io/", "kustomize.config.k8s.io/")


class Strict(yaml.SafeLoader):
    def construct_mapping(self, node, deep=False):
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.MarkedYAMLError(None, None, f"{name} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)

    def compose_scalar_node(self, anchor):
        node = super().compose_scalar_node(anchor)
        if node.style is None and node.value.lower() in WORDS:
            raise yaml.MarkedYAMLError(None, None, f"{node.value} is to be quoted", node.start_mark)
        return node


versions, files = sys.argv[1].split(","), sys.argv[2:]
objects, mistakes = [], []
for file in files:
    try:
        with open(file, encoding="utf-8") as text:
            found = [thing for thing in yaml.load_all(text, Strict) if thing is not None]
    except yaml.YAMLError as error:
        sys.exit(f"{file}: {error}")
    objects += found
    for thing in found:
        if thing.get("apiVersion", "").startswith(FOREIGN):
            continue
        what = f"{file}: {thing.get('kind')} {thing.get('metadata', {}).get('name')}"
        for version in versions:
            try:
                used = kubernetes_validate.validate(thing, version, strict=True)
                assert used == version, f"the schemas used are those of {used}"
            except kubernetes_validate.ValidationError as error:
                mistakes.append(f"{what}: {version}: /{'/'.join(map(str, error.path))}: {error.message}")
            except kubernetes_validate.SchemaNotFoundError:
                mistakes.append(f"{what}: {version}: no such kind")
if mistakes:
    sys.exit("\n".join(mistakes))
json.dump(objects, sys.stdout)
