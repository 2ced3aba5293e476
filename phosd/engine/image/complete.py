"""Check that what a manifest names is there before the manifest is."""

from collections.abc import Callable
from pathlib import Path

from phosd.engine.image.manifest import Manifest
from phosd.engine.image.usage import pack_ends
from phosd.errors import Internal


def require_complete(manifest: Manifest, folder: Path, pack_path: Callable[[int], Path]) -> None:
    """Raise :class:`Internal` before an image is published without all that it names (invariant 5):
    its packs, up to the last record that it needs, and its files in ``folder``.

    Call it after the files were written to the disk, just before the manifest is renamed.
    """
    for number, end in pack_ends([manifest]).items():
        _require(manifest, f"pack {number}", pack_path(number), end)
    for tree in manifest.trees:
        for file in tree.files:
            path = Path(tree.folder, file.path)
            _require(manifest, str(path), folder / path, file.size)


def _require(manifest: Manifest, name: str, path: Path, size: int) -> None:
    try:
        found = path.lstat().st_size
    except FileNotFoundError:
        raise incomplete(manifest.id, f"{name} is missing") from None
    if found < size:
        raise incomplete(manifest.id, f"{name} has {found} bytes instead of {size}")


def incomplete(image_id: str, why: str) -> Internal:
    """Return the error for an image that cannot be published, since something is missing."""
    return Internal(
        f"image {image_id} would be published before all that it names is there (invariant 5): "
        f"{why}",
        hint="it was not published; this is a defect of phosd, or somebody else has changed its "
        "files",
    )
