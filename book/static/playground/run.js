/* Lessons 12 to 15: a recorded run of the engine, one pass of the model after the other. */
(function () {
  "use strict";
  const { about, requests, colours, frames } = window.PLAYGROUND.run;
  const ui = window.PlaygroundUI;
  const box = document.getElementById("run");
  const asked = ui.places();
  const steps = [...frames.keys()];
  const state = { step: ui.within(asked.step, steps, 0) };
  const SIDE = 30, COLUMNS = 9, NARROW = 640; // pixels: below them a request's words are above its bar
  const longest = Math.max(...Object.values(requests).map((one) => one.prompt_tokens + one.max_tokens));

  box.textContent = "";
  const controls = ui.element("div", { class: "controls" }, box);
  const move = ui.slider(controls, "step", "step", steps, state.step, go);
  const play = ui.element("button", { id: "play", type: "button" }, controls, "play");
  const said = ui.element("p", { id: "said", "aria-live": "polite" }, box);
  const draw = ui.picture(box, drawFrame);
  let timer = null;

  function go(step) {
    state.step = step;
    move(step);
    ui.keep(state);
    show();
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "play";
  }

  play.addEventListener("click", () => {
    if (timer) return stop();
    play.textContent = "stop";
    timer = setInterval(() => (state.step + 1 < frames.length ? go(state.step + 1) : stop()), 400);
  });

  function show() {
    const frame = frames[state.step];
    const running = new Set(frame.batch).size;
    const used = frame.owners.filter((owners) => owners.length).length;
    const shared = frame.owners.filter((owners) => owners.length > 1).length;
    said.textContent = `${counted(running, "request runs", "requests run")} with ${counted(frame.batch.length, "token", "tokens")}; ` +
      `${used} of ${about.num_blocks} blocks are used, ${shared} of them shared. ${frame.notes.map((note) => `${note}.`).join(" ")}`;
    draw();
  }

  function counted(count, one, many) {
    return `${count} ${count === 1 ? one : many}`;
  }

  function drawFrame(picture, width) {
    const frame = frames[state.step], isNarrow = width < NARROW;
    const high = isNarrow ? 46 : 26, rows = Object.keys(requests).length;
    const left = isNarrow ? 2 : 230, room = isNarrow ? width - 4 : width - 320;
    ui.svg("title", {}, picture, "Requests, the batch of this step, and the blocks of the cache");
    for (const [row, one] of Object.entries(requests))
      drawRequest(picture, row, one, { left, room, y: 4 + row * high + (isNarrow ? 20 : 0), isNarrow, phase: frame.phase[row], computed: frame.computed[row] || 0 });
    const batch = 4 + rows * high + 24, each = Math.min(26, (width - 4) / about.max_num_batched_tokens);
    ui.svg("text", { x: 2, y: batch - 6, class: "tick" }, picture, "tokens of this step");
    for (let place = 0; place < about.max_num_batched_tokens; place++) {
      const fill = place < frame.batch.length ? colours[frame.batch[place]] : "none";
      ui.svg("rect", { x: 2 + place * each, y: batch, width: each - 2, height: 22, fill, class: "place" }, picture);
    }
    const blocks = batch + 22 + 34, apart = Math.min(SIDE + 8, (width - 4) / COLUMNS);
    ui.svg("text", { x: 2, y: blocks - 6, class: "tick" }, picture, "blocks of the cache");
    frame.owners.forEach((owners, block) =>
      drawBlock(picture, frame, owners, block, 2 + (block % COLUMNS) * apart, blocks + Math.floor(block / COLUMNS) * (SIDE + 8)));
    ui.size(picture, width, blocks + Math.ceil(frame.owners.length / COLUMNS) * (SIDE + 8));
  }

  function drawRequest(picture, row, one, { left, room, y, isNarrow, phase, computed }) {
    const scale = room / longest, words = phase ? `${row}  ${one.prompt}` : "";
    const at = isNarrow ? y - 5 : y + 14;
    ui.svg("text", { x: 2, y: at, class: "tick" }, picture, words);
    ui.svg("text", { x: left + room + (isNarrow ? 0 : 10), y: at, "text-anchor": isNarrow ? "end" : "start", class: "tick" }, picture, phase);
    ui.svg("rect", { x: left, y, width: (one.prompt_tokens + one.max_tokens) * scale, height: 18, class: "track" }, picture);
    ui.svg("rect", { x: left, y, width: computed * scale, height: 18, fill: colours[row] }, picture);
    ui.svg("line", { x1: left + one.prompt_tokens * scale, x2: left + one.prompt_tokens * scale, y1: y - 2, y2: y + 20, class: "mark" }, picture);
  }

  function drawBlock(picture, frame, owners, block, x, y) {
    ui.svg("rect", { x, y, width: SIDE, height: SIDE, class: "track" }, picture);
    const known = !owners.length && frame.known.includes(block);
    const high = owners.length ? (SIDE * frame.rows[block]) / about.block_size : known ? SIDE : 0;
    const fill = owners.length ? colours[owners[0]] : "#9a9a9a";
    ui.svg("rect", { x, y: y + SIDE - high, width: SIDE, height: high, fill, class: known ? "known" : "held" }, picture);
    owners.slice(1).forEach((row, at) =>
      ui.svg("rect", { x: x + SIDE - 10 * (at + 1), y, width: 10, height: SIDE, fill: colours[row] }, picture));
    if (owners.length > 1) ui.svg("rect", { x, y, width: SIDE, height: SIDE, class: "frame" }, picture);
  }

  window.addEventListener("hashchange", () => location.reload());
  show();
})();
