"""What MkDocs does differently (`hooks` in mkdocs.yml): headings get the anchors that GitHub gives
them, which links in the pages name.
"""

import re
from typing import Any


def anchor(heading: str, _separator: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def on_config(config: Any) -> None:
    """Take these anchors."""
    config.mdx_configs["toc"]["slugify"] = anchor
