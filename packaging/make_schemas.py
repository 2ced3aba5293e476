"""Write the JSON schemas of what ``phos --json`` prints and of phosd.toml into docs/reference.

The types are those of the code (:mod:`phosd.cli.json_rows`, :class:`phosd.service.config.Config`);
what a line's key means is said in docs/reference/json.md.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec

from phosd.cli.json_rows import ROWS
from phosd.service.config import json_schema

REFERENCE = Path(__file__).parents[1] / "docs/reference"
PAGE = REFERENCE / "json.md"
LINES = REFERENCE / "phos-json.schema.json"
SETTINGS = REFERENCE / "phosd.toml.schema.json"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def files() -> dict[Path, str]:
    """Return both schemas, by their paths."""
    made = {LINES: of_lines(), SETTINGS: json_schema()}
    return {path: json.dumps(schema, indent=2) + "\n" for path, schema in made.items()}


def of_lines() -> dict[str, Any]:
    """Return the schema of a line of ``phos --json``: one of those of the commands."""
    references, kinds = msgspec.json.schema_components(ROWS.values(), ref_template="#/$defs/{name}")
    for heading, kind in ROWS.items():
        told = meanings(heading)
        for key, schema in kinds[kind.__name__]["properties"].items():
            if told.get(key):
                schema["description"] = told[key]
    return {
        "$schema": _DIALECT,
        "title": "A line of phos --json",
        "description": "Keys may be added; one that is here keeps its name, its type and its "
        "meaning.",
        "anyOf": list(references),
        "$defs": kinds,
    }


def meanings(heading: str) -> dict[str, str]:
    """Return what the page says of each key below a heading, without links."""
    (text,) = re.findall(rf"(?ms)^##+ {re.escape(heading)}$(.*?)(?=^##|\Z)", PAGE.read_text())
    rows = re.findall(r"(?m)^\| `(\w+)` \| [\w ]+ \|(.*)\|$", text)
    return {key: re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", said.strip()) for key, said in rows}
