"use strict";
// DOM helpers: elements, the reader's selections, the light and dark theme, and redrawing when the width changes.
// User-defined text only goes through textContent or a canvas. Nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(2)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// The reader's selections by name, kept in memory, so that a live page looks the same after each update.
const chosen = new Map();
const choice = (name, fallback) => (chosen.has(name) ? chosen.get(name) : fallback);
const choose = (name, value) => chosen.set(name, value);

const color = (index) => `var(--s${index % 8})`;

// Dashes tell curves apart without color; with eight colors, forty pairs differ.
const DASHES = ["", "7 4", "2 3", "10 3 2 3", "5 2 1 2"];
const dash = (index) => DASHES[index % DASHES.length];

// The sample of a curve in a legend: a line with its dashes, or a square.
function swatch(one) {
  if (one.dash === undefined || one.points)
    return el("span", { class: one.points ? "swatch round" : "swatch", style: { background: one.color } });
  return svg(
    "svg",
    { class: "swatch line", viewBox: "0 0 26 8", "aria-hidden": "true" },
    svg("line", { x1: 0, x2: 26, y1: 4, y2: 4, stroke: one.color, "stroke-dasharray": one.dash || "none" }),
  );
}
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Redraws a chart when the width of its host element changes.
const redraws = new Set();
const watcher = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const host = entry.target;
    const width = Math.floor(entry.contentRect.width);
    if (host.redraw && width > 0 && width !== host.drawnWidth) {
      host.drawnWidth = width;
      host.redraw(width);
    }
  }
});

function drawWithin(host, draw) {
  host.redraw = draw;
  watcher.observe(host);
  redraws.add(host);
  host.refresh = () => {
    if (host.drawnWidth) draw(host.drawnWidth);
  };
}

// Releases charts that were replaced. In the next frame, because new charts are drawn before they are attached.
function forgetDetached() {
  requestAnimationFrame(() => {
    for (const host of redraws) {
      if (!host.isConnected) {
        watcher.unobserve(host);
        redraws.delete(host);
      }
    }
  });
}

const dark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  const theme = choice("theme", dark.matches ? "dark" : "light");
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = theme === "dark" ? "Light" : "Dark";
  document.getElementById("theme").setAttribute("aria-label", theme === "dark" ? "Switch to light" : "Switch to dark");
  for (const host of redraws) host.refresh();
}

function setUpTheme() {
  dark.addEventListener("change", applyTheme);
  document.getElementById("theme").addEventListener("click", () => {
    choose("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    applyTheme();
  });
  applyTheme();
}

// A labelled control.
function field(label, control, wide) {
  return el("label", { class: wide ? "field wide" : "field" }, el("span", {}, label), control);
}

function selectBox(name, options, onchange, fallback) {
  const values = options.map((option) => option.value);
  const wanted = choice(name, fallback);
  const current = values.includes(wanted) ? wanted : values[0];
  choose(name, current);
  const box = el("select", { id: `choose-${name}` });
  for (const option of options)
    box.append(el("option", { value: option.value, selected: option.value === current }, option.label));
  box.addEventListener("change", () => {
    choose(name, box.value);
    onchange(box.value);
  });
  return box;
}

function checkBox(name, label, fallback, onchange) {
  const box = el("input", { type: "checkbox", id: `check-${name}`, checked: choice(name, fallback) });
  box.addEventListener("change", () => {
    choose(name, box.checked);
    onchange(box.checked);
  });
  return el("label", { class: "check" }, box, label);
}

function panel(id, title, about, ...children) {
  return el(
    "section",
    { class: "panel", id, "aria-labelledby": `${id}-title` },
    el("header", {}, el("h2", { id: `${id}-title` }, title), about ? el("p", {}, about) : null),
    children,
  );
}
