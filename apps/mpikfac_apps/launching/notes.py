"""Forward a job's output, but not MPI's notes about how the job ended.

The program that runs in the job already reports its error, which MPI's notes would only repeat, in
fourteen lines.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress

DASHES, SIGNS = b"-" * 74, b"=" * 83  # rules above and below a note: of Open MPI, and of MPICH
END = rb"(?<=[^\n])\n"  # the end of a line; MPICH begins a note with an empty line
LATE = 0.3  # seconds for which a rule or a partial line is held back; MPI writes a note all at once
ENDS = (
    b"exited with non-zero status",
    b"a non-zero exit code",
    b"MPI_ABORT was invoked",
    b"has exited due to process rank",
    b"exited on signal",
    b"BAD TERMINATION",
)
"""Strings that identify the notes that MPI prints between two rules, `DASHES` or `SIGNS`."""
LINES = re.compile(
    rb"application called MPI_Abort\(|YOUR APPLICATION TERMINATED WITH THE EXIT|"
    rb"This typically refers to a problem with your app|Please see the FAQ page for debugging|"
    rb"\[mpiexec@\S+\] (Sending Ctrl-C|Press Ctrl-C)"
)
"""A pattern for lines of notes that MPI prints without rules."""
KILLED = re.compile(
    rb"process rank (?P<rank>\d+) .*?on node (?P<node>\S+) exited on signal (?P<signal>\d+)|"
    rb"(\(signal|KILLED BY SIGNAL:) (?P<number>\d+)"
)


class Output:
    """An output stream of a job, as written by the MPI launcher.

    Args:
        target: the descriptor to which the stream is forwarded.

    Attributes:
        spoken: whether a line that begins with "mpikfac" has been forwarded.
        killed: the match of `KILLED` in a note, if a signal has ended a rank.
    """

    def __init__(self, target: int) -> None:
        self.spoken = False
        self.killed: re.Match[bytes] | None = None
        self._target = target
        self._note: list[bytes] = []  # the lines of a note whose lower rule has not been read yet
        self._line = b""  # the unwritten part of the current line
        self._begun = False  # whether part of the current line has been written
        self._dropped = False  # whether the last output was a note
        self._waits = 0.0  # monotonic time since which output has been held back

    def feed(self, content: bytes) -> None:
        """Receive what the launcher has written; forward complete lines that belong to no note."""
        if not (self._note or self._line):
            self._waits = time.monotonic()
        *lines, self._line = re.split(END, self._line + content)
        for line in lines:
            self._take(line)

    def release(self, at_end: bool = False) -> None:
        """Forward what has been held back for `LATE` seconds, or everything at the end."""
        if at_end or time.monotonic() - self._waits > LATE:
            self._pass(b"".join(self._note) + self._line)
            self._note, self._line = [], b""

    def _take(self, line: bytes) -> None:
        """Forward a line, with the empty lines above it, or add it to a note."""
        text = line.strip(b"\0\r\n")  # Open MPI ends some notes with a NUL byte
        if LINES.search(text):
            self.killed = KILLED.search(text) or self.killed
            self._pass(line.removesuffix(line.lstrip(b"\n")))
        elif self._note and text == rule_of(self._note[0]):
            self._end_note(line)
        elif self._note or rule_of(line):
            self._note.append(line + b"\n")
        else:
            self._pass(line + b"\n")

    def _end_note(self, rule: bytes) -> None:
        """Drop the text above `rule` if it is a note; otherwise forward it: a note may follow."""
        text = b" ".join(b"".join(self._note).split())
        if any(words in text for words in ENDS):
            self.killed = KILLED.search(text) or self.killed
            self._pass(self._above())
            self._note, self._dropped = [], True
        else:
            self._pass(b"".join(self._note))
            self._note = [rule + b"\n"]

    def _above(self) -> bytes:
        """Return what precedes the upper rule of a note: a rank's unfinished line, if any."""
        rule = rule_of(self._note[0])
        above = self._note[0].strip(b"\0").rstrip(b"\r\n").removesuffix(rule)
        if rule == SIGNS:
            above = above.lstrip(b"\n")  # MPICH's own empty line
        unfinished = above.strip(b"\n") if above else self._begun
        return above + b"\n" if unfinished else above

    def _pass(self, content: bytes) -> None:
        """Write lines, or a part of a line, to the target."""
        if self._dropped:
            content = content.lstrip(b"\0")
        if not content:
            return
        self._dropped = False
        self.spoken |= not self._begun and content.lstrip(b"\n").startswith(b"mpikfac")
        self._begun = not content.endswith(b"\n")
        with suppress(OSError):  # the reader has exited
            while content:
                content = content[os.write(self._target, content) :]


def rule_of(line: bytes) -> bytes:
    """Return the rule at the end of a line; b"" if there is no rule, or only a longer one."""
    text = line.strip(b"\0\r\n")
    rule = next((rule for rule in (DASHES, SIGNS) if text.endswith(rule)), b"")
    return b"" if text.removesuffix(rule).endswith(rule[:1] or b" ") else rule
