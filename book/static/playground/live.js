/* The course's own Python, run in this page: answers to what a visitor does. */
window.PlaygroundPython = (function () {
  "use strict";
  const BEGIN = `
from browser import window
try:
    import json
    import book.playground.live as live
except Exception as error:
    window.PlaygroundPython.failed(str(error))
else:
    window.PlaygroundPython.started(lambda name, asked: json.dumps(live.answer(name, json.loads(asked))))
`;
  const own = { ask, started: null, failed: null };
  let python = null;

  async function unpacked(words) {
    const bytes = Uint8Array.from(atob(words), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  function script(words, attributes) {
    const made = document.createElement("script");
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = words;
    document.head.appendChild(made);
    return made;
  }

  async function begin() {
    const { python, course } = window.PLAYGROUND;
    // Brython wants to know where it was loaded from. It loads nothing more.
    window.__BRYTHON__ = { brython_path: location.href.replace(/[^/]*$/, "") };
    script(await unpacked(python), {}).remove(); // it has run
    __BRYTHON__.update_VFS(course.modules);
    script(BEGIN, { type: "text/python", id: "course-python" });
    return new Promise((started, failed) => {
      own.started = started;
      own.failed = (words) => failed(new Error(`Python could not start here: ${words}`));
      brython({ ids: ["course-python"], indexedDB: false });
    });
  }

  /* What live.answer(name, asked) returns. The first call starts Python, which takes seconds. */
  async function ask(name, asked) {
    python = python || begin();
    return JSON.parse((await python)(name, JSON.stringify(asked)));
  }

  return own;
})();
