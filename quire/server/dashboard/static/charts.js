// The charts over time, one a question.

import { colour, duration, el, number } from "./dom.js";

const percentiles = (field) => ["p50", "p90", "p99"].map((label, i) => ({
  label, pick: (row) => row[field][i], show: duration,
}));
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const rate = (value) => `${number(value, 1)}/s`;

const CHARTS = [
  { id: "throughput", title: "Tokens a second", series: [
    { label: "generated", pick: (row) => row.generation_rate, show: rate },
    { label: "prompts", pick: (row) => row.prompt_rate, show: rate },
    { label: "of them cached", pick: (row) => row.cached_rate, show: rate }] },
  { id: "first-token", title: "Time to first token", series: percentiles("first_token") },
  { id: "gap", title: "Gap between tokens", series: percentiles("gap") },
  { id: "queue-time", title: "Time in queue", series: percentiles("queue") },
  { id: "queue", title: "Requests", series: [
    { label: "running", pick: (row) => row.running, show: number },
    { label: "waiting", pick: (row) => row.waiting, show: number }] },
  { id: "refusals", title: "Refused, failed and preempted a second", series: [
    { label: "refused", pick: (row) => row.refused_rate, show: rate },
    { label: "failed", pick: (row) => row.failed_rate, show: rate },
    { label: "preempted", pick: (row) => row.preemption_rate, show: rate }] },
  { id: "kv", title: "KV cache in use", series: [
    { label: "used", pick: (row) => row.kv_usage * 100, show: (value) => `${number(value, 1)} %` }] },
  { id: "drafts", title: "Drafts accepted", wanted: (state) => state.server.speculative, series: [
    { label: "accepted", pick: (row) => (row.accepted == null ? null : row.accepted * 100), show: (value) => `${number(value, 1)} %` }] },
];

export class Charts {
  constructor(box) {
    this.box = box;
    this.made = new Map();
  }

  // rows: objects with the history's columns, oldest first.
  draw(rows, state) {
    const times = rows.map((row) => row.time);
    for (const chart of CHARTS) {
      if (chart.wanted && !chart.wanted(state)) continue;
      let made = this.made.get(chart.id);
      if (!made) this.made.set(chart.id, (made = this.make(chart)));
      made.plot.setData([times, ...chart.series.map((one) => rows.map(one.pick))]);
      const last = rows.at(-1);
      chart.series.forEach((one, i) => {
        const value = last ? one.pick(last) : null;
        made.values[i].textContent = value == null ? "–" : one.show(value);
      });
    }
  }

  make(chart) {
    const values = chart.series.map(() => el("b"));
    const caption = el("figcaption", {}, el("h3", {}, chart.title), " ", ...chart.series.map((one, i) =>
      el("span", { class: "series" }, el("i", { class: `c${i + 1}` }), `${one.label} `, values[i])));
    const place = el("div", { class: "plot", "aria-hidden": "true" });
    const figure = el("figure", { class: "card", id: `chart-${chart.id}` }, caption, place);
    this.box.append(figure);
    const plot = new uPlot(this.options(chart, place), [[], ...chart.series.map(() => [])], place);
    new ResizeObserver(() => plot.setSize({ width: place.clientWidth, height: 170 })).observe(place);
    return { plot, values, figure };
  }

  options(chart, place) {
    const axis = () => ({
      stroke: () => colour("--soft"), grid: { stroke: () => colour("--grid"), width: 1 }, ticks: { show: false },
    });
    const show = chart.series[0].show;
    return {
      width: place.clientWidth || 400,
      height: 170,
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      scales: { y: { range: (_, low, high) => [0, (high || 1) * 1.1] } },
      axes: [{ ...axis(), space: 80, values: (_, ticks) => ticks.map(clock) }, { ...axis(), size: 62, values: (_, ticks) => ticks.map((tick) => show(tick)) }],
      series: [{}, ...chart.series.map((one, i) => ({
        label: one.label, stroke: () => colour(`--c${i + 1}`), width: 1.5, points: { show: false }, spanGaps: false,
      }))],
    };
  }

  // Colours come from the page's theme.
  redraw() {
    for (const { plot } of this.made.values()) plot.redraw();
  }
}
