// The KV blocks of a step: walks through what the steps changed, and draws one cell a block.

const [REMOVE, APPEND, PREPEND, EVICTABLE, CACHED, UNCACHED] = [0, 1, 2, 3, 4, 5];
const GROUP_COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#6a3d9a"];
const OWN = "#8d99a6", MANY_GROUPS = "#5f5f5f", EVERY = 512;

class BlockState {
  constructor(run) {
    this.run = run;
    this.place = -1;
    this.refs = new Int32Array(run.num_blocks);
    this.content = new Int32Array(run.num_blocks).fill(-1);
    this.cached = new Uint8Array(run.num_blocks);
    this.tables = new Map();
    this.evictable = new Map();
    // The free queue is a ring through one more place, which is before its first block and after its last.
    this.next = new Int32Array(run.num_blocks + 1).fill(-1);
    this.prev = new Int32Array(run.num_blocks + 1).fill(-1);
    this.next[run.num_blocks] = this.prev[run.num_blocks] = run.num_blocks;
    for (let id = 1; id < run.num_blocks; id++) this.link(id, this.prev[run.num_blocks]);
  }

  copy() {
    const other = Object.create(BlockState.prototype);
    Object.assign(other, this);
    for (const name of ["refs", "content", "cached", "next", "prev"]) other[name] = this[name].slice();
    other.tables = new Map([...this.tables].map(([lane, table]) => [lane, table.slice()]));
    other.evictable = new Map(this.evictable);
    return other;
  }

  link(id, before) {
    this.prev[id] = before;
    this.next[id] = this.next[before];
    this.next[before] = this.prev[this.next[id]] = id;
  }

  unlink(id) {
    this.evictable.delete(id);
    if (this.next[id] < 0) return;
    this.next[this.prev[id]] = this.next[id];
    this.prev[this.next[id]] = this.prev[id];
    this.next[id] = this.prev[id] = -1;
  }

  step() {
    const run = this.run, place = ++this.place;
    for (let i = run.step_tables[place]; i < run.step_tables[place + 1]; i++) this.change(i);
    const ops = run.ops, end = run.step_ops[place + 1];
    for (let i = run.step_ops[place]; i < end; i++) {
      const id = ops[i] >> 3, kind = ops[i] & 7;
      if (kind === CACHED || kind === UNCACHED) {
        this.cached[id] = kind === CACHED;
        continue;
      }
      this.unlink(id);
      if (kind === APPEND) this.link(id, this.prev[run.num_blocks]);
      if (kind === PREPEND) this.link(id, run.num_blocks);
      if (kind === EVICTABLE) this.evictable.set(id, [ops[++i], ops[++i]]);
    }
  }

  change(i) {
    const run = this.run, lane = run.table_lane[i], place = run.table_place[i];
    const ids = run.table_blocks.subarray(run.table_offsets[i], run.table_offsets[i + 1]);
    const table = this.tables.get(lane) ?? [];
    if (!ids.length) {
      for (const id of table) this.refs[id]--;
      this.tables.delete(lane);
      return;
    }
    ids.forEach((id, k) => {
      if (place + k < table.length) this.refs[table[place + k]]--;
      table[place + k] = id;
      this.refs[id]++;
      this.content[id] = 2 * run.group[lane] + (place + k < run.depth[lane] ? 1 : 0);
    });
    this.tables.set(lane, table);
  }

  // Free blocks as they will be handed out; null: not known.
  free() {
    if (this.place >= this.run.queue_steps[0]) return null;
    const queue = [], ring = this.run.num_blocks;
    for (let id = this.next[ring]; id !== ring; id = this.next[id]) queue.push(id);
    const rest = [...this.evictable].sort(([a, [ageA, hashedA]], [b, [ageB, hashedB]]) =>
      ageA - ageB || hashedB - hashedA || a - b);
    return queue.concat(rest.map(([id]) => id));
  }

  holders(block) {
    return [...this.tables].filter(([, table]) => table.includes(block)).map(([lane]) => this.run.ids[lane]);
  }
}

// The state at any step; what was passed on the way is kept every so often.
class BlockHistory {
  constructor(run) {
    this.run = run;
    this.kept = [new BlockState(run)]; // after 0, EVERY, 2 * EVERY, ... steps
    this.now = this.kept[0].copy();
  }

  at(place) {
    if (this.run.step_tables.length < 2) return null;
    if (this.now.place > place || place - this.now.place > EVERY) {
      const near = Math.min(Math.floor((place + 1) / EVERY), this.kept.length - 1);
      if (this.now.place > place || this.kept[near].place > this.now.place) this.now = this.kept[near].copy();
    }
    while (this.now.place < place) {
      this.now.step();
      if ((this.now.place + 1) / EVERY === this.kept.length) this.kept.push(this.now.copy());
    }
    return this.now;
  }
}

class BlockMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.top = 0;
  }

  resize() {
    this.ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    this.canvas.width = Math.round(this.width * this.ratio);
    this.canvas.height = Math.round(this.height * this.ratio);
  }

  // Cells that show every block where they are not too small for it; else the map scrolls.
  measure(numBlocks) {
    const left = GUTTER, width = this.width - left - 10;
    let size = 34;
    while (size > 6 && Math.floor(width / size) * Math.floor(this.height / size) < numBlocks) size--;
    const columns = Math.floor(width / size), rows = Math.ceil(numBlocks / columns);
    this.top = Math.min(Math.max(this.top, 0), Math.max(0, rows * size - this.height));
    return { left, size, columns, rows };
  }

  at(x, y) {
    if (!this.state) return -1;
    const { left, size, columns } = this.measure(this.state.run.num_blocks);
    const column = Math.floor((x - left) / size), id = Math.floor((y + this.top) / size) * columns + column;
    return column >= 0 && column < columns && id < this.state.run.num_blocks ? id : -1;
  }

  draw(state) {
    const c = this.context;
    this.state = state;
    c.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    c.fillStyle = "#fff";
    c.fillRect(0, 0, this.width, this.height);
    c.font = `bold 11px ${FONT}`;
    c.textAlign = "right";
    c.textBaseline = "middle";
    c.fillStyle = INK;
    c.fillText("KV blocks", GUTTER - 8, 12);
    if (!state) return;
    c.fillStyle = state.run.colour;
    c.fillText(state.run.label, GUTTER - 8, 28, GUTTER - 12);
    c.fillStyle = SOFT;
    c.font = `11px ${FONT}`;
    c.fillText(`step ${state.run.step[state.place]}`, GUTTER - 8, 44);
    this.free = state.free();
    this.rank = new Map((this.free ?? []).map((id, i) => [id, i + 1]));
    const grid = this.measure(state.run.num_blocks), first = Math.floor(this.top / grid.size) * grid.columns;
    const last = Math.min(state.run.num_blocks, first + (Math.ceil(this.height / grid.size) + 1) * grid.columns);
    if (grid.size <= 8) this.drawSmall(c, grid, first, last);
    else for (let id = first; id < last; id++) this.drawBlock(c, grid, id);
  }

  // Without frames and words: a free block is a part of the ground.
  drawSmall(c, { left, size, columns }, first, last) {
    const { refs, cached, content, run } = this.state, side = size - 1;
    const bottom = Math.ceil(run.num_blocks / columns) * size - this.top;
    c.fillStyle = "#ececec";
    c.fillRect(left, 0, columns * size - 1, Math.min(this.height, bottom));
    for (let id = Math.max(first, 1); id < last; id++) {
      if (!refs[id] && !cached[id]) continue;
      const group = content[id] >> 1, colour = groupColour(group);
      c.fillStyle = content[id] & 1 || !group ? colour : pale(colour);
      const x = left + id % columns * size, y = Math.floor(id / columns) * size - this.top;
      c.fillRect(x, y, refs[id] ? side : Math.max(2, side >> 1), side);
    }
  }

  drawBlock(c, { left, size, columns }, id) {
    const { refs, cached, content, run } = this.state, gap = size > 8 ? 2 : 1, side = size - gap;
    const x = left + id % columns * size, y = Math.floor(id / columns) * size - this.top;
    c.fillStyle = "#cfcfcf";
    c.fillRect(x, y, side, side);
    if (id === 0) return; // the null block
    c.fillStyle = "#fff";
    c.fillRect(x + 1, y + 1, side - 2, side - 2);
    const ref = refs[id], group = content[id] >> 1, isShared = content[id] & 1;
    const colour = groupColour(group);
    if (ref) {
      c.fillStyle = isShared || !group ? colour : pale(colour);
      c.fillRect(x, y, side, side);
    } else if (cached[id]) { // free, and still to be found: a smaller cell in a white one
      c.fillStyle = isShared || !group ? colour : pale(colour);
      const inner = Math.max(2, Math.round(side / 3));
      c.fillRect(x + 1, y + 1, inner, side - 2);
    }
    if (size < 14) return;
    c.font = `${size >= 24 ? 11 : 9}px ${FONT}`;
    c.textAlign = "center";
    if (ref) {
      c.fillStyle = isShared || !group ? readable(colour) : INK;
      c.fillText((size >= 26 && group ? groupName(group) : "") + ref, x + side / 2, y + side / 2, side - 2);
    } else if (size >= 20 && this.rank.has(id)) {
      c.fillStyle = SOFT;
      c.fillText(`${this.rank.get(id)}.`, x + side / 2 + (cached[id] ? side / 6 : 0), y + side / 2, side - 4);
    }
  }

  text(id) {
    const { refs, cached, content, run } = this.state;
    if (id === 0) return "block 0: the null block, never handed out";
    const lines = [`block ${id}: ${refs[id] ? `in ${count(refs[id], "table")}` : "free"}${cached[id] ? ", cached" : ""}`];
    if (refs[id]) lines.push(`held by ${this.state.holders(id).slice(0, 12).join(", ")}${refs[id] > 12 ? ", ..." : ""}`);
    if (this.rank.has(id)) lines.push(`number ${this.rank.get(id)} of ${this.rank.size} in the free queue`);
    const group = content[id] >> 1;
    if (refs[id] || cached[id]) {
      lines.push(!group ? "content that no other request begins with" : content[id] & 1
        ? `prefix ${groupName(group)}: ${count(run.group_requests[group - 1], "request")} begin with it`
        : `of a request with prefix ${groupName(group)}, past what it has in common`);
    }
    return lines.join("\n");
  }

  queueText() {
    if (!this.state) return "";
    if (!this.free) return `free queue: not known here (${this.state.run.complaint})`;
    if (!this.free.length) return "no block is free";
    const shown = this.free.slice(0, 40).join(" ");
    return `${count(this.free.length, "free block")}, next to be handed out: ${shown}${this.free.length > 40 ? " ..." : ""}`;
  }
}

function groupColour(group) {
  return !group ? OWN : GROUP_COLOURS[group - 1] ?? MANY_GROUPS;
}

function channels(colour) {
  return [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
}

const PALE = new Map();

function pale(colour) {
  if (!PALE.has(colour)) {
    PALE.set(colour, `rgb(${channels(colour).map((v) => Math.round(255 - (255 - v) * 0.38)).join(",")})`);
  }
  return PALE.get(colour);
}

function readable(colour) {
  const [r, g, b] = channels(colour);
  return 0.3 * r + 0.59 * g + 0.11 * b > 128 ? INK : "#fff";
}
