"""Delete images that exceed their user's retention limits, and versions of files that do."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime

from phosd.engine.criu.files.file_orders import Version
from phosd.engine.image.manifest import Manifest
from phosd.engine.image.usage import Usage
from phosd.errors import PhosError
from phosd.service.clock import age_clock
from phosd.service.history.events import Event
from phosd.service.history.history import History
from phosd.service.jobs.engine import Images
from phosd.service.jobs.job import Job
from phosd.service.jobs.limits import UserLimits, limits_of
from phosd.service.process_identity import key_of, process_key
from phosd.units import counted, human_bytes

_DAY = 86_400.0
_log = logging.getLogger(__name__)


def due(
    images: Sequence[Manifest],
    limits: UserLimits,
    kept: Collection[str],
    damaged: Collection[str],
    now: float,
    waiting: Collection[str] = (),
) -> dict[str, str]:
    """Return the images of one user that are due for deletion, oldest first, each with the reason.

    ``images`` are all images of the user, oldest first. Images in ``kept`` stay whatever the limits
    are, those that are ``waiting`` until they are too old; ``damaged`` ones do not count among the
    newest to keep. ``now`` is in seconds since the epoch.
    """
    gone: dict[str, str] = {}
    newer = 0
    of_program: Counter[str] = Counter()
    for image in reversed(images):
        waits = image.id in waiting
        if (
            limits.keep_each is not None
            and not waits
            and image.name
            and of_program[image.name] >= limits.keep_each
        ):
            newer_ones = counted(
                limits.keep_each, f"newer one of {image.name} is", f"newer ones of {image.name} are"
            )
            gone[image.id] = f"{newer_ones} kept (keep_each)"
        of_program[image.name] += image.id not in damaged
        if limits.keep is not None and not waits and newer >= limits.keep:
            gone[image.id] = f"{counted(limits.keep, 'newer one is', 'newer ones are')} kept (keep)"
        newer += image.id not in damaged
        days = (now - _created(image)) / _DAY
        if limits.keep_days is not None and days > limits.keep_days:
            gone[image.id] = f"it is {days:.1f} days old, {limits.keep_days:g} are kept (keep_days)"
    reasons = {image.id: gone[image.id] for image in images if image.id in gone.keys() - set(kept)}
    if limits.keep_bytes is None:
        return reasons
    usage = Usage(image for image in images if image.id not in reasons)
    for image in images:
        if usage.total <= limits.keep_bytes:
            break
        if image.id in reasons or image.id in kept or image.id in waiting:
            continue
        reasons[image.id] = (
            f"images take {human_bytes(usage.total)}, {human_bytes(limits.keep_bytes)} are kept "
            "(keep_bytes)"
        )
        usage.remove(image.id)
    return reasons


def old(
    images: Sequence[Manifest],
    before: float,
    keep: int,
    kept: Collection[str],
    damaged: Collection[str],
) -> list[str]:
    """Return the images of one user that were made before ``before`` (seconds since the epoch),
    oldest first, without those in ``kept`` and the newest ``keep`` good ones of each program.

    ``images`` are all images of the user, oldest first. A program with a name is one, as often as
    it was restored; of others each restored process is another one.
    """
    newer: Counter[str] = Counter()
    gone: list[str] = []
    for image in reversed(images):
        program = image.name or _first_process(image)
        if newer[program] >= keep and _created(image) < before and image.id not in kept:
            gone.append(image.id)
        newer[program] += image.id not in damaged
    return gone[::-1]


def _first_process(image: Manifest) -> str:
    root = image.root
    pid, start = (root.known_as, root.start_time) if root else (0, 0)
    return process_key(image.host.boot_id, pid, start)


def superseded(versions: Iterable[Version], most: int) -> set[str]:
    """Return the paths of all versions but the newest ``most`` of each file."""
    of_file: Counter[str] = Counter()
    gone = set()
    for version in sorted(versions, key=lambda version: version.left, reverse=True):
        of_file[version.file] += 1
        if of_file[version.file] > most:
            gone.add(version.path)
    return gone


def in_use(jobs: Iterable[Job]) -> set[str]:
    """Return the images that a job uses or is about to use."""
    claims = (c.partition(" ") for job in jobs if not job.state.ended for c in job.task.claims)
    return {name for kind, _, name in claims if kind == "image"}


def last_good(
    images: Iterable[Manifest], damaged: Collection[str], restored: Mapping[str, str]
) -> set[str]:
    """Return the newest undamaged image of each process that runs.

    ``images`` are oldest first. That of a restored process is the one that it was restored from,
    which ``restored`` has by the process's key, until there is another.
    """
    good = [image for image in images if image.id not in damaged]
    ids = {image.id for image in good}
    newest = {process: image for process, image in restored.items() if image in ids}
    for image in good:
        boot = image.host.boot_id
        newest |= {process_key(boot, p.known_as, p.start_time): image.id for p in image.processes}
    return {image for process, image in newest.items() if _lives(process)}


def left_alone(
    images: Iterable[Manifest], damaged: Collection[str], restored: Mapping[str, str]
) -> set[str]:
    """Return the images with which programs were ended that nobody has restored since: nothing else
    is left of them. ``restored`` is as of :func:`last_good`.
    """
    back = {*restored.values()}
    ended = {image.id for image in images if image.ended}
    return ended - back - set(damaged)


class Retention:
    """Deletes images that exceed the limits. Every call blocks, so keep it off the event loop."""

    def __init__(self, engine: Images, history: History) -> None:
        self._engine = engine
        self._history = history

    def enforce(self, rules: Sequence[UserLimits], in_use: Collection[str]) -> int:
        """Delete the images that are due, and return how many, and what restores have left beside
        the files of images. ``in_use`` are images that a job uses or is about to use.
        """
        if not any(rule.delete or rule.keep_versions is not None for rule in rules):
            return 0
        images = sorted(self._engine.images(), key=lambda image: image.id)
        verified = self._history.verified()
        damaged = {image for image, (_, whole) in verified.items() if not whole}
        deleted = 0
        by_owner: dict[int, list[Manifest]] = {}
        for image in images:
            by_owner.setdefault(image.owner, []).append(image)
        for owner, theirs in by_owner.items():
            limits = limits_of(rules, owner)
            if limits.keep_versions is not None:
                self._delete_versions(owner, limits.keep_versions, in_use)
            if not limits.delete:
                continue
            kept, waiting = set(in_use), set[str]()
            if limits.keep_last:
                kept |= last_good(theirs, damaged, self._history.restored)
                waiting = left_alone(theirs, damaged, self._history.restored)
            deleted += self._delete(owner, due(theirs, limits, kept, damaged, age_clock(), waiting))
        return deleted

    def _delete_versions(self, owner: int, most: int, in_use: Collection[str]) -> None:
        """Delete what restores have left of a user's files, but for the newest of each."""
        before = age_clock()
        try:
            found = self._engine.left_files(owner, before, in_use)
            gone = self._engine.remove_left_files(owner, before, in_use, superseded(found, most))
        except PhosError as error:  # their file system does not answer; there is a next time
            _log.info("what restores have left of files of uid %d stays for now: %s", owner, error)
            return
        kept = f"{counted(most, 'newer one is', 'newer ones are')} kept (keep_versions)"
        for path in gone:
            _log.info("%s was deleted: %s", path, kept)
            self._history.event(Event("file-deleted", path, kept, owner=owner))

    def _delete(self, owner: int, reasons: Mapping[str, str]) -> int:
        deleted = 0
        for image, reason in reasons.items():
            try:
                self._engine.delete_image(image)
            except PhosError as error:  # a job reads the image; it is deleted the next time
                _log.info("image %s is due for deletion, and stays for now: %s", image, error)
                continue
            _log.info("image %s was deleted: %s", image, reason)
            self._history.image_deleted(image, reason, owner)
            deleted += 1
        return deleted


def _created(image: Manifest) -> float:
    return datetime.fromisoformat(image.created).timestamp()


def _lives(process: str) -> bool:
    return key_of(int(process.split("/")[1])) == process
