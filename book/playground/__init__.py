"""Pages on which a reader moves things, without installing anything.

    python -m book.playground          computes the tables again, into book/static/playground

Every number that such a page shows is computed by the course's own code, and JavaScript knows no
formula: it draws. Most tables were computed before, for every position of the sliders. Where a
visitor's actions are too many for that, the lessons' Python itself runs in the page (live.py). All
pages work from a folder, without a network. The tests compare what is shown with what Python gives.
"""
