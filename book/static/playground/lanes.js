/* Lesson 0: the bytes that a warp's lanes ask for, and the sectors that hold them. */
(function () {
  "use strict";
  const { sliders, rows } = window.PLAYGROUND.lanes;
  const ui = window.PlaygroundUI;
  const box = document.getElementById("lanes");
  const asked = ui.places();
  const labels = {
    distance: "distance, in elements", itemsize: "bytes of an element", count: "elements",
    access: "access", lane: "lanes that have asked, up to",
  };
  const starts = { distance: 0, itemsize: 2, count: 0, access: 0, lane: 31 };
  const SECTOR = 32, HIGH = 20, GAP = 4, LEFT = 44;
  const state = {};

  box.textContent = "";
  const controls = ui.element("div", { class: "controls" }, box);
  for (const name of Object.keys(labels)) {
    state[name] = ui.within(asked[name], sliders[name], starts[name]);
    ui.slider(controls, name, labels[name], sliders[name], state[name], (at) => {
      state[name] = at;
      ui.keep(state);
      show();
    });
  }
  const said = ui.element("p", { id: "said", "aria-live": "polite" }, box);
  const draw = ui.picture(box, drawSectors);
  ui.element("p", { class: "note" }, box, "A box is a sector; the number before a row is its first byte. Blue: the bytes of a lane. Orange: those of the last lane that asked.");

  function request() {
    const { distance, itemsize, count } = sliders;
    const at = (state.distance * itemsize.length + state.itemsize) * count.length + state.count;
    return rows[at][sliders.access[state.access]];
  }

  function show() {
    const found = request(), size = sliders.itemsize[state.itemsize], lane = sliders.lane[state.lane];
    const place = found.lanes.indexOf(lane);
    const first = found.bytes[place], last = first + size - 1;
    const own = place < 0 ? `Lane ${lane} asks for nothing: its mask is off.` :
      `Lane ${lane} asks for ${size > 1 ? `bytes ${first} to ${last}` : `byte ${first}`}.`;
    said.textContent = `${own} All lanes together ask for ${found.sectors} sectors.`;
    draw();
  }

  function drawSectors(picture, width) {
    const found = request(), size = sliders.itemsize[state.itemsize], lane = sliders.lane[state.lane];
    const count = Math.max(...found.bytes) + size, sectors = Math.ceil(count / SECTOR);
    const inARow = width < 520 ? 4 : 8, wide = (width - LEFT) / inARow - GAP;
    const corner = (sector) => [LEFT + (sector % inARow) * (wide + GAP), Math.floor(sector / inARow) * (HIGH + 8) + 4];
    ui.size(picture, width, Math.ceil(sectors / inARow) * (HIGH + 8) + 4);
    ui.svg("title", {}, picture, "Memory in sectors of 32 bytes, and the bytes that lanes ask for");
    const touched = new Set();
    found.lanes.forEach((one, at) => one <= lane && touched.add(Math.floor(found.bytes[at] / SECTOR)));
    for (let sector = 0; sector < sectors; sector++) {
      const [x, y] = corner(sector);
      ui.svg("rect", { x, y, width: wide, height: HIGH, class: touched.has(sector) ? "sector asked" : "sector" }, picture);
      if (sector % inARow === 0)
        ui.svg("text", { x: LEFT - 8, y: y + 15, "text-anchor": "end", class: "tick" }, picture, sector * SECTOR);
    }
    found.lanes.forEach((one, at) => {
      if (one > lane) return;
      const [x, y] = corner(Math.floor(found.bytes[at] / SECTOR));
      const start = ((found.bytes[at] % SECTOR) * wide) / SECTOR;
      ui.svg("rect", {
        x: x + start, y: y + 2, width: (size * wide) / SECTOR - 0.4, height: HIGH - 4,
        class: one === lane ? "lane now" : "lane", "data-lane": one,
      }, picture);
    });
  }

  window.addEventListener("hashchange", () => location.reload());
  show();
})();
