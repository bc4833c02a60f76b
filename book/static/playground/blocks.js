/* Lesson 12: a pool of blocks, and what a visitor does to it, by the lesson's BlockManager in this page. */
(function () {
  "use strict";
  const ui = window.PlaygroundUI;
  const box = document.getElementById("blocks");
  const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"];
  const SIDE = 52, EACH = 108, SIZE = 4; // pixels, and tokens of a block
  const TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
  const WAYS = { grow: "a token more", fork: "fork", free: "end it", out: "to the host", back: "bring it back" };
  const FIRST = [["new", 6], ["fork", 0], ["grow", 1]];
  const asked = ui.places();
  const state = { tokens: ui.within(asked.tokens, TOKENS, 5) };
  let actions = named() || FIRST;

  box.textContent = "";
  const controls = ui.element("div", { class: "controls" }, box);
  ui.slider(controls, "tokens", "a new sequence of tokens", TOKENS, state.tokens, (at) => (state.tokens = at));
  const make = ui.element("button", { id: "new", type: "button" }, controls, "make it");
  const undo = ui.element("button", { id: "undo", type: "button" }, controls, "undo");
  const said = ui.element("p", { id: "said", "aria-live": "polite" }, box, "Python starts …");
  const draw = ui.picture(box, drawBlocks);
  let found = null;
  const rows = ui.element("ul", { class: "requests" }, box);
  make.addEventListener("click", () => act("new", TOKENS[state.tokens]));
  undo.addEventListener("click", () => {
    actions = actions.slice(0, -1);
    changed();
  });

  /* What the address names: do=new6_fork0_grow1 */
  function named() {
    const words = new URLSearchParams(location.hash.slice(1)).get("do");
    if (words === null) return null;
    const found = words.split("_").filter(Boolean).map((word) => /^(new|grow|fork|free|out|back)(\d+)$/.exec(word));
    return found.every(Boolean) ? found.map(([, name, number]) => [name, +number]) : null;
  }

  function act(name, number) {
    actions = [...actions, [name, number]];
    changed();
  }

  function changed() {
    ui.keep({ ...state, do: actions.map(([name, number]) => name + number).join("_") });
    show();
  }

  function show() {
    answered().catch((error) => {
      said.textContent = error.message;
      throw error;
    });
  }

  async function answered() {
    found = await window.PlaygroundPython.ask("blocks", { actions });
    undo.disabled = !actions.length;
    make.disabled = Boolean(found.full);
    const free = found.owners.filter((count) => !count).length;
    said.textContent = `Now ${found.said}. ${free} of ${found.owners.length} blocks are free; the next one is ${found.next.length ? found.next[0] : "none"}.`;
    draw();
    rows.textContent = "";
    for (const [row, held, table] of found.tables)
      drawRow(row, `sequence ${row}: ${held} tokens in blocks ${table.join(", ")} `, ["grow", "fork", "free", "out"], found.full);
    for (const [row, held] of found.away) drawRow(row, `sequence ${row}: ${held} tokens on the host `, ["back"], found.full);
  }

  function drawBlocks(picture, width) {
    const across = width < 6 * EACH ? 3 : 6;
    ui.size(picture, width, 8 + Math.ceil(found.owners.length / across) * (SIDE + 24));
    ui.svg("title", {}, picture, "Each block with its number, its tokens, and a colour for each sequence that owns it");
    found.owners.forEach((count, block) => drawBlock(picture, (block % across) * EACH + 2, Math.floor(block / across) * (SIDE + 24) + 6, block, count));
  }

  function drawBlock(picture, x, y, block, count) {
    const owners = found.tables.filter(([, , table]) => table.includes(block)).map(([row]) => row);
    ui.svg("rect", { x, y, width: SIDE, height: SIDE, class: "track" }, picture);
    const high = (SIDE * found.filled[block]) / SIZE;
    owners.forEach((row, at) =>
      ui.svg("rect", {
        x: x + (at * SIDE) / owners.length, y: y + SIDE - high, width: SIDE / owners.length, height: high,
        fill: COLOURS[row % COLOURS.length], class: "held", "data-block": block, "data-row": row,
      }, picture));
    if (found.copies.some(([, to]) => to === block)) ui.svg("rect", { x, y, width: SIDE, height: SIDE, class: "frame" }, picture);
    ui.svg("text", { x, y: y + SIDE + 13, class: "tick" }, picture, count > 1 ? `${block}: ${count} owners` : String(block));
  }

  function drawRow(row, words, ways, isFull) {
    const item = ui.element("li", {}, rows, words);
    for (const way of ways) {
      const button = ui.element("button", { type: "button", id: `${way}${row}` }, item, WAYS[way]);
      button.disabled = way === "fork" && Boolean(isFull);
      button.addEventListener("click", () => act(way, row));
    }
  }

  window.addEventListener("hashchange", () => location.reload());
  show();
})();
