"""Documents are checked against the JSON schemas beside this file, when written and when read."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import jsonschema

from carry.errors import CarryError

_FOLDER = Path(__file__).with_name("schemas")


def fault_in(document: object, name: str) -> str | None:
    """What is wrong with `document` by `schemas/<name>.schema.json`, in one line; None when nothing is."""
    error = jsonschema.exceptions.best_match(_validator(name).iter_errors(document))
    if error is None:
        return None
    message = " ".join(error.message.split())
    return f"{error.json_path}: {message if len(message) < 200 else message[:200] + '…'}"


def write_document(document: object, name: str, path: Path) -> None:
    """Write `document` to `path` whole or not at all. Raises CarryError where the schema `name` forbids it."""
    wrong = fault_in(document, name)
    if wrong:
        raise CarryError(f"the {name} would be malformed at {wrong}")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(beside, path)


@functools.cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((_FOLDER / f"{name}.schema.json").read_bytes())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)
