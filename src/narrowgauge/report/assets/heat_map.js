// A heat map over modules and steps, on a canvas that is only as tall as its visible part, because a model may have
// hundreds of rows. A cell is a byte: 0 for zero, 1 to 254 for 0.001% to 100% on a logarithmic scale, 255 for missing.

const ROW_HEIGHT = 17;
const LABEL_SHARE = 0.34;
const MISSING = 255;

function unpack(text, length) {
  const out = new Uint8Array(length);
  if (!text) return out;
  const raw = atob(text);
  for (let i = 0; i < length; i += 1) out[i] = raw.charCodeAt(i);
  return out;
}

const shareOf = (code) => (code === 0 ? 0 : code === MISSING ? NaN : 10 ** (((code - 1) / 253) * 5 - 5));

// data: {modules, cells (bytes, one row per module), steps: [[first, last]...], order, tint, label, name, hint,
// pick(module, steps)}; optional, for cells that are not shares: text(code), key (three texts), merged
function heatMap(id, data) {
  const columns = data.steps.length;
  const cellText = data.text || ((code) => percent(shareOf(code)));
  const order = data.order || data.modules.map((_, index) => index);
  const canvas = el("canvas", {
    role: "img",
    "aria-label": data.label,
    "data-chart": id,
    id: `plot-${id}`,
    tabindex: "0",
  });
  const room = el("div", { class: "room" }, canvas);
  const frame = el("div", { class: "heat" }, room);
  const readout = el("p", { class: "readout", "aria-live": "polite" });
  const axis = 22;
  let place = null;
  let at = null;

  drawWithin(frame, (width) => {
    const tall = order.length * ROW_HEIGHT + axis;
    const seen = Math.min(tall, 540);
    const dots = Math.min(devicePixelRatio || 1, 2);
    room.style.height = `${tall}px`;
    canvas.width = Math.round(width * dots);
    canvas.height = Math.round(seen * dots);
    canvas.style.height = `${seen}px`;
    place = { width, seen, dots, left: Math.round(Math.min(220, width * LABEL_SHARE)), colors: makeColors(data.tint) };
    paint();
  });

  function paint() {
    if (!place) return;
    const { width, seen, dots, left, colors } = place;
    const draw = canvas.getContext("2d");
    draw.setTransform(dots, 0, 0, dots, 0, 0);
    draw.clearRect(0, 0, width, seen);
    draw.font = `11.5px ${css("--mono")}`;
    draw.textBaseline = "middle";
    const wide = (width - left) / columns;
    const top = frame.scrollTop;
    const first = Math.max(0, Math.floor(top / ROW_HEIGHT));
    const last = Math.min(order.length, Math.ceil((top + seen - axis) / ROW_HEIGHT));
    for (let row = first; row < last; row += 1) {
      const y = row * ROW_HEIGHT - top;
      const base = order[row] * columns;
      for (let column = 0; column < columns; column += 1) {
        const code = data.cells[base + column];
        draw.fillStyle = code === MISSING ? colors.missing : colors.steps[code];
        const from = Math.floor(left + column * wide);
        draw.fillRect(from, y, Math.ceil(left + (column + 1) * wide) - from, ROW_HEIGHT - 1);
      }
      draw.fillStyle = at && at.row === row ? css("--ink") : css("--soft");
      draw.fillText(fitText(draw, data.modules[order[row]], left - 14), 6, y + ROW_HEIGHT / 2);
    }
    if (at) {
      draw.strokeStyle = css("--ink");
      draw.lineWidth = 1.5;
      draw.strokeRect(left + at.column * wide, at.row * ROW_HEIGHT - top, Math.max(wide, 2), ROW_HEIGHT - 1);
    }
    paintSteps(draw, left, wide);
  }

  function paintSteps(draw, left, wide) {
    const y = place.seen - axis;
    draw.fillStyle = css("--panel");
    draw.fillRect(0, y, place.width, axis);
    draw.fillStyle = css("--soft");
    draw.font = `11.5px ${css("--text")}`;
    const every = Math.max(1, Math.ceil(64 / wide));
    for (let column = 0; column < columns; column += every) {
      const text = large(data.steps[column][0]);
      const x = left + column * wide;
      if (x + draw.measureText(text).width < place.width) draw.fillText(text, x, y + axis / 2);
    }
    draw.fillText("step", 6, y + axis / 2);
  }

  function show(row, column, scroll) {
    at = row === null ? null : { row: clamp(row, 0, order.length - 1), column: clamp(column, 0, columns - 1) };
    if (at) {
      const module = data.modules[order[at.row]];
      const code = data.cells[order[at.row] * columns + at.column];
      const [first, last] = data.steps[at.column];
      const when = first === last ? `step ${count(first)}` : `${data.merged || "worst of"} steps ${count(first)} to ${count(last)}`;
      readout.replaceChildren(
        el("b", {}, module),
        ` ${when}: `,
        el("b", {}, code === MISSING ? "not sampled" : cellText(code)),
        ` ${data.name}`,
      );
      if (scroll) {
        const y = at.row * ROW_HEIGHT;
        if (y < frame.scrollTop) frame.scrollTop = y;
        if (y + ROW_HEIGHT > frame.scrollTop + place.seen - axis) frame.scrollTop = y + ROW_HEIGHT - place.seen + axis;
      }
    } else {
      readout.textContent = data.hint;
    }
    paint();
  }

  const under = (event) => {
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left - place.left;
    return [
      Math.floor((event.clientY - box.top + frame.scrollTop) / ROW_HEIGHT),
      Math.floor((x / (place.width - place.left)) * columns),
    ];
  };
  frame.addEventListener("scroll", paint);
  canvas.addEventListener("pointermove", (event) => place && show(...under(event), false));
  canvas.addEventListener("pointerleave", () => show(null));
  canvas.addEventListener("click", (event) => {
    if (!place) return;
    show(...under(event), false);
    data.pick(data.modules[order[at.row]], data.steps[at.column]);
  });
  canvas.addEventListener("keydown", (event) => {
    const now = at || { row: 0, column: columns };
    const page = Math.max(1, Math.floor((place.seen - axis) / ROW_HEIGHT) - 1);
    const moves = {
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
      PageUp: [-page, 0],
      PageDown: [page, 0],
      Home: [0, -columns],
      End: [0, columns],
    };
    if (event.key === "Enter" && at) data.pick(data.modules[order[at.row]], data.steps[at.column]);
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(now.row + moves[event.key][0], now.column + moves[event.key][1], true);
  });
  readout.textContent = data.hint;
  return el(
    "figure",
    { class: "chart", id: `chart-${id}` },
    frame,
    heatKey(data.tint, data.key || SHARE_KEY),
    readout,
    asTable(data.label, () => heatTable(data, order, columns, cellText)),
  );
}

function fitText(draw, text, width) {
  if (draw.measureText(text).width <= width) return text;
  let short = text;
  while (short.length > 3 && draw.measureText(`…${short}`).width > width) short = short.slice(1);
  return `…${short}`;
}

// A gradient from the panel color to the tint and on to the ink. Its lightness is monotonic, so that it also works in
// grayscale.
function makeColors(tint) {
  const [from, middle, to] = [css("--sunk"), css(tint), css("--ink")].map(rgb);
  const steps = [];
  for (let code = 0; code < MISSING; code += 1) {
    if (code === 0) {
      steps.push(css("--sunk"));
      continue;
    }
    const t = 0.1 + (0.9 * (code - 1)) / 253;
    const [a, b, u] = t < 0.72 ? [from, middle, t / 0.72] : [middle, to, ((t - 0.72) / 0.28) * 0.6];
    steps.push(`rgb(${a.map((one, i) => Math.round(one + (b[i] - one) * u)).join(",")})`);
  }
  return { steps, missing: css("--panel") };
}

function rgb(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

const SHARE_KEY = ["0.001%", "100%", "of a tensor's values, logarithmic; lightest: zero, blank: not sampled"];

function heatKey(tint, [low, high, about]) {
  const bar = el("canvas", { width: 254, height: 1, "aria-hidden": "true" });
  const box = el(
    "div",
    { class: "heat-key" },
    low,
    bar,
    high,
    el("span", {}, about),
  );
  drawWithin(box, () => {
    const draw = bar.getContext("2d");
    makeColors(tint)
      .steps.slice(1)
      .forEach((shade, i) => {
        draw.fillStyle = shade;
        draw.fillRect(i, 0, 1, 1);
      });
  });
  return box;
}

function heatTable(data, order, columns, cellText) {
  const every = Math.max(1, Math.ceil(columns / 8));
  const shown = [];
  for (let column = 0; column < columns; column += every) shown.push(column);
  if (shown[shown.length - 1] !== columns - 1) shown.push(columns - 1);
  const rows = order.map((row) => [
    data.modules[row],
    ...shown.map((column) => {
      const code = data.cells[row * columns + column];
      return code === MISSING ? "" : cellText(code);
    }),
  ]);
  return { columns: ["module", ...shown.map((column) => `step ${data.steps[column][0]}`)], rows };
}
