// Draws curves with axes, bands and marks, downsampled to the available pixels.

const CHART_HEIGHT = 300;

function drawCurves(plot, width, series, options, state, whole_) {
  const height = options.height || CHART_HEIGHT;
  const box = { left: 58, right: width - 10, top: 22, bottom: height - 38 };
  const [x0, x1] = state.view || whole_;
  const x = linearScale(x0, x1 === x0 ? x0 + 1 : x1, box.left, box.right);
  const visible = series.filter((one) => !state.hidden.has(one.name));
  const binned = visible.map((one) =>
    one.points || one.stepped ? clipSeries(one, x0, x1) : binByPixel(one, x0, x1, box.right - box.left),
  );
  const bands = (options.bands || []).filter((band) => !options.log || band.low > 0);
  const values = binned
    .flatMap((one) => [...one.y, ...(one.lo || []), ...(one.hi || [])])
    .concat(bands.flatMap((b) => [b.low, b.high]))
    .filter((value) => value !== null && Number.isFinite(value) && (!options.log || value > 0));
  let low = values.length ? values.reduce((a, b) => Math.min(a, b)) : options.log ? 1 : 0;
  let high = values.length ? values.reduce((a, b) => Math.max(a, b)) : low + 1;
  if (low === high)
    [low, high] = options.log
      ? [low / 2, high * 2]
      : [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1];
  const room = (high - low) * 0.04;
  const y = options.log
    ? logScale(low * 0.95, high * 1.05, box.bottom, box.top)
    : linearScale(low - room, high + room, box.bottom, box.top);
  if (options.log && options.powers) y.ticks = (wanted) => powerTicks(low, high, wanted);
  if (options.whole) {
    const ticks = x.ticks;
    x.ticks = (wanted) => wholeTicks(ticks(wanted));
  }
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
  drawing.append(
    ...axes(box, x, y, {
      xText: (v) => large(v),
      yText: options.yText,
      xLabel: options.xName || "step",
      yLabel: options.yLabel,
    }),
  );
  const inside = makeClipGroup({ left: box.left, right: box.right + 5, top: box.top - 4, bottom: box.bottom + 4 });
  for (const band of bands) {
    inside.append(
      svg("rect", {
        class: "margin",
        x: box.left,
        width: box.right - box.left,
        y: y(band.high),
        height: Math.max(1, y(band.low) - y(band.high)),
      }),
    );
    drawing.append(svg("text", { x: box.right - 4, y: y(band.high) - 4, "text-anchor": "end" }, band.name));
  }
  for (const mark of options.marks || []) {
    if (mark.step >= x0 && mark.step <= x1)
      inside.append(
        svg(
          "line",
          { class: "mark", x1: x(mark.step), x2: x(mark.step), y1: box.top, y2: box.bottom },
          svg("title", {}, mark.text),
        ),
      );
  }
  binned.forEach((one, index) => {
    // Points that would overlap are drawn side by side.
    const aside = options.dodge ? (index - (visible.length - 1) / 2) * 10 : 0;
    inside.append(...drawSeries(visible[index], one, (value) => x(value) + aside, y, options));
  });
  const skips = options.rug ? drawSkips(visible, x, x0, x1, box) : [];
  const cursor = svg(
    "g",
    { class: "cursor", visibility: "hidden" },
    svg("line", { x1: 0, x2: 0, y1: box.top, y2: box.bottom }),
  );
  const select = svg("rect", { class: "select", y: box.top, height: box.bottom - box.top, visibility: "hidden" });
  drawing.append(inside, ...skips, select, cursor);
  plot.replaceChildren(drawing);
  return { box, x, cursor, select };
}

function drawSeries(one, drawn, x, y, options) {
  const parts = [];
  const ok = (value) => value !== null && Number.isFinite(value) && (!options.log || value > 0);
  if (drawn.lo && drawn.x.length > 1) {
    for (const run of findSegments(drawn, (i) => ok(drawn.lo[i]) && ok(drawn.hi[i]))) {
      const top = run.map((i) => `${x(drawn.x[i]).toFixed(1)},${y(drawn.hi[i]).toFixed(1)}`);
      const bottom = run.map((i) => `${x(drawn.x[i]).toFixed(1)},${y(drawn.lo[i]).toFixed(1)}`).reverse();
      parts.push(svg("path", { class: "area", d: `M${top.join("L")}L${bottom.join("L")}Z`, fill: one.color, stroke: one.color }));
    }
  }
  if (!one.points) {
    for (const run of findSegments(drawn, (i) => ok(drawn.y[i]))) {
      const link = one.stepped
        ? (p, i, n) => (n ? `H${x(drawn.x[i]).toFixed(1)}V${p[1]}` : p.join(","))
        : (p) => p.join(",");
      const path = run
        .map((i, n) => link([x(drawn.x[i]).toFixed(1), y(drawn.y[i]).toFixed(1)], i, n))
        .join(one.stepped ? "" : "L");
      const dashes = one.dash && !one.dashed ? { "stroke-dasharray": one.dash } : {};
      parts.push(
        svg("path", { class: one.dashed ? "curve second" : "curve", d: `M${path}`, stroke: one.color, ...dashes }),
      );
    }
  }
  if (one.points || drawn.x.length === 1) {
    for (let i = 0; i < drawn.x.length; i += 1) {
      if (ok(drawn.y[i]))
        parts.push(svg("circle", { class: "dot", cx: x(drawn.x[i]), cy: y(drawn.y[i]), r: 3.6, fill: one.color }));
    }
  }
  for (const [step, n] of one.nonfinite || []) {
    parts.push(
      svg(
        "path",
        { class: "nonfinite", d: `M${x(step) - 4},20h8l-4,7z` },
        svg("title", {}, `${one.name}: not finite at step ${step}${n > 1 ? ` (${n} steps)` : ""}`),
      ),
    );
  }
  return parts;
}

// Skipped updates, as ticks below the curve.
function drawSkips(visible, x, x0, x1, box) {
  const ticks = [];
  for (const one of visible) {
    for (const [step, n] of one.skips || []) {
      if (step < x0 || step > x1) continue;
      const at = Math.round(x(step)) + 0.5;
      ticks.push(
        svg(
          "line",
          { class: "tick-skip", x1: at, x2: at, y1: box.bottom - 9, y2: box.bottom },
          svg("title", {}, `step ${step}: ${n} skipped`),
        ),
      );
    }
  }
  return ticks;
}

function powerTicks(low, high, wanted) {
  const [from, to] = [Math.floor(Math.log2(low)), Math.ceil(Math.log2(high))];
  const every = Math.max(1, Math.ceil((to - from) / Math.max(wanted, 1)));
  const ticks = [];
  for (let e = from; e <= to; e += every) ticks.push(2 ** e);
  return ticks;
}

function clipSeries(one, x0, x1) {
  const inside = one.x.map((_, i) => i).filter((i) => one.x[i] >= x0 && one.x[i] <= x1);
  const pick = (list) => list && inside.map((i) => list[i]);
  return { x: pick(one.x), y: pick(one.y), lo: pick(one.lo), hi: pick(one.hi) };
}

// Reduces a curve to the available pixels and smooths it: the moving average over a sixtieth of the view, in a band
// from the minimum to the maximum.
function binByPixel(one, x0, x1, pixels) {
  const all = clipSeries(one, x0, x1);
  const most = Math.max(2, Math.floor(pixels / 1.5));
  if (all.x.length < 120) return all;
  const bins = Math.min(most, all.x.length);
  const out = { x: [], y: [], lo: [], hi: [] };
  for (let b = 0; b < bins; b += 1) {
    const [from, to] = [Math.floor((b * all.x.length) / bins), Math.floor(((b + 1) * all.x.length) / bins)];
    let sum = 0,
      n = 0,
      low = Infinity,
      high = -Infinity;
    for (let i = from; i < to; i += 1) {
      if (all.y[i] === null) continue;
      sum += all.y[i];
      n += 1;
      low = Math.min(low, all.lo ? all.lo[i] : all.y[i]);
      high = Math.max(high, all.hi ? all.hi[i] : all.y[i]);
    }
    out.x.push(all.x[Math.floor((from + to - 1) / 2)]);
    out.y.push(n ? sum / n : null);
    out.lo.push(n ? low : null);
    out.hi.push(n ? high : null);
  }
  if (one.group) return out;
  const reach = Math.max(1, Math.round(bins / 120));
  out.y = out.y.map((value, i) => {
    if (value === null) return null;
    const near = out.y.slice(Math.max(0, i - reach), i + reach + 1).filter((v) => v !== null);
    return near.reduce((a, b) => a + b, 0) / near.length;
  });
  return out;
}

function findSegments(drawn, ok) {
  const runs = [];
  let run = [];
  for (let i = 0; i < drawn.x.length; i += 1) {
    if (ok(i)) run.push(i);
    else if (run.length) {
      runs.push(run);
      run = [];
    }
  }
  if (run.length) runs.push(run);
  return runs;
}
