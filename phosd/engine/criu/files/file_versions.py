"""What restores have left beside the files of a user's images: newer versions, and tails."""

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from phosd.engine.criu.files import file_worker
from phosd.engine.criu.files.file_orders import Orders, Version, Versions
from phosd.engine.criu.files.output_folders import Owner
from phosd.engine.image.cpu_manifest import DeclaredState
from phosd.engine.image.manifest import Manifest


def files_of(image: Manifest) -> dict[str, int]:
    """Return the files whose bytes an image holds, to be put back at a restore, by path: how
    many bytes.
    """
    return {
        file.path: file.size
        for tree in image.trees
        if tree.details is not None
        for file in tree.details.written_files
    }


def left(
    owner: Owner, images: Iterable[Manifest], used: Iterable[Manifest], before: float
) -> list[Version]:
    """Return what restores of ``images`` have left until ``before`` (seconds since the epoch). What
    restores of those in use have left is not among it: they may need it, to undo what they did.

    Raises :class:`Internal` if the work fails, and :class:`Timeout` if the user's file system does
    not answer.
    """
    return list(_work(owner, _wanted(images, used, before)))


def remove_left(
    owner: Owner,
    images: Iterable[Manifest],
    used: Iterable[Manifest],
    before: float,
    paths: Collection[str],
) -> list[str]:
    """Remove those that ``paths`` names, and return which are gone. Raises as :func:`left`."""
    if not paths:
        return []
    gone = _work(owner, replace(_wanted(images, used, before), remove=tuple(paths)))
    return [each.path for each in gone]


def _work(owner: Owner, versions: Versions) -> tuple[Version, ...]:
    if not (versions.files or versions.patterns or versions.folders):
        return ()
    orders = Orders(*owner, mark="", versions=versions)
    return file_worker.work(orders, file_worker.SHORT_TIMEOUT).versions


def _wanted(images: Iterable[Manifest], used: Iterable[Manifest], before: float) -> Versions:
    images, used = tuple(images), tuple(used)
    files = _restored(images) - _restored(used)
    states, others = _declared(images), _declared(used)
    patterns = {each for state in states for each in state.patterns}
    folders = {each for state in states for each in state.folders}
    for state in others:
        patterns -= {*state.patterns}
        folders -= {*state.folders}
    return Versions(tuple(files), before, tuple(patterns), tuple(folders))


def _restored(images: Iterable[Manifest]) -> set[str]:
    """Return the files that a restore puts back or cuts."""
    trees = [tree.details for image in images for tree in image.trees if tree.details is not None]
    written = {file.path for each in trees for file in each.written_files}
    opened = {file.path for each in trees for file in each.open_files if file.write_only}
    return written | opened


def _declared(images: Iterable[Manifest]) -> list[DeclaredState]:
    """Return what programs had declared: a restore puts aside what was made there since."""
    trees = [tree.details for image in images for tree in image.trees if tree.details is not None]
    return [each.declared for each in trees if each.declared is not None]
