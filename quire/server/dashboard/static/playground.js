// A conversation with the model, with one or two settings at once. What is sent is what a client would send.

import { events } from "./api.js";
import { $, el, number } from "./dom.js";
import { Markdown } from "./markdown.js";

const MAX_ROUNDS = 5; // answers of mock tools in a row
const PATH = "v1/chat/completions";
const EXAMPLE_TOOL = [{
  type: "function",
  function: {
    name: "get_weather", description: "The weather of a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];
const NUMBERS = { temperature: "", top_p: "", top_k: "", min_p: "", max_tokens: "256", seed: "", presence_penalty: "", repetition_penalty: "" };

class Pane {
  constructor(number) {
    this.number = number;
    this.messages = [];
    this.fields = {};
    const field = (name, control, label = name) => {
      control.id = `${name}-${number}`;
      this.fields[name] = control;
      return el("label", { for: control.id }, label, control);
    };
    const code = (name, label, rows, placeholder) => field(name, el("textarea", { class: "code", rows, spellcheck: "false", placeholder }), label);
    const check = (name, label) => {
      const made = field(name, el("input", { type: "checkbox" }), label);
      made.className = "check";
      made.prepend(made.lastChild);
      return made;
    };
    const insert = el("button", { type: "button", onclick: () => this.exampleTool() }, "An example tool");
    this.talk = el("div", { class: "talk", role: "log", "aria-label": `Conversation ${number}` });
    this.root = el("section", { class: "card pane", "aria-label": `Settings ${number}` },
      el("details", { open: true }, el("summary", {}, `Settings ${number}`),
        el("div", { class: "fields" }, field("model", el("select")),
          ...Object.entries(NUMBERS).map(([name, value]) => field(name, el("input", { inputmode: "decimal", value }))),
          field("reasoning_effort", el("select", {}, ...["", "none", "low", "medium", "high"].map((one) => el("option", {}, one)))),
          check("logprobs", "log-probabilities")),
        el("div", { class: "stack" }, code("system", "System prompt", 2, ""),
          code("tools", "Tools (JSON list)", 3, "[]"), code("mocks", "Their mock answers (JSON: name → answer); calls are answered by these", 2, "{}"), el("div", {}, insert),
          field("tool_choice", el("select", {}, ...["auto", "required", "none"].map((one) => el("option", {}, one)))),
          code("schema", "JSON schema of the answer", 2, ""))),
      this.talk);
  }

  know(models) {
    const select = this.fields.model;
    if (select.options.length === models.length) return;
    const chosen = select.value;
    select.replaceChildren(...models.map((name) => el("option", {}, name)));
    if (models.includes(chosen)) select.value = chosen;
  }

  exampleTool() {
    this.fields.tools.value = JSON.stringify(EXAMPLE_TOOL, null, 2);
    this.fields.mocks.value = JSON.stringify({ get_weather: { city: "Paris", sky: "clear", celsius: 21 } }, null, 2);
  }

  json(name) {
    const text = this.fields[name].value.trim();
    if (!text) return undefined;
    try {
      return JSON.parse(text);
    } catch (error) {
      throw new Error(`${name} of settings ${this.number}: ${error.message}`);
    }
  }

  // What is sent, with these messages.
  body(messages) {
    const system = this.fields.system.value.trim();
    const body = { model: this.fields.model.value, messages: [...(system ? [{ role: "system", content: system }] : []), ...messages] };
    for (const name of Object.keys(NUMBERS)) {
      const text = this.fields[name].value.trim();
      if (!text) continue;
      if (Number.isNaN(Number(text))) throw new Error(`${name} of settings ${this.number} is no number`);
      body[name] = Number(text);
    }
    const [tools, schema] = [this.json("tools"), this.json("schema")];
    if (tools?.length) Object.assign(body, { tools, tool_choice: this.fields.tool_choice.value });
    if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    if (this.fields.reasoning_effort.value) body.reasoning_effort = this.fields.reasoning_effort.value;
    if (this.fields.logprobs.checked) Object.assign(body, { logprobs: true, top_logprobs: 0 });
    return body;
  }

  async ask(message, signal) {
    this.add(message);
    for (let round = 0; round < MAX_ROUNDS; round++) {
      const calls = await this.answer(signal, round > 0);
      const mocks = this.json("mocks") ?? {};
      if (!calls.length || !calls.every((call) => call.function.name in mocks)) return;
      for (const call of calls) {
        this.add({ role: "tool", tool_call_id: call.id, content: JSON.stringify(mocks[call.function.name]) });
      }
    }
  }

  add(message) {
    this.messages.push(message);
    const parts = typeof message.content === "string" ? [{ type: "text", text: message.content }] : message.content;
    this.talk.append(el("div", { class: `turn ${message.role}` }, el("p", { class: "who" }, message.role === "tool" ? "tool (mock)" : message.role),
      ...parts.map((part) => (part.type === "text" ? el("div", {}, part.text) : el("img", { src: part.image_url.url, alt: "the image that was sent" })))));
  }

  // isLater: a call has been answered: another one is not forced.
  async answer(signal, isLater) {
    const view = new AnswerView(this.talk);
    const body = this.body(this.messages);
    if (isLater && body.tool_choice === "required") body.tool_choice = "auto";
    const began = performance.now();
    let first = null, usage = null;
    try {
      for await (const chunk of events(PATH, { ...body, stream: true, stream_options: { include_usage: true } }, signal)) {
        usage = chunk.usage ?? usage;
        for (const choice of chunk.choices) {
          first ??= performance.now();
          view.take(choice);
        }
      }
    } catch (error) {
      view.fail(error.name === "AbortError" ? "stopped" : error.message);
      if (error.name !== "AbortError") throw error;
    }
    view.end(usage, first && first - began, performance.now() - began);
    const message = { role: "assistant", content: view.content.text };
    if (view.calls.length) message.tool_calls = view.calls;
    this.messages.push(message);
    return signal.aborted ? [] : view.calls;
  }

  clear() {
    this.messages = [];
    this.talk.replaceChildren();
  }
}

class AnswerView {
  constructor(talk) {
    this.calls = [];
    this.cards = [];
    this.box = el("div", { class: "turn assistant" }, el("p", { class: "who" }, "assistant"));
    this.reasoning = null;
    const text = el("div", { class: "content" });
    this.content = new Markdown(text);
    this.box.append(text);
    this.text = text;
    talk.append(this.box);
  }

  take({ delta, finish_reason: reason }) {
    const thought = delta.reasoning ?? delta.reasoning_content;
    if (thought) {
      if (!this.reasoning) {
        this.reasoning = el("div");
        this.box.insertBefore(el("details", { class: "reasoning", open: true }, el("summary", {}, "Reasoning"), this.reasoning), this.text);
      }
      this.reasoning.append(thought);
    }
    if (delta.content) this.content.add(delta.content);
    for (const part of delta.tool_calls ?? []) this.call(part);
    if (reason) this.reason = reason;
  }

  call(part) {
    let call = this.calls[part.index];
    if (!call) {
      call = this.calls[part.index] = { id: part.id, type: "function", function: { name: part.function.name, arguments: "" } };
      const code = el("pre", { tabindex: 0 });
      this.cards[part.index] = code;
      this.box.append(el("div", { class: "tool-call" }, el("p", { class: "who" }, "tool call"), el("strong", {}, call.function.name), code));
    }
    call.function.arguments += part.function?.arguments ?? "";
    this.cards[part.index].textContent = call.function.arguments;
  }

  fail(text) {
    this.box.append(el("p", { class: "problem" }, text));
  }

  end(usage, first, whole) {
    const parts = [this.reason ?? "", usage && `${number(usage.completion_tokens)} tokens`, usage && `prompt ${number(usage.prompt_tokens)}`,
      first && `first after ${number(first)} ms`, usage && first && usage.completion_tokens > 1 && whole > first
        && `${number((1000 * (usage.completion_tokens - 1)) / (whole - first), 1)} tok/s`];
    this.box.append(el("p", { class: "who" }, parts.filter(Boolean).join(" · ")));
  }
}

export class Playground {
  constructor() {
    this.panes = [];
    this.addPane();
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("question").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
    });
    $("stop").addEventListener("click", () => this.abort?.abort());
    $("clear").addEventListener("click", () => this.panes.forEach((pane) => pane.clear()));
    $("compare").addEventListener("click", () => this.compare());
    $("copy-curl").addEventListener("click", () => this.copy(curl));
    $("copy-python").addEventListener("click", () => this.copy(python));
  }

  know(server) {
    this.models = server.models;
    for (const pane of this.panes) pane.know(server.models);
    $("send").disabled = !server.generates || Boolean(this.abort);
    if (!server.generates) $("ask-status").textContent = "This model makes vectors and does not chat.";
  }

  addPane() {
    const pane = new Pane(this.panes.length + 1);
    this.panes.push(pane);
    $("panes").append(pane.root);
    if (this.models) pane.know(this.models);
  }

  compare() {
    if (this.panes.length === 1) this.addPane();
    else this.panes.pop().root.remove();
    $("compare").setAttribute("aria-pressed", this.panes.length > 1);
  }

  async message() {
    const text = $("question").value, [file] = $("image").files;
    if (!file) return { role: "user", content: text };
    const url = await new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(new Error("the image cannot be read"));
      reader.readAsDataURL(file);
    });
    return { role: "user", content: [{ type: "text", text }, { type: "image_url", image_url: { url } }] };
  }

  async send() {
    if (this.abort || !$("question").value.trim()) return;
    this.abort = new AbortController();
    $("send").disabled = true;
    $("stop").disabled = false;
    $("ask-status").textContent = "Answering…";
    try {
      const message = await this.message();
      for (const pane of this.panes) pane.body([]); // what is wrong is said before anything is sent
      $("question").value = $("image").value = "";
      const ends = await Promise.allSettled(this.panes.map((pane) => pane.ask(message, this.abort.signal)));
      const failed = ends.find((end) => end.status === "rejected");
      if (failed) throw failed.reason;
      $("ask-status").textContent = "Done";
    } catch (error) {
      $("ask-status").textContent = error.message;
    } finally {
      this.abort = null;
      $("send").disabled = false;
      $("stop").disabled = true;
    }
  }

  async copy(write) {
    try {
      const pane = this.panes[0], question = $("question").value.trim();
      const body = pane.body([...pane.messages, ...(question || !pane.messages.length ? [{ role: "user", content: question || "Hello!" }] : [])]);
      await navigator.clipboard.writeText(write(new URL(PATH, document.baseURI).href, body));
      $("ask-status").textContent = "Copied";
    } catch (error) {
      $("ask-status").textContent = `Not copied: ${error.message}`;
    }
  }
}

// The key itself is never copied.
export function curl(address, body) {
  const text = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${address} \\\n  -H "Authorization: Bearer $QUIRE_API_KEY" \\\n  -H 'Content-Type: application/json' \\\n  -d '${text}'\n`;
}

const OWN = ["top_k", "min_p", "repetition_penalty"]; // fields that OpenAI's client does not know by name

export function python(address, body) {
  const known = Object.entries(body).filter(([name]) => !OWN.includes(name));
  const own = Object.fromEntries(Object.entries(body).filter(([name]) => OWN.includes(name)));
  const lines = known.map(([name, value]) => `    ${name}=${literal(value)},`);
  if (Object.keys(own).length) lines.push(`    extra_body=${literal(own)},`);
  return `import os\n\nfrom openai import OpenAI\n\nclient = OpenAI(base_url=${JSON.stringify(address.replace(/\/chat\/completions$/, ""))}, api_key=os.environ.get("QUIRE_API_KEY", "none"))\n`
    + `stream = client.chat.completions.create(\n${lines.join("\n")}\n    stream=True,\n)\nfor chunk in stream:\n    if chunk.choices:\n        print(chunk.choices[0].delta.content or "", end="", flush=True)\n`;
}

function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}
