// The page: mouse, keys, tooltip, and what is drawn when.

const meta = JSON.parse(document.getElementById("meta").textContent);
const activities = meta.activities;
const $ = (id) => document.getElementById(id);
const LEGEND = ["prefill, whole or a chunk", "decode", "waiting", "preempted", "swapped out"];

class Page {
  constructor(runs) {
    this.runs = runs;
    this.chart = new Chart($("chart"), runs, meta.colours);
    this.map = new BlockMap($("blocks"));
    this.histories = runs.map((run) => new BlockHistory(run));
    this.times = []; // of the last draws, milliseconds
    this.shown = null; // what the block map shows
    this.listen();
    this.legend();
    this.resize();
  }

  resize() {
    this.chart.resize();
    this.map.resize();
    this.shown = null;
    this.invalidate();
  }

  invalidate() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  draw() {
    const start = performance.now();
    this.chart.draw();
    const { active, place } = this.chart, run = this.runs[active], key = `${active}:${place}:${this.map.top}`;
    if (this.shown !== key) {
      this.map.draw(this.histories[active].at(place));
      this.shown = key;
      $("queue").textContent = this.map.queueText();
    }
    const who = this.chart.lane >= 0 ? `${run.laneText(this.chart.lane, place)}; ` : "";
    const text = `${this.runs.length > 1 ? `${run.label}, ` : ""}${run.stepText(place)}`;
    $("status").textContent = who ? `${who}${text}` : text;
    this.times.push(performance.now() - start);
    if (this.times.length > 240) this.times.shift();
  }

  choose(run, place, follow = true) {
    this.chart.choose(run, place);
    if (follow) this.chart.follow();
    this.invalidate();
  }

  zoom(factor, around) {
    this.chart.zoom(factor, around);
    this.invalidate();
  }

  // Move to the run's neighbour at the same time.
  otherRun() {
    const { active, place } = this.chart, other = (active + 1) % this.runs.length;
    this.chart.lane = -1;
    this.choose(other, this.runs[other].stepAt(this.runs[active].x0[place]));
  }

  // The request above or below among those that are shown.
  otherLane(by) {
    const panel = this.chart.panels().find((p) => p.kind === "lanes" && p.run === this.chart.active);
    const rows = this.chart.rows(panel), row = rows.lanes.indexOf(this.chart.lane);
    const next = row < 0 ? rows.first : Math.min(Math.max(row + by, 0), rows.lanes.length - 1);
    this.chart.lane = rows.lanes[next] ?? -1;
    const y = next * rows.height, top = this.chart.scroll[panel.run];
    if (y < top || y + rows.height > top + panel.height) this.chart.scroll[panel.run] = y - panel.height / 2;
    this.invalidate();
  }

  scroll(by) {
    const { active } = this.chart;
    this.chart.scroll[active] += by;
    this.invalidate();
  }

  laneHeight(factor) {
    const panel = this.chart.panels().find((p) => p.kind === "lanes" && p.run === this.chart.active);
    const height = this.chart.rows(panel).height * factor;
    this.chart.laneHeight = Math.min(Math.max(height, THINNEST), 2 * MAX_LANE);
    this.invalidate();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { active, place } = this.chart, far = event.shiftKey ? 10 : 1;
    const page = this.chart.height / 2;
    const actions = {
      ArrowLeft: () => this.choose(active, place - far),
      ArrowRight: () => this.choose(active, place + far),
      Home: () => this.choose(active, 0),
      End: () => this.choose(active, this.runs[active].numSteps - 1),
      ArrowUp: () => this.otherLane(-1),
      ArrowDown: () => this.otherLane(1),
      PageUp: () => this.scroll(-page),
      PageDown: () => this.scroll(page),
      "+": () => this.zoom(0.5, this.runs[active].x0[place]),
      "=": () => this.zoom(0.5, this.runs[active].x0[place]),
      "-": () => this.zoom(2, this.runs[active].x0[place]),
      0: () => this.zoom(Infinity),
      "[": () => this.laneHeight(0.8),
      "]": () => this.laneHeight(1.25),
      r: () => this.otherRun(),
      "?": () => this.help(),
      Escape: () => { $("keys").hidden = $("tip").hidden = true; this.chart.lane = -1; this.invalidate(); },
    };
    if (!actions[event.key]) return;
    if (event.target.matches?.("button") && [" ", "Enter"].includes(event.key)) return;
    event.preventDefault();
    actions[event.key]();
  }

  help() {
    $("keys").hidden = !$("keys").hidden;
    $("help").setAttribute("aria-expanded", String(!$("keys").hidden));
  }

  listen() {
    window.addEventListener("resize", () => this.resize());
    document.addEventListener("keydown", (event) => this.key(event));
    const chart = $("chart"), blocks = $("blocks");
    chart.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    chart.addEventListener("pointerdown", (event) => this.press(event));
    chart.addEventListener("pointermove", (event) => this.move(event));
    chart.addEventListener("pointerup", (event) => this.release(event));
    chart.addEventListener("pointerleave", () => this.leave());
    blocks.addEventListener("pointermove", (event) => this.overBlock(event));
    blocks.addEventListener("pointerleave", () => this.leave());
    blocks.addEventListener("wheel", (event) => {
      this.map.top += event.deltaY;
      this.invalidate();
      event.preventDefault();
    }, { passive: false });
    const { chart: c } = this, actions = {
      fit: () => this.zoom(Infinity), in: () => this.zoom(0.5), out: () => this.zoom(2), help: () => this.help(),
      before: () => this.choose(c.active, c.place - 1), after: () => this.choose(c.active, c.place + 1),
    };
    for (const [id, action] of Object.entries(actions)) $(id).addEventListener("click", action);
  }

  wheel(event) {
    event.preventDefault();
    const { run } = this.chart.at(event.offsetX, event.offsetY);
    if (event.shiftKey) {
      this.chart.scroll[run] += event.deltaY || event.deltaX;
      this.invalidate();
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.chart.pan(event.deltaX * (this.chart.view.t1 - this.chart.view.t0) / this.chart.width);
      this.invalidate();
    } else {
      this.zoom(1.0015 ** event.deltaY, this.chart.time(Math.max(event.offsetX, GUTTER)));
    }
  }

  press(event) {
    const found = this.chart.at(event.offsetX, event.offsetY);
    $("chart").setPointerCapture(event.pointerId);
    this.drag = { x: event.offsetX, y: event.offsetY, run: found.run, moved: false, scrubs: found.panel?.kind !== "lanes" };
    if (this.drag.scrubs) this.choose(found.run, found.place, false);
  }

  move(event) {
    const { offsetX: x, offsetY: y } = event;
    this.chart.pointer = { x, y };
    if (!this.drag) {
      this.tell(event, x, y);
    } else if (this.drag.scrubs) {
      this.choose(this.drag.run, this.runs[this.drag.run].stepAt(this.chart.time(x)), false);
    } else if (this.drag.moved || Math.abs(x - this.drag.x) + Math.abs(y - this.drag.y) > 3) {
      const span = this.chart.view.t1 - this.chart.view.t0;
      this.chart.pan((this.drag.x - x) / (this.chart.width - GUTTER) * span);
      this.chart.scroll[this.drag.run] += this.drag.y - y;
      Object.assign(this.drag, { x, y, moved: true });
      $("tip").hidden = true;
    }
    this.invalidate();
  }

  release(event) {
    if (this.drag && !this.drag.moved && !this.drag.scrubs) {
      const found = this.chart.at(event.offsetX, event.offsetY);
      this.chart.lane = found.lane;
      this.choose(found.run, found.place, false);
    }
    this.drag = null;
  }

  leave() {
    this.chart.pointer = null;
    $("tip").hidden = true;
    this.invalidate();
  }

  tell(event, x, y) {
    const { panel, run, place, lane } = this.chart.at(x, y);
    if (!panel || (x < GUTTER && lane < 0)) {
      $("tip").hidden = true;
    } else if (lane < 0) {
      this.tip(event, this.runs[run].stepText(place).replaceAll("; ", "\n"));
    } else {
      const isThere = x >= GUTTER && this.runs[run].runAt(lane, place) >= 0;
      const what = isThere ? this.runs[run].laneText(lane, place) : this.outside(run, lane, this.chart.time(x));
      this.tip(event, `${what}\n${this.runs[run].requestText(lane)}`);
    }
  }

  outside(run, lane, time) {
    const { ids, arrival } = this.runs[run];
    if (time < arrival[lane]) return `${ids[lane]}: arrives at ${seconds(arrival[lane])}`;
    return `${ids[lane]}: arrived at ${seconds(arrival[lane])}`;
  }

  overBlock(event) {
    const id = this.map.at(event.offsetX, event.offsetY);
    if (id < 0) $("tip").hidden = true; else this.tip(event, this.map.text(id));
  }

  tip(event, text) {
    const tip = $("tip");
    tip.textContent = text;
    tip.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = tip;
    const left = event.clientX + 14 + width > innerWidth ? event.clientX - width - 10 : event.clientX + 14;
    const top = event.clientY + 14 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 14;
    tip.style.left = `${Math.max(2, left)}px`;
    tip.style.top = `${Math.max(2, top)}px`;
  }

  legend() {
    const seen = new Set(this.runs.flatMap((run) => [...run.run_activity]));
    LEGEND.forEach((name, kind) => {
      if (!seen.has(kind)) return;
      const item = document.createElement("span"), swatch = document.createElement("canvas");
      swatch.width = 22;
      swatch.height = 12;
      const c = swatch.getContext("2d"), height = 12 * HEIGHT[kind];
      c.fillStyle = pattern(c, meta.colours[kind], kind);
      c.fillRect(0, (12 - height) / 2, 22, height);
      if (kind === 2) {
        c.fillStyle = "#9a9a9a";
        c.fillRect(0, 5.5, 22, 1);
      }
      item.append(swatch, name);
      $("legend").append(item);
    });
    const rest = document.createElement("span");
    rest.textContent = "blocks: colour = prefix (pale: past what is shared), number = tables that hold it, " +
      "half cell = free but cached, 1. 2. 3. = next to be handed out";
    $("legend").append(rest);
    $("facts").textContent = this.runs.map((run) => `${run.config.scheduler}, ${run.config.blocks}, ${run.device}: ` +
      `${count(run.ids.length, "request")}, ${count(run.numSteps, "step")}, ${seconds(run.end)}`).join(" | ");
    $("facts").title = $("facts").textContent;
    const notes = this.runs.flatMap((run) => [run.damage, run.complaint].filter(Boolean).map((t) => `${run.label}: ${t}`));
    $("notes").textContent = notes.join(" ");
    $("notes").hidden = !notes.length;
  }

  // Pan and zoom for so many frames; what drawing them took, and how far apart they came (milliseconds).
  async measure(numFrames) {
    const gaps = [], draws = [];
    let before = performance.now();
    for (let i = 0; i < numFrames; i++) {
      await new Promise((done) => requestAnimationFrame(done));
      const now = performance.now();
      gaps.push(now - before);
      before = now;
      const span = this.chart.end * (0.02 + 0.98 * Math.abs(Math.cos(i / 15)));
      this.chart.show((this.chart.end - span) * Math.abs(Math.sin(i / 40)), span);
      this.chart.choose(this.chart.active, Math.floor(this.runs[this.chart.active].numSteps * i / numFrames));
      this.draw();
      draws.push(performance.now() - now);
    }
    const at = (values, share) => values.sort((a, b) => a - b)[Math.min(values.length - 1, Math.floor(share * values.length))];
    return { draw_p50: at(draws, 0.5), draw_p95: at(draws, 0.95), draw_max: at(draws, 1), frame_p50: at(gaps, 0.5),
      frame_p95: at(gaps, 0.95) };
  }
}

readColumns(meta).then((columns) => {
  window.timeline = new Page(meta.runs.map((info) => new Run(info, columns)));
}).catch((error) => {
  $("notes").hidden = false;
  $("notes").textContent = `The page cannot read its data: ${error}`;
  throw error;
});
