// The page: the key, the tabs, the theme, and once a second what the server tells.

import { AskError, getJson, key } from "./api.js";
import { Charts } from "./charts.js";
import { $, duration, el, number, table } from "./dom.js";
import { BlockMap, drawSteps } from "./maps.js";
import { Playground } from "./playground.js";
import { Life, RequestList } from "./requests.js";

const EVERY = 1000; // milliseconds
const KEPT_ROWS = 900, KEPT_STEPS = 1024;
const STEP = ["step", "ended", "seconds", "gap", "predicted", "prompt_tokens", "decodes", "drafts", "waiting", "running"];
const REQUEST = ["id", "status", "prompt", "output", "computed", "cached", "preemptions", "blocks", "arrival", "priority", "adapter", "key", "route"];
const named = (names, values) => Object.fromEntries(names.map((name, i) => [name, values[i]]));

const life = new Life();
const charts = new Charts($("charts"));
const blocks = new BlockMap((id) => life.open(id));
const list = new RequestList((id) => life.open(id));
const playground = new Playground();
let rows = [], state = null, timer = 0, tab = "overview", until = 0, letIn = false;
const steps = new Map(); // of each core, oldest first

// -- what the server tells

async function poll() {
  clearTimeout(timer);
  try {
    if (!letIn && !(await enter())) return;
    const told = await getJson(`dashboard/state?since=${rows.at(-1)?.time ?? 0}&steps=${until}`);
    take(told);
    say(told.server.problem ?? "Live", Boolean(told.server.problem));
  } catch (error) {
    if (error instanceof AskError && error.status === 401) return askForKey(true);
    say(error instanceof AskError ? error.message : "The server does not answer", true);
  }
  if (!document.hidden) timer = setTimeout(poll, EVERY);
}

function take(told) {
  const { columns, rows: fresh } = told.history;
  rows = [...rows, ...fresh.map((row) => named(columns, row))].slice(-KEPT_ROWS);
  until = told.until;
  for (const one of told.cores) {
    const kept = steps.get(one.engine) ?? [], known = kept.at(-1)?.ended ?? 0;
    steps.set(one.engine, [...kept, ...one.steps.map((step) => named(STEP, step)).filter((step) => step.ended > known)].slice(-KEPT_STEPS));
    one.requests = one.requests.map((request) => ({ ...named(REQUEST, request), engine: one.engine }));
  }
  state = {
    ...told,
    engines: told.stats.engines ?? [], // each core's statistics, where there are several cores
    requests: told.cores.flatMap((one) => one.requests),
    num_requests: told.cores.reduce((sum, one) => sum + one.num_requests, 0),
  };
  chooseFrom(state.engines.length);
  $("model").textContent = state.server.name;
  document.title = `${state.server.name} – Quire dashboard`;
  playground.know(state.server);
  draw();
}

function draw() {
  if (!state) return;
  if (tab === "overview") overview();
  if (tab === "requests") list.show(state);
}

function overview() {
  const { stats, server } = state, last = rows.at(-1);
  const tiles = [
    ["Generated", last ? `${number(last.generation_rate, 1)} tok/s` : "–"], ["Running", number(stats.num_running ?? 0)],
    ["Waiting", number(stats.num_waiting ?? 0)], ["Wait of a newcomer", duration(state.wait)],
    ["KV cache", `${number((stats.kv_usage ?? 0) * 100, 1)} %`],
    ["First token p90", duration(last?.first_token[1])], ["Gap p90", duration(last?.gap[1])],
    ["Refused", number(state.rejected)], ["Failed", number(state.finished.error)], ["Preemptions", number(stats.num_preemptions ?? 0)],
    ["Prefix hits", stats.prefix_queries ? `${number((100 * (stats.prefix_hits ?? 0)) / stats.prefix_queries, 1)} %` : "–"],
    ["Engine restarts", number(stats.num_restarts ?? 0)], ["Up", duration(state.now - server.created)], ["Device", server.device],
  ];
  if (server.speculative) tiles.push(["Drafts accepted", stats.num_draft_tokens ? `${number((100 * (stats.num_accepted_tokens ?? 0)) / stats.num_draft_tokens, 1)} %` : "–"]);
  $("tiles").replaceChildren(...tiles.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  charts.draw(rows, state);
  const core = Number($("core").value || 0), shown = state.cores.find((one) => one.engine === core);
  $("core-down").hidden = Boolean(shown);
  if (shown) {
    blocks.draw(shown.cells, shown.requests);
    drawSteps(steps.get(core) ?? []);
  }
  tables();
}

// Of several cores one is looked into at a time; the table has them side by side.
function chooseFrom(count) {
  $("cores-card").hidden = count < 2;
  if (count < 2 || $("core").options.length === count) return;
  $("core").replaceChildren(...Array.from({ length: count }, (_, i) => el("option", { value: i }, i)));
}
$("core").addEventListener("change", () => {
  blocks.at = -1;
  draw();
});

function tables() {
  const { stats, server } = state;
  table($("cores"), ["Core", "State", "Running", "Waiting", "KV cache", "Prompt tokens", "Generated tokens", "Prefix hits", "Preemptions", "Restarts"], state.engines.map((one, i) => [
    i, one.is_up === false ? "starts again" : "runs", number(one.num_running ?? 0), number(one.num_waiting ?? 0), `${number((one.kv_usage ?? 0) * 100, 1)} %`,
    number(one.prompt_tokens ?? 0), number(one.generation_tokens ?? 0),
    one.prefix_queries ? `${number((100 * (one.prefix_hits ?? 0)) / one.prefix_queries, 1)} %` : "–", number(one.num_preemptions ?? 0), number(one.num_restarts ?? 0)]));
  $("gpus-card").hidden = !state.gpus.length;
  table($("gpus"), ["GPU", "Memory", "Power", "Clock", "Load", "Temperature"], state.gpus.map((gpu) => [
    gpu.name, `${number(gpu.memory_used)} of ${number(gpu.memory_total)} MiB`, `${number(gpu.power)} W`, `${number(gpu.clock)} MHz`,
    `${number(gpu.load)} %`, `${number(gpu.temperature)} °C`]));
  const [runs, waits] = [stats.running_adapters ?? [], stats.waiting_adapters ?? []];
  const adapters = [...new Set([...server.adapters, ...runs, ...waits])];
  $("adapters-card").hidden = !adapters.length;
  table($("adapters"), ["Adapter", "State"], adapters.map((name) => [name, runs.includes(name) ? "running" : waits.includes(name) ? "waited for" : "loaded"]));
  table($("keys"), ["Key", "Requests", "Failures", "Prompt tokens", "of them cached", "Generated tokens"], Object.entries(state.keys).map(([name, use]) => [
    name, number(use.requests), number(use.failures), number(use.prompt_tokens), number(use.cached_tokens), number(use.generation_tokens)]));
  table($("errors"), ["When", "Status", "Route", "Key", "What"], state.errors.map((error) => [
    new Date(error.time * 1000).toLocaleTimeString(), error.status, error.route, error.key, error.error ?? "–"]));
}

function say(text, bad = false) {
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").classList.toggle("bad", bad);
}

// -- the key

// Whether the server lets us in with the key that we have, or asks for none.
async function enter() {
  const door = await getJson("dashboard/door");
  if (door.is_open) letIn = true;
  else askForKey(key.get() != null);
  return letIn;
}

function askForKey(wrong) {
  letIn = false;
  key.forget();
  $("login").hidden = false;
  $("leave").hidden = true;
  for (const name of ["overview", "requests", "playground"]) $(name).hidden = true;
  $("tabs").hidden = true;
  $("login-error").textContent = wrong ? "The server does not know this key." : "";
  say("Not logged in");
  $("key").focus();
}

function showTabs() {
  $("login").hidden = true;
  $("tabs").hidden = false;
  $("leave").hidden = key.get() == null;
  choose(tab);
}

$("login-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  $("key").value = "";
  showTabs();
  poll();
});
$("leave").addEventListener("click", () => {
  key.forget();
  location.reload();
});

// -- tabs and theme

const tabs = [...$("tabs").children];
function choose(name) {
  tab = name;
  for (const button of tabs) {
    const chosen = button.id === `tab-${name}`;
    button.setAttribute("aria-selected", chosen);
    button.tabIndex = chosen ? 0 : -1;
    $(button.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  draw();
}
for (const button of tabs) button.addEventListener("click", () => choose(button.id.slice(4)));
$("tabs").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
  next.focus();
  next.click();
});

const THEMES = ["auto", "light", "dark"];
function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  localStorage.setItem("quire-theme", name);
  $("theme").textContent = `Theme: ${name}`;
  charts.redraw();
  draw();
}
$("theme").addEventListener("click", () => theme(THEMES[(THEMES.indexOf(localStorage.getItem("quire-theme") ?? "auto") + 1) % 3]));
theme(localStorage.getItem("quire-theme") ?? "auto");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.redraw());
document.addEventListener("visibilitychange", () => document.hidden || poll());
addEventListener("resize", draw);

const wanted = location.hash.slice(1);
if (["overview", "requests", "playground"].includes(wanted)) tab = wanted;
showTabs();
poll();
