"""Format the records of phosd's log, which have users' text in them: paths, names, errors.

Where the log is no journal, a line end in a path would begin a line that phosd never wrote, and an
escape would control the terminal of whoever reads it.
"""

import logging
from collections.abc import Iterator

from phosd.plain_text import plain

_INDENT = "    "


class LogFormatter(logging.Formatter):
    """Formats a record as one line without control characters. The lines of a traceback follow,
    indented, so that none of them looks like a record: an error's text has line ends, too.
    """

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        return "\n".join((plain(self.formatMessage(record)), *self._further(record)))

    def _further(self, record: logging.LogRecord) -> Iterator[str]:
        # Not what another formatter has left in the record (``exc_text``): it escapes nothing.
        texts = [self.formatException(record.exc_info)] if record.exc_info else []
        texts += [self.formatStack(record.stack_info)] if record.stack_info else []
        for text in texts:
            yield from (_INDENT + plain(line) for line in text.split("\n"))
