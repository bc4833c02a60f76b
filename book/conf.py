"""How Sphinx makes the book out of what book/stage.py wrote.

Sphinx with MyST, because its Markdown is CommonMark with GitHub's anchors, which our pages are
written in, because notebooks become pages with what they printed, and because its search is a
script that also works from a folder, without a server.
"""

from pathlib import Path

from book import head, search

project = "The Inference Ladder"
author = "The Inference Ladder"
language = "en"
extensions = ["myst_nb", "sphinx_copybutton"]
myst_heading_anchors = 5
nb_execution_mode = "off"
nb_merge_streams = True
# a picture before its text; a widget is a picture here
nb_mime_priority_overrides = [("html", "image/png", 5), ("html", "text/html", 10)]
highlight_language = "none"
html_theme = "furo"
html_title = project
html_favicon = "_static/icon.svg"
html_static_path = ["_static"]
templates_path = ["_templates"]
html_css_files = ["book.css"]
html_js_files = [("book.js", {"defer": "defer"})]  # first the page, then what moves on it
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False  # LICENSE says it
html_theme_options = {
    "light_css_variables": {
        "font-stack--monospace": "'DejaVu Sans Mono', Menlo, monospace",
        "figure-filter": "none",
    },
    # A figure has a white ground. In the dark its lightness is turned over, and its hues stay.
    "dark_css_variables": {"figure-filter": "invert(0.92) hue-rotate(180deg)"},
}
# terms of the glossary are third-level headings below its title
suppress_warnings = ["myst.header"]


def setup(app) -> None:
    """A page loads the definitions of its language alone, and the search its index."""

    def add_glossary(app, page: str, template: str, context: dict, doctree) -> None:
        name = f"glossary-{search.language_of(page)}.js"
        app.add_js_file(name, loading_method="defer")

    def split_index(app, error: Exception | None) -> None:
        if not error:
            search.split(Path(app.outdir))

    app.connect("html-page-context", add_glossary)
    app.connect("html-page-context", head.prepare)
    app.connect("build-finished", split_index)
