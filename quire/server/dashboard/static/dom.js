// Small helpers around the document.

export const $ = (id) => document.getElementById(id);

// el("p", {class: "note"}, "text", child): attributes as they are written, listeners as functions ("onclick").
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child != null).map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

export function table(target, columns, rows) {
  const head = el("thead", {}, el("tr", {}, ...columns.map((name) => el("th", { scope: "col" }, name))));
  const body = el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map((cell) => el("td", {}, cell)))));
  target.replaceChildren(head, body);
  if (!rows.length) body.append(el("tr", {}, el("td", { colspan: columns.length }, "none")));
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function number(value, digits = 0) {
  if (value == null) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: value < 10 ? digits : 0 });
}

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 0.0995) return `${number(seconds * 1000, 1)} ms`;
  if (seconds < 1) return `${number(seconds * 1000)} ms`;
  if (seconds < 120) return `${number(seconds, 1)} s`;
  return seconds < 7200 ? `${number(seconds / 60)} min` : `${number(seconds / 3600, 1)} h`;
}

// The same colour for the same request wherever it is shown.
export function hue(text) {
  let hash = 2166136261;
  for (let i = 0; i < text.length; i++) hash = Math.imul(hash ^ text.charCodeAt(i), 16777619);
  return (((hash >>> 0) % 997) * 137.508) % 360;
}

// Draw on a canvas as large as it is shown, in CSS pixels.
export function fit(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
