"""Authorise callers: polkit decides where it runs, otherwise owners and root may act.

The caller is named to polkit by its connection name, which is never reused; a pid might belong to
another process by the time polkit looks. A program that asks for its own checkpoint has none, and
is named with its start time. Root is always allowed.
"""

import asyncio
import enum
import itertools
import logging
from collections.abc import Mapping

from phosd.bus import CallError, Connection, Variant
from phosd.errors import NotAuthorized, Timeout
from phosd.service.dbus.caller import Caller

QUICK = 25.0
"""Seconds to wait for polkit when no password is asked for."""
READING = 3.0
"""Seconds to wait for polkit about reading other users' objects: a list waits for it."""
SILENCE = 60.0
"""Seconds for which polkit is not asked about reading again after it has not answered in time."""
SLOW = 300.0
"""Seconds to wait for polkit when a user may type a password."""
REMEMBERED = 5.0
"""Seconds for which a verdict about reading other users' objects is cached."""

_NAME = "org.freedesktop.PolicyKit1"
_AUTHORITY = (f"/{_NAME.replace('.', '/')}/Authority", f"{_NAME}.Authority")
_MAY_ASK_USER = 1
_ABSENT = frozenset(
    {
        "org.freedesktop.DBus.Error.ServiceUnknown",
        "org.freedesktop.DBus.Error.NameHasNoOwner",
        "org.freedesktop.DBus.Error.Spawn.ServiceNotFound",
        "org.freedesktop.systemd1.NoSuchUnit",
        "org.freedesktop.systemd1.UnitMasked",
    }
)
"""D-Bus errors that mean that polkit does not run."""
_log = logging.getLogger(__name__)


class Action(enum.StrEnum):
    """An action that polkit rules on, for a user's own objects and for those of others."""

    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    VERIFY = "verify"
    DELETE = "delete"
    MIGRATE = "migrate"
    CANCEL = "cancel"
    RECOVER = "recover"
    EXPORT = "export"
    IMPORT = "import"

    def on(self, *, own: bool) -> str:
        """Return polkit's name of the action."""
        return f"org.phos.{self}" if own else f"org.phos.{self}-others"


INSPECT = "org.phos.inspect-others"


class _Verdict(enum.Enum):
    YES = enum.auto()
    NO = enum.auto()
    ASK = enum.auto()
    """Allowed after authentication."""
    ABSENT = enum.auto()
    """Polkit does not run."""


class Rights:
    """Asks polkit about callers. Use it on the event loop only."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._checks = itertools.count(1)
        self._inspecting: dict[str, tuple[float, bool]] = {}
        self._silent_until = 0.0
        self._cancelling: set[asyncio.Task[None]] = set()

    async def require(
        self, caller: Caller, action: Action, owner: int, what: str, **details: str
    ) -> int:
        """Raise :class:`NotAuthorized` unless the caller may perform an action on ``owner``'s
        object.

        ``what`` names the object in the error; polkit rules see ``details``. Returns the user id
        whose rights the engine applies: the caller's own, or root's when the object is another
        user's.
        """
        if caller.uid == 0:
            return 0
        own = caller.uid == owner
        name = action.on(own=own)
        verdict = await self._check(caller, name, details | {"owner": str(owner)})
        if verdict is _Verdict.YES or (verdict is _Verdict.ABSENT and own):
            return owner if own else 0
        told = (
            f"uid {caller.uid} may not {action} {what}"
            if own
            else (f"{what} belongs to uid {owner}")
        )
        if verdict is _Verdict.ASK:
            hint = f"ask as root, or let polkit ask for a password ({name})"
        elif verdict is _Verdict.ABSENT:
            hint = "ask as its owner or as root"
        else:
            hint = f"ask as root, or have polkit allow {name}"
        raise NotAuthorized(told, hint=hint)

    async def inspects(self, caller: Caller) -> bool:
        """Whether the caller may read other users' objects. Never asks for a password.

        While polkit does not answer, nobody but root may.
        """
        if caller.uid == 0:
            return True
        now = asyncio.get_running_loop().time()
        if now < self._silent_until:
            return False
        until, known = self._inspecting.get(caller.name, (0.0, False))
        if now < until:
            return known
        quiet = Caller(caller.uid, caller.name)
        try:
            known = await self._check(quiet, INSPECT, {}, READING) is _Verdict.YES
        except NotAuthorized as error:
            _log.warning("%s", error)
            known = False
        except Timeout as error:
            if now >= self._silent_until:  # else another caller has met and told it meanwhile
                _log.warning("%s", error)
            known, self._silent_until = False, now + SILENCE
        self._inspecting = {n: v for n, v in self._inspecting.items() if v[0] > now}
        self._inspecting[caller.name] = (now + REMEMBERED, known)
        return known

    async def require_sight(self, caller: Caller, owner: int, what: str) -> None:
        """Raise :class:`NotAuthorized` unless the caller may read ``owner``'s object."""
        if not caller.may_touch(owner) and not await self.inspects(caller):
            raise NotAuthorized(
                f"{what} belongs to uid {owner}", hint="ask as its owner or as root"
            )

    async def _check(
        self,
        caller: Caller,
        action: str,
        details: Mapping[str, str],
        patience: float | None = None,
    ) -> _Verdict:
        subject = _subject(caller)
        flags = _MAY_ASK_USER if caller.interactive else 0
        ticket = f"phosd-{next(self._checks)}"
        if patience is None:
            patience = SLOW if caller.interactive else QUICK
        try:
            ((allowed, challenge, _),) = await self._connection.call(
                *_AUTHORITY,
                "CheckAuthorization",
                "(sa{sv})sa{ss}us",
                subject,
                action,
                dict(details),
                flags,
                ticket,
                destination=_NAME,
                patience=patience,
            )
        except asyncio.CancelledError:
            self._cancel(ticket)
            raise
        except CallError as error:
            if error.name in _ABSENT:
                return _Verdict.ABSENT
            if error.name == "org.freedesktop.DBus.Error.NoReply":
                self._cancel(ticket)
                raise Timeout(
                    f"polkit gave no answer about {action} within {patience:.0f} s",
                    hint="ask again, or as root",
                ) from error
            raise NotAuthorized(
                f"polkit could not decide about {action}: {error.text}",
                hint="ask as root, or have systemd/org.phos.policy installed",
            ) from error
        if allowed:
            return _Verdict.YES
        return _Verdict.ASK if challenge else _Verdict.NO

    def _cancel(self, ticket: str) -> None:
        """Cancel a check, and with it the password dialogue that it may have opened."""

        async def cancel() -> None:
            try:
                await self._connection.call(
                    *_AUTHORITY, "CancelCheckAuthorization", "s", ticket, destination=_NAME
                )
            except CallError as error:  # it was answered meanwhile
                _log.debug("polkit did not take back %s: %s", ticket, error.text)

        task = asyncio.get_running_loop().create_task(cancel())
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)


def _subject(caller: Caller) -> list[object]:
    if caller.process is None:
        return ["system-bus-name", {"name": Variant("s", caller.name)}]
    details = {
        "pid": Variant("u", caller.process.pid),
        "start-time": Variant("t", caller.process.start_time),
        "uid": Variant("i", caller.uid),
    }
    return ["unix-process", details]
