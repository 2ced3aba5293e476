"""Every interleaving of two writers, the thread that watches copies, a mover and the device's
streams, on a model of the chunk states: each step here is one atomic step there (a
compare-and-swap, a passage under the lock, an operation of a stream).

The rules as they are save what a chunk held at the instant of arming, wake everybody and never
block for good. Each rule that is broken on purpose is found out, so the model has teeth.
"""

import enum
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import pytest

PENDING, COPYING, SAVED, SHADOWING, SHADOWED = range(5)
ORIGINAL, WRITTEN = 0, 1
HOOK = 2  # the hook's stream; the writers' are 0 and 1

T = TypeVar("T")


class Rule(enum.Enum):
    """What is done otherwise than in the hook."""

    AS_IT_IS = enum.auto()
    ON_THE_WRITERS_STREAM = enum.auto()
    ON_THE_WRITERS_STREAM_NOBODY_WAITS = enum.auto()
    LATER_WRITERS_DO_NOT_WAIT = enum.auto()
    RECORDED_AFTER_THE_LOCK = enum.auto()
    MARKED_WITHOUT_COMPARING = enum.auto()
    SHADOWED_WHEN_ENQUEUED = enum.auto()
    SAVED_WHEN_BEGUN = enum.auto()
    SLOTS_FREED_WHEN_SHADOWED = enum.auto()
    PROGRESS_READ_AFTER_LOOKING = enum.auto()
    NO_WAKE_AFTER_SAVING = enum.auto()
    POSTED_BEFORE_ASKING = enum.auto()


@dataclass(frozen=True)
class Setting:
    """What there is: chunks that each writer writes, slots, and whether the mover saves only what
    is asked for. With ``spins``, the first writer's stream waits for the second writer's work.
    """

    writes: tuple[tuple[int, ...], tuple[int, ...]]
    slots: int
    lazy: bool = False
    spins: bool = False

    @property
    def chunks(self) -> int:
        """How many there are."""
        return 1 + max(chunk for writer in self.writes for chunk in writer)


class Word(NamedTuple):
    """A chunk's word."""

    state: int = PENDING
    slot: int = 0
    urgent: bool = False


class Slot(NamedTuple):
    """A shadow slot: whose, and of which batch of copies; what it holds."""

    chunk: int | None = None
    batch: int = 0
    content: tuple[int, int] | None = None


class Writer(NamedTuple):
    """A thread within ``before_write``: where it is, and what it has found so far."""

    at: str = "progress"
    place: int = 0
    seen: int = 0
    blocked: bool = False
    batch: int = 0
    fresh: bool = False
    found: Word = Word()


class Mover(NamedTuple):
    """What it is doing, with which chunk, and what it has read of it."""

    at: str = "idle"
    chunk: int = 0
    read: int = 0


class State(NamedTuple):
    """All there is."""

    words: tuple[Word, ...]
    live: tuple[int, ...]
    slots: tuple[Slot, ...]
    saved: tuple[tuple[int, int] | None, ...]
    streams: tuple[tuple[tuple[str, int, int], ...], ...]
    writers: tuple[Writer, ...]
    mover: Mover = Mover()
    lock: int | None = None
    progressed: int = 0
    awake: bool = False
    batch: int = 0
    """The last batch that was enqueued."""
    passed: frozenset[int] = frozenset()
    """Batches whose event the device has reached."""
    flag: bool = False
    """That the second writer's work has run."""


def put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    """The items with another one at an index."""
    return (*items[:index], item, *items[index + 1 :])


class Model:
    """The transitions under a rule."""

    def __init__(self, setting: Setting, rule: Rule) -> None:
        self.setting = setting
        self.rule = rule

    def start(self) -> State:
        """The instant of arming."""
        chunks, slots = self.setting.chunks, self.setting.slots
        first = (("spin", 0, 0),) if self.setting.spins else ()
        return State(
            (Word(),) * chunks,
            (ORIGINAL,) * chunks,
            (Slot(),) * slots,
            (None,) * chunks,
            (first, (), ()),
            (Writer(), Writer()),
        )

    def steps(self, s: State) -> Iterator[State]:
        """Every state that one step leads to."""
        for number in (0, 1):
            yield from self.write(s, number)
        for number in (0, 1, HOOK):
            yield from self.run_stream(s, number)
        yield from self.watch(s)
        yield from self.move(s)

    # -- a writer: cow.cpp's Writer and shadows.cpp's cover() and record() ---------------------

    def write(self, s: State, n: int) -> Iterator[State]:
        w = s.writers[n]
        mine = self.setting.writes[n]

        def go(state: State = s, **changes: object) -> State:
            return state._replace(writers=put(state.writers, n, w._replace(**changes)))  # type: ignore[arg-type]

        late = self.rule is Rule.PROGRESS_READ_AFTER_LOOKING
        if w.at == "progress":
            yield go(at="look", seen=s.progressed, blocked=False)
        elif w.at == "look":  # without the lock: whether there is anything to do
            safe = all(s.words[chunk].state in (SAVED, SHADOWED) for chunk in mine)
            yield go(at="follow" if safe else "lock")
        elif w.at == "lock" and s.lock is None:
            yield go(s._replace(lock=n), at="read", place=0, fresh=False)
        elif w.at == "read":
            if w.place == len(mine):
                yield go(at="record")
            else:
                yield go(at="act", found=s.words[mine[w.place]])
        elif w.at == "act":
            yield self.act(s, n, mine[w.place])
        elif w.at == "record":
            yield from self.record(s, n)
        elif w.at == "record late":
            yield go(self.enqueue_record(s, n), at="post" if w.blocked else "follow")
        elif w.at == "post":
            changed = s._replace(awake=True)
            yield go(changed, at="wait", seen=s.progressed if late else w.seen)
        elif w.at == "wait" and s.progressed != w.seen:
            yield go(at="progress")
        elif w.at == "ask late":
            word = s.words[mine[w.place]]
            words = put(s.words, mine[w.place], word._replace(urgent=True))
            yield go(s._replace(words=words), at="wait")
        elif w.at == "follow":
            stream = s.streams[n]
            if w.batch and w.batch not in s.passed:
                stream += (("follow", w.batch, 0),)
            stream += tuple(("write", chunk, 0) for chunk in mine)
            yield go(s._replace(streams=put(s.streams, n, stream)), at="done")

    def act(self, s: State, n: int, chunk: int) -> State:
        """With the lock: what ``cover`` does about one chunk whose word it has read."""
        w, found, now = s.writers[n], s.writers[n].found, s.words[chunk]

        def go(state: State = s, **changes: object) -> State:
            return state._replace(writers=put(state.writers, n, w._replace(**changes)))  # type: ignore[arg-type]

        on = w.place + 1
        if found.state == SHADOWING:
            later = self.rule in (
                Rule.LATER_WRITERS_DO_NOT_WAIT,
                Rule.ON_THE_WRITERS_STREAM_NOBODY_WAITS,
            )
            batch = 0 if later else s.slots[found.slot].batch
            if self.rule is Rule.RECORDED_AFTER_THE_LOCK and batch > s.batch:
                batch = s.batch  # there is no such event yet
            return go(at="read", place=on, batch=max(w.batch, batch))
        if found.state == PENDING and (slot := self.free_slot(s)) is not None:
            if now != found and self.rule is not Rule.MARKED_WITHOUT_COMPARING:
                return go(at="read")
            state = SHADOWED if self.rule is Rule.SHADOWED_WHEN_ENQUEUED else SHADOWING
            stream = n if self.rule.name.startswith("ON_THE_WRITERS") else HOOK
            changed = s._replace(
                words=put(s.words, chunk, Word(state, slot, now.urgent)),
                slots=put(s.slots, slot, Slot(chunk, s.batch + 1, None)),
                streams=put(s.streams, stream, (*s.streams[stream], ("copy", chunk, slot))),
            )
            return go(changed, at="read", place=on, batch=s.batch + 1, fresh=True)
        if found.state in (PENDING, COPYING):
            if now.state not in (PENDING, COPYING):
                return go(at="read", place=on)
            if self.rule is Rule.POSTED_BEFORE_ASKING:
                return go(at="read", place=on, blocked=True)
            words = put(s.words, chunk, now._replace(urgent=True))
            return go(s._replace(words=words), at="read", place=on, blocked=True)
        return go(at="read", place=on)

    def free_slot(self, s: State) -> int | None:
        gone = (SAVED, SHADOWED) if self.rule is Rule.SLOTS_FREED_WHEN_SHADOWED else (SAVED,)
        for number, slot in enumerate(s.slots):
            if slot.chunk is None or s.words[slot.chunk].state in gone:
                return number
        return None

    def record(self, s: State, n: int) -> Iterator[State]:
        """The event, and the end of the lock."""
        w = s.writers[n]
        after = "post" if w.blocked else "follow"
        if w.fresh and self.rule is Rule.RECORDED_AFTER_THE_LOCK:
            after = "record late"
        elif w.fresh:
            s = self.enqueue_record(s, n)
        if self.rule is Rule.POSTED_BEFORE_ASKING and w.blocked:
            # The first of its chunks is the one that it asks for afterwards.
            s = s._replace(awake=True)
            w = w._replace(place=0)
            after = "ask late"
        yield s._replace(lock=None, writers=put(s.writers, n, w._replace(at=after)))

    def enqueue_record(self, s: State, n: int) -> State:
        stream = n if self.rule.name.startswith("ON_THE_WRITERS") else HOOK
        batch = s.batch + 1
        streams = put(s.streams, stream, (*s.streams[stream], ("event", batch, 0)))
        return s._replace(streams=streams, batch=batch)

    # -- the device ----------------------------------------------------------------------------

    def run_stream(self, s: State, n: int) -> Iterator[State]:
        """The next operation of a stream; a copy reads twice, so that a write may come between."""
        if not s.streams[n]:
            return
        (what, first, second), *rest = s.streams[n]
        after = s._replace(streams=put(s.streams, n, tuple(rest)))
        if what == "write":
            yield after._replace(live=put(s.live, first, WRITTEN), flag=s.flag or n == 1)
        elif what == "copy":
            again = ("copied", first, second * 2 + s.live[first])
            yield s._replace(streams=put(s.streams, n, (again, *rest)))
        elif what == "copied":
            slot, before = divmod(second, 2)
            content = (before, s.live[first])
            yield after._replace(slots=put(s.slots, slot, s.slots[slot]._replace(content=content)))
        elif what == "event":
            yield after._replace(passed=s.passed | {first})
        elif (what == "follow" and first in s.passed) or (what == "spin" and s.flag):
            yield after

    def watch(self, s: State) -> Iterator[State]:
        """The hook's thread: shadows whose event has passed are there. With the lock."""
        if s.lock is not None:
            return
        for chunk, word in enumerate(s.words):
            if word.state == SHADOWING and s.slots[word.slot].batch in s.passed:
                yield s._replace(words=put(s.words, chunk, word._replace(state=SHADOWED)))

    # -- the mover -----------------------------------------------------------------------------

    def move(self, s: State) -> Iterator[State]:
        m = s.mover
        if m.at == "idle":
            if s.awake and not any(word.urgent and word.state == PENDING for word in s.words):
                yield s._replace(awake=False)
            for chunk, word in enumerate(s.words):
                if word.state == SHADOWED:
                    content = s.slots[word.slot].content
                    saved = put(s.saved, chunk, content or (WRITTEN, WRITTEN))
                    yield s._replace(mover=Mover("mark", chunk), saved=saved)
                elif word.state == PENDING and (not self.setting.lazy or (s.awake and word.urgent)):
                    words = put(s.words, chunk, word._replace(state=COPYING))
                    yield s._replace(mover=Mover("read", chunk), words=words)
        elif m.at == "read":
            words = s.words
            if self.rule is Rule.SAVED_WHEN_BEGUN:
                words = put(s.words, m.chunk, Word(SAVED))
            mover = Mover("read again", m.chunk, s.live[m.chunk])
            yield s._replace(mover=mover, words=words)
        elif m.at == "read again":
            saved = put(s.saved, m.chunk, (m.read, s.live[m.chunk]))
            yield s._replace(mover=Mover("mark", m.chunk), saved=saved)
        elif m.at == "mark":
            yield s._replace(mover=Mover("tell", m.chunk), words=put(s.words, m.chunk, Word(SAVED)))
        elif m.at == "tell":
            more = self.rule is not Rule.NO_WAKE_AFTER_SAVING
            yield s._replace(mover=Mover(), progressed=s.progressed + more)


def explore(setting: Setting, rule: Rule) -> tuple[str | None, int]:
    """What goes wrong first, if anything, and how many states there are until then."""
    model = Model(setting, rule)
    start = model.start()
    known = {start}
    ahead = deque([start])
    while ahead:
        state = ahead.popleft()
        if any(content not in (None, (ORIGINAL, ORIGINAL)) for content in state.saved):
            return "saved wrong", len(known)
        over = True
        for after in model.steps(state):
            over = False
            if after not in known:
                known.add(after)
                ahead.append(after)
        if over and (any(w.at != "done" for w in state.writers) or any(state.streams)):
            return "stuck", len(known)
    return None, len(known)


ONE = Setting(((0,), (0,)), slots=1)
NONE = Setting(((0,), (0,)), slots=0, lazy=True)
SCARCE = Setting(((0, 1), (0,)), slots=1)
SCARCE_AND_LAZY = Setting(((0, 1), (1,)), slots=1, lazy=True)
SPINNING = Setting(((0,), (0,)), slots=1, spins=True)


@pytest.mark.parametrize(
    "setting",
    [ONE, NONE, SCARCE, SCARCE_AND_LAZY, SPINNING],
    ids=["one", "none", "scarce", "scarce-and-lazy", "spinning"],
)
def test_the_rules_save_the_instant_and_block_nobody(setting: Setting) -> None:
    wrong, states = explore(setting, Rule.AS_IT_IS)
    assert wrong is None
    assert states > 200, "the model explores next to nothing"


@pytest.mark.parametrize(
    ("rule", "setting", "what"),
    [
        (Rule.ON_THE_WRITERS_STREAM_NOBODY_WAITS, SPINNING, "saved wrong"),
        (Rule.ON_THE_WRITERS_STREAM, SPINNING, "stuck"),
        (Rule.LATER_WRITERS_DO_NOT_WAIT, ONE, "saved wrong"),
        (Rule.RECORDED_AFTER_THE_LOCK, ONE, "saved wrong"),
        (Rule.MARKED_WITHOUT_COMPARING, ONE, "saved wrong"),
        (Rule.SHADOWED_WHEN_ENQUEUED, ONE, "saved wrong"),
        (Rule.SAVED_WHEN_BEGUN, ONE, "saved wrong"),
        (Rule.SLOTS_FREED_WHEN_SHADOWED, SCARCE, "saved wrong"),
        (Rule.PROGRESS_READ_AFTER_LOOKING, NONE, "stuck"),
        (Rule.NO_WAKE_AFTER_SAVING, NONE, "stuck"),
        (Rule.POSTED_BEFORE_ASKING, NONE, "stuck"),
    ],
    ids=lambda value: value.name.lower() if isinstance(value, Rule) else "",
)
def test_a_broken_rule_is_found_out(rule: Rule, setting: Setting, what: str) -> None:
    assert explore(setting, rule)[0] == what
