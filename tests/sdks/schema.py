"""Holds the schema that `lessor check --schema` prints against configurations: prints what it says of each."""

import json
import sys
import tomllib

from jsonschema import Draft202012Validator

schema = json.loads(open(sys.argv[1]).read())
Draft202012Validator.check_schema(schema)
for file in sys.argv[2:]:
    with open(file, "rb") as toml:
        found = Draft202012Validator(schema).iter_errors(tomllib.load(toml))
        print(json.dumps([f"{error.json_path}: {error.message}" for error in found]))
