// The list of requests, of which only the rows in sight are in the document, and the life of one.

import { getJson } from "./api.js";
import { $, colour, duration, el, number } from "./dom.js";

const ROW = 34; // pixels, as the style sheet has it
const AROUND = 10; // rows above and below what is in sight

export class RequestList {
  constructor(open) {
    this.open = open;
    this.rows = [];
    this.box = $("requests-box");
    this.body = $("requests-table").tBodies[0];
    this.box.addEventListener("scroll", () => this.draw());
    $("filter").addEventListener("input", () => this.draw());
    this.body.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) this.open(button.dataset.id);
    });
  }

  // requests: those that have not ended; ended: the latest that have.
  show(state) {
    this.rows = [
      ...state.requests.map((one) => [one.id, one.status, one.key, one.engine, one.prompt, one.cached, one.output, one.blocks, one.preemptions, state.now - one.arrival]),
      ...state.ended.map((one) => [one.id, one.reason ?? "ended", one.key, one.engine, one.prompt, one.cached, one.output, 0, one.preemptions, one.finished - one.arrival]),
    ];
    const silent = state.silent?.length ? `; front end ${state.silent.join(", ")} gives no answer: what it knows of its requests is not here` : "";
    const more = state.num_requests - state.requests.length;
    $("requests-text").textContent = `${number(state.num_requests)} open${more > 0 ? `, ${number(state.requests.length)} listed` : ""}; ${number(state.ended.length)} that ended lately${silent}`;
    this.draw();
  }

  draw() {
    if (!this.box.clientHeight) return;
    const wanted = $("filter").value.toLowerCase();
    const rows = wanted ? this.rows.filter((row) => row.slice(0, 3).join(" ").toLowerCase().includes(wanted)) : this.rows;
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW) - AROUND);
    const last = Math.min(rows.length, first + Math.ceil(this.box.clientHeight / ROW) + 2 * AROUND);
    const focused = document.activeElement?.dataset?.id;
    const gap = (count) => {
      const row = el("tr", { class: "gap", "aria-hidden": "true" }, el("td", { colspan: 10 }));
      row.style.height = `${count * ROW}px`;
      return row;
    };
    $("requests-table").setAttribute("aria-rowcount", rows.length + 1);
    this.body.replaceChildren(gap(first), ...rows.slice(first, last).map((row, i) => this.row(row, first + i)), gap(rows.length - last));
    if (focused) this.body.querySelector(`button[data-id="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  row([id, status, key, engine, prompt, cached, output, blocks, preemptions, age], index) {
    return el("tr", { "aria-rowindex": index + 2 },
      el("td", {}, el("button", { type: "button", "data-id": id, title: id }, id)),
      ...[status, key ?? "–", engine ?? "–", number(prompt), number(cached), number(output), number(blocks), number(preemptions), duration(age)].map((cell) => el("td", {}, cell)));
  }
}

export class Life {
  constructor() {
    this.dialog = $("life");
    this.dialog.addEventListener("close", () => clearTimeout(this.timer));
  }

  async open(id) {
    this.id = id;
    $("life-title").textContent = `Request ${id}`;
    $("life-body").replaceChildren(el("p", {}, "Loading…"));
    if (!this.dialog.open) this.dialog.showModal();
    await this.refresh();
  }

  async refresh() {
    clearTimeout(this.timer);
    const id = this.id;
    try {
      const life = await getJson(`dashboard/requests/${encodeURIComponent(id)}`);
      if (id !== this.id || !this.dialog.open) return;
      this.draw(life);
      if (!life.finished) this.timer = setTimeout(() => this.refresh(), 1500);
    } catch (error) {
      $("life-body").replaceChildren(el("p", { class: "problem" }, error.message));
    }
  }

  draw(life) {
    const open = new Set([...$("life-body").querySelectorAll("details[open]")].map((one) => one.dataset.name));
    const parts = [facts(life), bar(life), events(life)];
    if (!life.answers) parts.push(el("p", { class: "note" }, "Its text was not kept, or is with a front end of this server that gives no answer."));
    else if (life.http && life.answers.every((answer) => answer.num_tokens < 2) && !life.finished) parts.push(el("p", { class: "note" }, "If it is not streamed, its tokens come here 256 at a time, and at its end."));
    if (life.answers && !life.shows_text) parts.push(el("p", { class: "note" }, "It came with another key, or the server has no keys and is not this machine alone: its text is not shown."));
    for (const [i, answer] of (life.answers ?? []).entries()) parts.push(answerOf(answer, i));
    if (life.prompt) parts.push(fold("prompt", `Prompt, ${number(life.prompt_tokens)} tokens, the first ${number(life.cached_tokens)} cached`, tokens(life.prompt, null, life.cached_tokens)));
    $("life-body").replaceChildren(...parts);
    for (const one of $("life-body").querySelectorAll("details")) if (open.has(one.dataset.name)) one.open = true;
  }
}

function facts(life) {
  const http = life.http ?? {};
  const pairs = [
    ["State", life.finished ? "ended" : "open"], ["Route", http.route], ["Key", http.key], ["Model", http.model],
    ["Queued", duration(life.first_scheduled ? life.first_scheduled - life.arrival : null)],
    ["First token", duration(life.first_token ? life.first_token - life.arrival : null)],
    ["In all", duration((life.finished ?? life.now) - (life.arrival ?? life.now))],
    ["Cached", number(life.cached_tokens)], ["Preempted", number(life.preemptions)], ["Error", life.error ?? http.error],
  ].filter(([, value]) => value != null && value !== "");
  return el("dl", { class: "tiles" }, ...pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

// From its arrival to its end: the queue, each chunk of the prompt, the rest.
function bar(life) {
  const box = el("div", { class: "bar", role: "img" });
  if (!life.arrival) return box;
  const end = life.finished ?? life.now, whole = Math.max(end - life.arrival, 1e-6);
  const spans = [];
  const add = (from, to, fill, text) => {
    const span = el("span", { title: `${text}: ${duration(to - from)}` });
    span.style.left = `${(100 * (from - life.arrival)) / whole}%`;
    span.style.width = `${(100 * Math.max(to - from, 0)) / whole}%`;
    span.style.background = colour(fill);
    spans.push(text);
    box.append(span);
  };
  if (life.first_scheduled) add(life.arrival, life.first_scheduled, "--c4", "queue");
  const chunks = life.events.filter((event) => event[1] === "chunk");
  chunks.forEach(([at, , first, last], i) => add(at, chunks[i + 1]?.[0] ?? life.first_token ?? end, "--c2", `prompt tokens ${first}–${last}`));
  if (life.first_token) add(life.first_token, end, "--c1", "decoding");
  box.setAttribute("aria-label", `From arrival to end: ${spans.join(", ")}`);
  return box;
}

function events(life) {
  const start = life.arrival ?? life.events[0]?.[0] ?? 0;
  const say = {
    seated: (a, b) => `has a seat; ${number(a)} of ${number(b)} tokens were cached`,
    chunk: (a, b) => `tokens ${number(a)} to ${number(b)} of it are computed`,
    preempted: (a) => `had to give its seat back with ${number(a)} tokens`,
    ended: (a) => `ended with ${number(a)} tokens, prompt included`,
  };
  return el("ol", { id: "life-events" }, ...life.events.map(([at, what, a, b]) =>
    el("li", {}, `${duration(Math.max(0, at - start))}: ${(say[what] ?? String)(a, b)}`)));
}

function answerOf(answer, index) {
  const parts = (answer.parts ?? []).map((part) => el("div", { class: `part ${part.kind}` },
    el("p", { class: "who" }, part.kind === "call" ? `call of ${part.name}` : part.kind), part.text));
  const heat = answer.logprobs ? "coloured by log-probability" : "no log-probabilities were asked for";
  return el("section", {},
    el("h3", {}, `Answer ${index + 1}: ${number(answer.num_tokens)} tokens${answer.finish_reason ? `, ${answer.finish_reason}` : ""}`),
    ...parts,
    answer.tokens ? fold(`answer-${index}`, `Tokens (${heat})`, tokens(answer.tokens, answer.logprobs, 0), true) : null);
}

function fold(name, title, content, open = false) {
  return el("details", { "data-name": name, open }, el("summary", {}, title), content);
}

// Heat: from nothing (certain) to red (a surprise of e^-5 and less).
function tokens(texts, logprobs, cached) {
  const box = el("div", { class: "tokens", tabindex: 0, role: "region", "aria-label": "Tokens" });
  texts.forEach((text, i) => {
    const span = el("span", {}, text);
    if (i < cached) span.className = "cached";
    if (logprobs?.[i] != null) {
      span.title = `log-probability ${logprobs[i].toFixed(3)}`;
      span.style.background = `hsl(10 85% 50% / ${Math.min(0.45, (-logprobs[i] / 5) * 0.45)})`;
    }
    box.append(span);
  });
  return box;
}
