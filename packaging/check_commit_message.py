"""Check the message of a commit: ``check_commit_message.py FILE``, as git's hook ``commit-msg``.

The subject is ``Area: what changed``, of at most 72 characters; the why is in the body, behind an
empty line.
"""

import re
import sys
from pathlib import Path

MOST = 72
"""Most characters of a subject."""
_AREA = re.compile(r"[A-Za-z0-9][\w.+/()-]*( [\w.+/()-]+){0,3}: \S")
_SCISSORS = re.compile(r"# -+ >8 -+")
_OF_GIT = re.compile(r"(Merge|Revert|Reapply) ")
"""Subjects that git writes itself; they quote another subject, and so may be longer."""
_AUTOSQUASH = re.compile(r"((fixup|squash|amend)! )+")


def problems(message: str) -> list[str]:
    """Return what is wrong with a message, one sentence each. Comment lines are ignored."""
    lines = []
    for line in message.splitlines():
        if _SCISSORS.match(line):
            break
        if not line.startswith("#"):
            lines.append(line.rstrip())
    while lines and not lines[0]:
        lines.pop(0)
    if not lines:
        return ["the message is empty"]
    if _OF_GIT.match(lines[0]):
        return []
    subject = _AUTOSQUASH.sub("", lines[0])
    found = []
    if len(subject) > MOST:
        found.append(f"the subject has {len(subject)} characters; {MOST} are the most")
    if not _AREA.match(subject):
        found.append('the subject names no area: begin with "Engine: " or "Tests: ", say')
    if subject.endswith("."):
        found.append("the subject ends with a full stop")
    if len(lines) > 1 and lines[1]:
        found.append("the line after the subject is not empty")
    return found


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: check_commit_message.py FILE")
    found = problems(Path(sys.argv[1]).read_text(encoding="utf-8", errors="replace"))
    for problem in found:
        print(f"commit message: {problem}", file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
