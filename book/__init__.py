"""The course as a book for the browser: `make book`."""
