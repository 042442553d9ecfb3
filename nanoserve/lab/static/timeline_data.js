"use strict";

// The columns of the file, and questions about a run.

const TYPES = { i: Int32Array, f: Float32Array, d: Float64Array };

async function readColumns(meta) {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  return Object.fromEntries(meta.columns.map(([name, kind, offset, length]) =>
    [name, new TYPES[kind](buffer, offset, length)]));
}

// The last place in a sorted column whose value is not above `value`; -1: there is none.
function lastNotAbove(column, value, from = 0, to = column.length) {
  let low = from, high = to;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

class Run {
  constructor(info, columns) {
    Object.assign(this, info);
    for (const [name, column] of Object.entries(columns)) {
      if (name.startsWith(info.prefix)) this[name.slice(info.prefix.length)] = column;
    }
    this.numSteps = this.x0.length;
    this.end = this.x1[this.numSteps - 1];
    this.laneEnd = Float64Array.from(this.ids, (_, lane) => {
      const last = this.lane_runs[lane + 1] - 1;
      return last < this.lane_runs[lane] ? this.arrival[lane] : this.x1[this.run_first[last] + this.run_steps[last] - 1];
    });
    this.itlTop = this.itl_max.reduce((a, b) => Math.max(a, b), 0);
    this.itlBottom = this.itl_p50.reduce((a, b) => b > 0 ? Math.min(a, b) : a, Infinity);
  }

  // The step that runs at a time, or the last one before it.
  stepAt(time) {
    return Math.max(0, lastNotAbove(this.x0, time));
  }

  // The run of equal steps that a lane has at a step; -1: none.
  runAt(lane, place) {
    const first = this.lane_runs[lane];
    const run = lastNotAbove(this.run_first, place, first, this.lane_runs[lane + 1]);
    return run >= first && place < this.run_first[run] + this.run_steps[run] ? run : -1;
  }

  // Lanes that live at some time in [t0, t1].
  lanesBetween(t0, t1) {
    const lanes = [];
    for (let lane = 0; lane < this.ids.length; lane++) {
      if (this.arrival[lane] <= t1 && this.laneEnd[lane] >= t0) lanes.push(lane);
    }
    return lanes;
  }

  stepText(place) {
    const took = this.x1[place] - this.start[place];
    const idle = place ? this.start[place] - this.x1[place - 1] : 0;
    const parts = [
      `step ${this.step[place]} at ${seconds(this.start[place])}, took ${millis(took)}`,
      `${this.tokens[place]} of ${this.budget} tokens for ${count(this.rows[place], "request")}`,
      `${this.prefill[place]} of them prefill`,
    ];
    if (this.preempted[place]) parts.push(`${this.preempted[place]} preempted`);
    if (this.padding[place]) parts.push(`${this.padding[place]} padding`);
    if (this.itl_max[place] > 0) {
      parts.push(`gap between tokens ${millis(this.itl_p50[place])}, longest ${millis(this.itl_max[place])}`);
    }
    if (idle < 0) parts.push("launched while the step before it ran");
    if (this.errors[place]) parts.push(`FAILED: ${this.errors[place]}`);
    return parts.join("; ");
  }

  // What a request did in a step, and why it got nothing.
  laneText(lane, place) {
    const id = this.ids[lane], run = this.runAt(lane, place);
    if (run < 0) return this.step[place] === undefined ? id : `${id}: not here in step ${this.step[place]}`;
    const name = activities[this.run_activity[run]], tokens = this.run_tokens[run], why = this.run_reason[run];
    if (why < 0) return `${id}: ${name}, ${count(tokens, "token")} in step ${this.step[place]}`;
    return `${id}: ${name}; it got nothing in step ${this.step[place]}, because ${this.reasons[why]}`;
  }

  requestText(lane) {
    const parts = [`${this.prompt[lane]} prompt tokens`, `${this.outputs[lane]} outputs`];
    if (this.hits[lane]) parts.push(`${this.hits[lane]} found in the cache`);
    if (this.ttft[lane] >= 0) parts.push(`first token after ${millis(this.ttft[lane])}`);
    if (this.group[lane]) parts.push(`prefix ${groupName(this.group[lane])}`);
    parts.push(this.ends[lane] ? `ended: ${this.ends[lane]}` : "open at the end");
    return parts.join(", ");
  }
}

function count(n, what) {
  return `${n} ${what}${n === 1 ? "" : "s"}`;
}

function millis(s) {
  return s >= 10 ? `${s.toFixed(1)} s` : s >= 0.01 ? `${(s * 1e3).toFixed(1)} ms` : `${(s * 1e3).toFixed(3)} ms`;
}

function seconds(s) {
  return `${s.toFixed(s < 10 ? 4 : 3)} s`;
}

// A, B, ... Z, AA, ...
function groupName(group) {
  let name = "";
  for (let n = group; n > 0; n = Math.floor((n - 1) / 26)) name = String.fromCharCode(65 + (n - 1) % 26) + name;
  return name;
}
