// The map of the KV blocks, and the steps.

import { $, colour, duration, fit, hue, number, table } from "./dom.js";

export class BlockMap {
  constructor(open) {
    this.canvas = $("blocks");
    this.at = -1;
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("click", () => this.owner() && open(this.owner()));
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns }[event.key];
      if (event.key === "Enter" && this.owner()) open(this.owner());
      if (!step || !this.cells) return;
      event.preventDefault();
      this.go(this.at < 0 ? 0 : this.at + step);
    });
  }

  draw(cells, requests) {
    this.cells = cells;
    this.ids = requests.map((request) => request.id);
    const width = this.canvas.clientWidth;
    if (!width) return;
    const count = cells.held.length;
    const size = Math.max(4, Math.min(16, Math.floor(Math.sqrt((width * 260) / Math.max(count, 1)))));
    this.size = size;
    this.columns = Math.max(1, Math.floor(width / size));
    const context = fit(this.canvas, width, Math.ceil(count / this.columns) * size);
    const [free, cached, dot] = [colour("--free"), colour("--cached"), colour("--card")];
    const fills = this.ids.map((id) => `hsl(${hue(id)} 65% 48%)`);
    for (let i = 0; i < count; i++) {
      const x = (i % this.columns) * size, y = Math.floor(i / this.columns) * size;
      context.fillStyle = cells.held[i] ? (fills[cells.owner[i]] ?? colour("--soft")) : cells.cached[i] ? cached : free;
      context.globalAlpha = cells.held[i] ? 0.4 + (0.6 * cells.held[i]) / cells.per_cell : 1;
      context.fillRect(x, y, size - 1, size - 1);
      context.globalAlpha = 1;
      if (cells.shared[i]) {
        context.fillStyle = dot;
        context.fillRect(x + size * 0.3, y + size * 0.3, size * 0.35, size * 0.35);
      }
      if (i === this.at) {
        context.strokeStyle = colour("--text");
        context.lineWidth = 2;
        context.strokeRect(x, y, size - 1, size - 1);
      }
    }
    const sum = (values) => values.reduce((a, b) => a + b, 0);
    const [held, shared, kept] = [sum(cells.held), sum(cells.shared), sum(cells.cached)];
    Object.assign(this.canvas.dataset, { held, shared, cached: kept, blocks: cells.num_blocks });
    $("blocks-text").textContent = `${number(held)} of ${number(cells.num_blocks)} blocks held, ${number(shared)} of them by several requests; `
      + `${number(kept)} free ones are still cached.` + (cells.per_cell > 1 ? ` A cell is ${cells.per_cell} blocks.` : "");
    if (this.at >= 0) this.tell();
  }

  owner() {
    return this.cells && this.at >= 0 ? this.ids[this.cells.owner[this.at]] : undefined;
  }

  point(event) {
    if (!this.cells) return;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size);
    if (column < this.columns) this.go(Math.floor((event.clientY - box.top) / this.size) * this.columns + column);
  }

  go(cell) {
    const at = Math.max(0, Math.min(this.cells.held.length - 1, cell));
    if (at === this.at) return;
    this.at = at;
    this.draw(this.cells, this.ids.map((id) => ({ id })));
  }

  tell() {
    const { cells, at } = this, first = at * cells.per_cell + 1, last = Math.min(cells.num_blocks, first + cells.per_cell - 1);
    const where = first === last ? `Block ${first}` : `Blocks ${first}–${last}`;
    const what = cells.held[at] ? `held by ${this.owner() ?? "a request that is not listed"}${cells.shared[at] ? ", shared" : ""}`
      : cells.cached[at] ? "free, still cached" : "free";
    const text = `${where}: ${what}`;
    if ($("blocks-cell").textContent !== text) $("blocks-cell").textContent = text;
  }
}

const BAR = 6;

// steps: objects, oldest first.
export function drawSteps(steps) {
  const canvas = $("steps"), width = canvas.clientWidth, height = 130;
  if (!width) return;
  const shown = steps.slice(-Math.floor(width / BAR));
  const context = fit(canvas, width, height);
  const highest = Math.max(1e-4, ...shown.map((step) => Math.max(step.seconds, step.predicted)));
  const scale = (height - 14) / highest;
  shown.forEach((step, i) => {
    const x = i * BAR, tall = Math.max(1, step.seconds * scale);
    const share = step.prompt_tokens / Math.max(1, step.prompt_tokens + step.decodes);
    context.fillStyle = colour("--c1");
    context.fillRect(x, height - tall, BAR - 1, tall);
    context.fillStyle = colour("--c2");
    context.fillRect(x, height - tall * share, BAR - 1, tall * share);
    context.fillStyle = colour("--text");
    if (step.predicted > 0) context.fillRect(x, height - step.predicted * scale, BAR - 1, 1.5);
    context.fillStyle = colour("--c5");
    const idle = Math.min(height, step.gap * scale);
    if (idle >= 1) context.fillRect(x, height - idle, 1.5, idle);
  });
  context.fillStyle = colour("--soft");
  context.font = "11px system-ui";
  context.fillText(duration(highest), 2, 10);
  const last = shown.at(-1);
  const text = last ? `Step ${number(last.step)}: ${duration(last.seconds)} (predicted ${duration(last.predicted)}), `
    + `${number(last.prompt_tokens)} prompt tokens, ${number(last.decodes)} decode rows` : "No step yet.";
  if ($("steps-text").textContent !== text) $("steps-text").textContent = text;
  canvas.dataset.last = last ? last.step : -1;
  if ($("steps-table").closest("details").open) {
    table($("steps-table"), ["Step", "Took", "Predicted", "Idle before", "Prompt tokens", "Decode rows", "Drafts", "Running", "Waiting"],
      steps.slice(-50).reverse().map((step) => [number(step.step), duration(step.seconds), duration(step.predicted), duration(step.gap),
        number(step.prompt_tokens), number(step.decodes), number(step.drafts), number(step.running), number(step.waiting)]));
  }
}
