"""Pages on which a reader moves things, without installing anything.

    python -m book.playground          computes the tables again, into book/static/playground

Every number that such a page shows was computed here, by the course's own code, for every position
of its sliders. JavaScript looks it up and draws, and knows no formula. So the pages work from a
folder, where a browser runs no Python, and the test compares what is shown with what Python gives.
"""
