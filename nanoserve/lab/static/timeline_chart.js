// The time axis and all that hangs on it: gaps between tokens, budget fill, lanes. Draws on one canvas.

const GUTTER = 96, AXIS = 20, ITL = 84, BUDGET = 40, SPACE = 6, MIN_LANE = 2, MAX_LANE = 22, THINNEST = 0.2;
const HEIGHT = [1, 1, 0.34, 0.62, 0.62]; // of a cell, by activity: told apart without colour
const RANK = [3, 0, 1, 4, 2]; // what wins a pixel that several runs share
const INK = "#1b1b1b", SOFT = "#5c5c5c", RULE = "#d5d5d5", FONT = '"DejaVu Sans", system-ui, sans-serif';

class Chart {
  constructor(canvas, runs, colours) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.runs = runs;
    this.colours = colours;
    this.patterns = colours.map((colour, kind) => pattern(this.context, colour, kind));
    this.end = Math.max(...runs.map((run) => run.end)) || 1;
    this.shortest = this.end / 1e7;
    this.view = { t0: 0, t1: this.end };
    this.scroll = runs.map(() => 0);
    this.laneHeight = 0; // 0: as much as there is room for
    this.active = 0; // the run whose step is chosen
    this.place = 0;
    this.lane = -1;
    this.pointer = null;
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    this.ratio = window.devicePixelRatio || 1;
    this.width = width;
    this.height = height;
    this.canvas.width = Math.round(width * this.ratio);
    this.canvas.height = Math.round(height * this.ratio);
  }

  // Panels from top to bottom: { kind, run, top, height }
  panels() {
    const panels = [{ kind: "itl", run: -1, top: AXIS, height: ITL }];
    let top = AXIS + ITL + SPACE;
    this.runs.forEach((_, run) => {
      panels.push({ kind: "budget", run, top, height: BUDGET });
      top += BUDGET + SPACE;
    });
    const each = (this.height - top - SPACE * (this.runs.length - 1)) / this.runs.length;
    this.runs.forEach((_, run) => {
      panels.push({ kind: "lanes", run, top, height: Math.max(each, 10) });
      top += each + SPACE;
    });
    return panels;
  }

  x(time) {
    return GUTTER + (time - this.view.t0) / (this.view.t1 - this.view.t0) * (this.width - GUTTER);
  }

  time(x) {
    return this.view.t0 + (x - GUTTER) / (this.width - GUTTER) * (this.view.t1 - this.view.t0);
  }

  zoom(factor, around = (this.view.t0 + this.view.t1) / 2) {
    const span = Math.min(Math.max((this.view.t1 - this.view.t0) * factor, this.shortest), this.end);
    const share = (around - this.view.t0) / (this.view.t1 - this.view.t0);
    this.show(around - share * span, span);
  }

  pan(seconds) {
    this.show(this.view.t0 + seconds, this.view.t1 - this.view.t0);
  }

  show(t0, span) {
    t0 = Math.min(Math.max(t0, 0), this.end - span);
    this.view = { t0, t1: t0 + span };
  }

  choose(run, place) {
    this.active = run;
    this.place = Math.min(Math.max(place, 0), this.runs[run].numSteps - 1);
  }

  // Bring the chosen step into view.
  follow() {
    const run = this.runs[this.active], span = this.view.t1 - this.view.t0;
    if (run.x0[this.place] < this.view.t0 || run.x1[this.place] > this.view.t1) {
      this.show((run.x0[this.place] + run.x1[this.place] - span) / 2, span);
    }
  }

  heightOf(panel, numLanes) {
    if (this.laneHeight) return this.laneHeight;
    return Math.min(Math.max((panel.height - 2) / Math.max(numLanes, 1), MIN_LANE), MAX_LANE);
  }

  // Which lanes a panel shows, and where: { lanes, height, first, end }
  rows(panel) {
    const lanes = this.runs[panel.run].lanesBetween(this.view.t0, this.view.t1);
    const height = this.heightOf(panel, lanes.length);
    const limit = Math.max(0, lanes.length * height - panel.height);
    this.scroll[panel.run] = Math.min(Math.max(this.scroll[panel.run], 0), limit);
    const first = Math.floor(this.scroll[panel.run] / height);
    return { lanes, height, first, end: Math.min(lanes.length, first + Math.ceil(panel.height / height) + 1) };
  }

  // What is under a point of the canvas: { panel, run, place, lane }
  at(x, y) {
    const panel = this.panels().find((p) => y >= p.top && y < p.top + p.height);
    const run = panel && panel.run >= 0 ? panel.run : this.active;
    const found = { panel, run, place: this.runs[run].stepAt(this.time(x)), lane: -1 };
    if (panel?.kind === "lanes") {
      const rows = this.rows(panel);
      const row = Math.floor((y - panel.top + this.scroll[panel.run]) / rows.height);
      found.lane = rows.lanes[row] ?? -1;
    }
    return found;
  }

  draw() {
    const c = this.context;
    c.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    c.fillStyle = "#fff";
    c.fillRect(0, 0, this.width, this.height);
    this.drawAxis(c);
    for (const panel of this.panels()) {
      c.save();
      c.beginPath();
      c.rect(GUTTER, panel.top, this.width, panel.height);
      c.clip();
      if (panel.kind === "itl") this.drawItl(c, panel);
      if (panel.kind === "budget") this.drawBudget(c, panel);
      if (panel.kind === "lanes") this.drawLanes(c, panel);
      c.restore();
      this.drawLabels(c, panel);
      c.fillStyle = RULE;
      c.fillRect(0, panel.top + panel.height + SPACE / 2 - 1, this.width, 1);
    }
    this.drawChosen(c);
  }

  label(c, text, y, colour = INK, bold = false) {
    c.font = `${bold ? "bold " : ""}11px ${FONT}`;
    c.fillStyle = colour;
    c.textAlign = "right";
    c.textBaseline = "middle";
    c.fillText(text, GUTTER - 8, y, GUTTER - 12);
  }

  drawAxis(c) {
    const span = this.view.t1 - this.view.t0;
    const about = span / Math.max(2, (this.width - GUTTER) / 110);
    const power = 10 ** Math.floor(Math.log10(about));
    const tick = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= about);
    const digits = Math.max(0, -Math.floor(Math.log10(tick)));
    this.label(c, "seconds", AXIS / 2, SOFT);
    c.font = `11px ${FONT}`;
    c.textAlign = "center";
    for (let i = Math.ceil(this.view.t0 / tick); i * tick <= this.view.t1; i++) {
      const x = this.x(i * tick);
      c.fillStyle = RULE;
      c.fillRect(x, AXIS - 4, 1, this.height);
      c.fillStyle = SOFT;
      if (x > GUTTER + 14 && x < this.width - 24) c.fillText((i * tick).toFixed(digits), x, AXIS / 2);
    }
  }

  // Steps in view, [first, last].
  visible(run) {
    return [Math.max(0, run.stepAt(this.view.t0)), Math.max(0, lastNotAbove(run.x0, this.view.t1))];
  }

  drawItl(c, panel) {
    const top = Math.max(...this.runs.map((run) => run.itlTop));
    if (!(top > 0)) return;
    const high = Math.log10(top * 1.15), low = Math.min(Math.log10(Math.min(...this.runs.map((r) => r.itlBottom))), high - 0.5);
    const y = (gap) => panel.top + 6 + (high - Math.log10(gap)) / (high - low) * (panel.height - 12);
    const powers = [];
    for (let power = Math.ceil(low); power <= high; power++) powers.push(power);
    c.fillStyle = RULE;
    for (const power of powers) c.fillRect(GUTTER, y(10 ** power), this.width, 1);
    this.runs.forEach((run, number) => this.drawGaps(c, run, number, y));
    c.font = `10px ${FONT}`;
    c.textAlign = "left";
    c.textBaseline = "middle";
    for (const power of powers) {
      const text = power < 0 ? `${+(10 ** (power + 3)).toPrecision(1)} ms` : `${10 ** power} s`;
      c.fillStyle = "#fffd";
      c.fillRect(GUTTER + 1, y(10 ** power) - 6, c.measureText(text).width + 4, 12);
      c.fillStyle = SOFT;
      c.fillText(text, GUTTER + 3, y(10 ** power));
    }
  }

  // The longest gap of each step (a dot, or in the second run a square), and the line of the medians.
  drawGaps(c, run, number, y) {
    const [first, last] = this.visible(run);
    c.fillStyle = c.strokeStyle = run.colour;
    c.lineWidth = 1.2;
    c.setLineDash(number ? [5, 3] : []);
    c.beginPath();
    let column = -1, longest = 0, pen = false;
    const mark = () => {
      if (longest <= 0) return;
      if (number) c.strokeRect(column - 1.5, y(longest) - 1.5, 3, 3); else c.fillRect(column - 1.5, y(longest) - 1.5, 3, 3);
    };
    const line = new Path2D();
    c.setLineDash([]);
    for (let i = first; i <= last; i++) {
      if (!(run.itl_max[i] > 0)) continue;
      const x = Math.round(this.x(run.x1[i]));
      if (x !== column) {
        mark();
        column = x;
        longest = 0;
        if (pen) line.lineTo(x, y(run.itl_p50[i])); else line.moveTo(x, y(run.itl_p50[i]));
        pen = true;
      }
      longest = Math.max(longest, run.itl_max[i]);
    }
    mark();
    c.setLineDash(number ? [5, 3] : []);
    c.stroke(line);
    c.setLineDash([]);
  }

  // Of each step a bar: decodes below, prefill on top, against the budget. Of several in one pixel the fullest.
  drawBudget(c, panel) {
    const run = this.runs[panel.run];
    const [first, last] = this.visible(run), bottom = panel.top + panel.height - 1, full = panel.height - 4;
    c.fillStyle = RULE;
    c.fillRect(GUTTER, bottom - full, this.width, 1);
    c.fillRect(GUTTER, bottom, this.width, 1);
    for (let i = first; i <= last;) {
      const left = Math.floor(this.x(run.x0[i]));
      let best = i, right = this.x(run.x1[i]);
      for (i++; i <= last && this.x(run.x0[i]) < left + 1; i++) {
        if (run.tokens[i] > run.tokens[best]) best = i;
        right = this.x(run.x1[i]);
      }
      const total = run.tokens[best] / run.budget * full, prefill = run.prefill[best] / run.budget * full;
      const width = Math.max(1, right - left - (right - left > 4 ? 1 : 0));
      c.fillStyle = this.colours[1];
      c.fillRect(left, bottom - total + prefill, width, total - prefill);
      c.fillStyle = this.colours[0];
      c.fillRect(left, bottom - total, width, prefill);
    }
  }

  drawLanes(c, panel) {
    const run = this.runs[panel.run], rows = this.rows(panel);
    const buckets = this.colours.map(() => []);
    const from = this.visible(run)[0];
    for (let row = rows.first; row < rows.end; row++) {
      const y = panel.top + row * rows.height - this.scroll[panel.run];
      this.fill(run, rows.lanes[row], from, y, rows.height, buckets);
    }
    const gap = rows.height >= 5 ? 1 : 0;
    buckets.forEach((cells, kind) => {
      c.fillStyle = rows.height >= 7 ? this.patterns[kind] : this.colours[kind];
      const height = Math.max(1, rows.height * HEIGHT[kind] - gap), down = (rows.height - gap - height) / 2;
      for (let i = 0; i < cells.length; i += 3) c.fillRect(cells[i], cells[i + 1] + down, cells[i + 2], height);
      if (kind !== 2 || rows.height < 4) return;
      c.fillStyle = "#9a9a9a"; // a wait is a line in a pale bar
      for (let i = 0; i < cells.length; i += 3) c.fillRect(cells[i], cells[i + 1] + down + height / 2 - 0.5, cells[i + 2], 1);
    });
    if (rows.height >= 9) this.drawCounts(c, panel, rows);
  }

  drawLabels(c, panel) {
    const run = this.runs[panel.run], middle = panel.top + panel.height / 2;
    if (panel.kind === "itl") {
      this.label(c, "gap between", middle - 7, INK, true);
      this.label(c, "tokens (log)", middle + 7, INK, true);
    } else if (panel.kind === "budget") {
      this.label(c, run.label, panel.top + 11, run.colour, true);
      this.label(c, `of ${run.budget} tokens`, panel.top + 27, SOFT);
    } else {
      c.save();
      c.beginPath();
      c.rect(0, panel.top, GUTTER, panel.height);
      c.clip();
      this.drawNames(c, panel, this.rows(panel));
      c.restore();
    }
  }

  // Puts the cells of one lane in view into the buckets, [x, y, width] each. Of several in one pixel the weightiest.
  fill(run, lane, from, y, height, buckets) {
    const begin = run.lane_runs[lane], end = run.lane_runs[lane + 1];
    let pixel = -1, rank = -1;
    const add = (kind, t0, t1) => {
      const left = Math.max(GUTTER, this.x(t0)), width = this.x(t1) - left;
      const at = Math.floor(left);
      if (width < 1 && at === pixel && RANK[kind] <= rank) return;
      rank = width < 1 && at === pixel ? Math.max(rank, RANK[kind]) : RANK[kind];
      pixel = at;
      if (width > 0) buckets[kind].push(left, y, Math.max(1, width));
    };
    if (begin < end) add(2, run.arrival[lane], Math.max(run.arrival[lane], run.x0[run.run_first[begin]]));
    for (let i = Math.max(begin, lastNotAbove(run.run_first, from, begin, end)); i < end; i++) {
      const start = run.x0[run.run_first[i]];
      if (start > this.view.t1) break;
      const after = run.run_first[i] + run.run_steps[i], kind = run.run_activity[i];
      const waits = kind >= 2 && after < run.numSteps; // also between two steps
      add(kind, Math.max(start, run.arrival[lane]), waits ? run.x0[after] : run.x1[after - 1]);
    }
  }

  // Zoomed in: where steps begin, and how many tokens a chunk has.
  drawCounts(c, panel, rows) {
    const run = this.runs[panel.run], [first, last] = this.visible(run);
    if ((this.width - GUTTER) / (last - first + 1) < 9) return;
    c.font = `${Math.min(11, rows.height - 1)}px ${FONT}`;
    c.textAlign = "center";
    c.textBaseline = "middle";
    for (let place = first; place <= last; place++) {
      const x0 = Math.max(this.x(run.x0[place]), GUTTER), x1 = this.x(run.x1[place]);
      if (x1 - x0 < 6) continue;
      c.fillStyle = "#0002";
      c.fillRect(x0, panel.top, 1, panel.height);
      for (let row = rows.first; row < rows.end; row++) {
        const i = run.runAt(rows.lanes[row], place);
        if (i < 0 || run.run_tokens[i] < 2 || x1 - x0 < 9 + 7 * String(run.run_tokens[i]).length) continue;
        const y = panel.top + (row + 0.5) * rows.height - this.scroll[panel.run];
        const text = String(run.run_tokens[i]);
        c.fillStyle = this.colours[run.run_activity[i]];
        c.fillRect((x0 + x1) / 2 - 4 * text.length - 1, y - rows.height / 2 + 1, 8 * text.length + 2, rows.height - 2);
        c.fillStyle = readable(this.colours[run.run_activity[i]]);
        c.fillText(text, (x0 + x1) / 2, y);
      }
    }
  }

  drawNames(c, panel, rows) {
    const run = this.runs[panel.run];
    if (rows.height < 9) {
      this.label(c, run.label, panel.top + 12, run.colour, true);
      this.label(c, count(rows.lanes.length, "request"), panel.top + 28, SOFT);
      return;
    }
    for (let row = rows.first; row < rows.end; row++) {
      const y = panel.top + (row + 0.5) * rows.height - this.scroll[panel.run];
      const lane = rows.lanes[row], chosen = panel.run === this.active && lane === this.lane;
      c.font = `${chosen ? "bold " : ""}${Math.min(11, rows.height)}px ${FONT}`;
      c.fillStyle = INK;
      c.textAlign = "right";
      c.textBaseline = "middle";
      c.fillText(shortened(run.ids[lane]), GUTTER - 8, y, GUTTER - 12);
    }
  }

  drawChosen(c) {
    const run = this.runs[this.active];
    const x0 = this.x(run.x0[this.place]), x1 = this.x(run.x1[this.place]);
    if (x1 >= GUTTER && x0 <= this.width) {
      const left = Math.max(GUTTER, x0);
      c.fillStyle = "#0b57d022";
      c.fillRect(left, AXIS, Math.max(2, x1 - left), this.height);
      c.fillStyle = "#0b57d0";
      c.fillRect(left - 1, 0, 2, this.height);
    }
    if (this.pointer && this.pointer.x > GUTTER) {
      c.fillStyle = "#0006";
      c.fillRect(this.pointer.x, AXIS, 1, this.height);
    }
  }
}

function shortened(id) {
  return id.length <= 13 ? id : `${id.slice(0, 5)}..${id.slice(-6)}`;
}

// An activity's fill, told apart in grey: prefill has strokes, swapped has lines, the others are plain.
function pattern(context, colour, kind) {
  if (kind !== 0 && kind !== 4) return colour;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const c = tile.getContext("2d");
  c.fillStyle = colour;
  c.fillRect(0, 0, 8, 8);
  c.strokeStyle = kind ? "#fff" : "#fff9";
  c.lineWidth = kind ? 1.5 : 1.2;
  c.beginPath();
  for (const d of kind ? [2, 6] : [-8, 0, 8]) {
    c.moveTo(kind ? 0 : d, kind ? d : 8);
    c.lineTo(kind ? 8 : d + 8, kind ? d : 0);
  }
  c.stroke();
  return context.createPattern(tile, "repeat");
}
