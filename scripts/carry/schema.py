"""Documents are checked against the JSON schemas beside this file, when written and when read."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jsonschema

_FOLDER = Path(__file__).with_name("schemas")


def fault_in(document: object, name: str) -> str | None:
    """What is wrong with `document` by `schemas/<name>.schema.json`, in one line; None when nothing is."""
    error = jsonschema.exceptions.best_match(_validator(name).iter_errors(document))
    if error is None:
        return None
    message = " ".join(error.message.split())
    return f"{error.json_path}: {message if len(message) < 200 else message[:200] + '…'}"


@functools.cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((_FOLDER / f"{name}.schema.json").read_bytes())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)
