"""`python -m book.playground`."""

from book.playground.tables import write

write()
