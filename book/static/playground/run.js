/* Lessons 12 to 15: a recorded run of the engine, one pass of the model after the other. */
(function () {
  "use strict";
  const { about, requests, colours, frames } = window.PLAYGROUND.run;
  const ui = window.PlaygroundUI;
  const box = document.getElementById("run");
  const asked = ui.places();
  const steps = [...frames.keys()];
  const state = { step: ui.within(asked.step, steps, 0) };
  const WIDE = 720, ROW = 26, ROOM = 250, LEFT = 230, SIDE = 30, COLUMNS = 9;
  const longest = Math.max(...Object.values(requests).map((one) => one.prompt_tokens + one.max_tokens));

  box.textContent = "";
  const controls = ui.element("div", { class: "controls" }, box);
  const move = ui.slider(controls, "step", "step", steps, state.step, go);
  const play = ui.element("button", { id: "play", type: "button" }, controls, "play");
  const said = ui.element("p", { id: "said", "aria-live": "polite" }, box);
  const picture = ui.svg("svg", { viewBox: `0 0 ${WIDE} 440`, role: "img" }, box);
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
    said.textContent = `${running} requests run with ${frame.batch.length} tokens; ${used} of ${about.num_blocks} ` +
      `blocks are used, ${shared} of them shared. ${frame.notes.join(". ")}`;
    picture.textContent = "";
    ui.svg("title", {}, picture, "Requests, the batch of this step, and the blocks of the cache");
    for (const [row, one] of Object.entries(requests)) drawRequest(frame, row, one);
    for (let place = 0; place < about.max_num_batched_tokens; place++) {
      const fill = place < frame.batch.length ? colours[frame.batch[place]] : "none";
      ui.svg("rect", { x: 10 + place * 22, y: 240, width: 19, height: 22, fill, class: "place" }, picture);
    }
    frame.owners.forEach((owners, block) => drawBlock(frame, owners, block));
  }

  function drawRequest(frame, row, one) {
    const y = 10 + row * ROW, scale = ROOM / longest;
    const phase = frame.phase[row];
    ui.svg("text", { x: 10, y: y + 15, class: "tick" }, picture, phase ? `${row}  ${one.prompt}` : "");
    ui.svg("rect", { x: LEFT, y, width: (one.prompt_tokens + one.max_tokens) * scale, height: 18, class: "track" }, picture);
    ui.svg("rect", { x: LEFT, y, width: (frame.computed[row] || 0) * scale, height: 18, fill: colours[row] }, picture);
    ui.svg("line", { x1: LEFT + one.prompt_tokens * scale, x2: LEFT + one.prompt_tokens * scale, y1: y - 2, y2: y + 20, class: "mark" }, picture);
    ui.svg("text", { x: LEFT + ROOM + 12, y: y + 15, class: "tick" }, picture, phase);
  }

  function drawBlock(frame, owners, block) {
    const x = 10 + (block % COLUMNS) * (SIDE + 8), y = 290 + Math.floor(block / COLUMNS) * (SIDE + 10);
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
