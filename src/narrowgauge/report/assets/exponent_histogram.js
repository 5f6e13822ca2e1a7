// A histogram of a tensor's exponents with the range of every format above it, and a slider for the scale.
//
// The scale moves the bars; the ranges stay. Values left of a range are flushed to zero, values right of it overflow.

const RANGE_HEIGHT = 19;

// sample: [first exponent, counts, amax, scale it was read at, values, zeros, inf, nan, format]; shift: log2 of the scale
// that is applied to the values, after the scale they were read at has been removed.
function histogramChart(id, formats, sample, label) {
  const names = Object.keys(formats);
  const plot = el("div", { class: "plot", role: "img", "aria-label": label, "data-chart": id });
  const outcome = el("div", { class: "scroll" });
  const chart = { sample, shift: 0, format: names.includes("fp16") ? "fp16" : names[0] };

  function computeLosses(f) {
    const [first, counts, amax, scale] = chart.sample;
    return shares(first, counts, amax, f, chart.shift - Math.log2(scale));
  }

  function draw(width) {
    const [first, counts, , scale] = chart.sample;
    const own = first - Math.log2(scale);
    const height = 330;
    const box = { left: 44, right: width - 8, top: 30 + names.length * RANGE_HEIGHT, bottom: height - 36 };
    const low = Math.min(-46, own - 2);
    const high = Math.max(20, own + counts.length + 2);
    const x = linearScale(low, high, box.left, box.right);
    const total = counts.reduce((a, b) => a + b, 0) || 1;
    const most = Math.max(...counts, 1) / total;
    const y = linearScale(0, most * 1.06, box.bottom, box.top);
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
    drawing.append(
      ...axes(box, x, y, {
        xText: (v) => power(Math.round(v)),
        yText: (v) => percent(v),
        xLabel: "magnitude after scaling",
        yLabel: "share",
      }),
    );
    const f = formats[chart.format];
    const inside = makeClipGroup({ left: box.left, right: box.right, top: 0, bottom: box.bottom });
    counts.forEach((n, i) => {
      if (!n) return;
      const from = own + i + chart.shift;
      for (const [a, b, kind] of splitBin(from, f)) {
        inside.append(
          svg("rect", {
            x: x(a) + 0.5,
            width: Math.max(x(b) - x(a) - 1, 0.5),
            y: y(n / total),
            height: box.bottom - y(n / total),
            fill: `var(--${kind})`,
            opacity: 0.85,
            "data-kind": kind,
          }),
        );
      }
    });
    for (const limit of [f.flush, f.normal, f.most]) {
      if (limit > low && limit < high)
        inside.append(svg("line", { class: "limit", x1: x(limit), x2: x(limit), y1: 24, y2: box.bottom }));
    }
    names.forEach((name, index) =>
      inside.append(...drawRange(formats[name], name === chart.format, x, 26 + index * RANGE_HEIGHT, low, high)),
    );
    drawing.append(inside);
    plot.replaceChildren(drawing);
    updateTable();
  }

  function updateTable() {
    const head = ["format", "flushed to zero", "subnormal", "overflow"].map((title) =>
      el("th", { scope: "col" }, title),
    );
    const rows = names.map((name) => {
      const lost = computeLosses(formats[name]);
      return el(
        "tr",
        { "data-format": name },
        el("td", {}, formats[name].title),
        [lost.flushed, lost.subnormal, lost.overflow].map((share) => el("td", {}, percent(share))),
      );
    });
    outcome.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)));
  }

  drawWithin(plot, draw);
  chart.node = el(
    "figure",
    { class: "chart", id: `chart-${id}` },
    plot,
    el(
      "ul",
      { class: "legend" },
      [
        ["under", "flushed to zero"],
        ["subnormal", "subnormal: reduced precision"],
        ["normal", "in range"],
        ["over", "overflow"],
      ].map(([kind, text]) =>
        el("li", { class: "still" }, el("span", { class: "swatch", style: { background: `var(--${kind})` } }), text),
      ),
    ),
  );
  chart.outcome = outcome;
  chart.redraw = () => {
    plot.refresh();
    if (!plot.drawnWidth) updateTable();
  };
  updateTable();
  return chart;
}

// Splits the bin from 2**from to 2**(from + 1) at the format's limits.
function splitBin(from, f) {
  const edges = [from, ...[f.flush, f.normal, f.most].filter((limit) => limit > from && limit < from + 1), from + 1];
  return edges.slice(1).map((to, i) => {
    const middle = (edges[i] + to) / 2;
    const kind = middle < f.flush ? "under" : middle < f.normal ? "subnormal" : middle < f.most ? "normal" : "over";
    return [edges[i], to, kind];
  });
}

function drawRange(f, current, x, top, low, high) {
  const inView = (value) => x(clamp(value, low, high));
  const bar = (from, to, kind) =>
    svg("rect", {
      class: `window ${kind}${current ? " current" : ""}`,
      x: inView(from),
      width: Math.max(inView(to) - inView(from), 0),
      y: top,
      height: RANGE_HEIGHT - 6,
      rx: 2,
    });
  const text = svg(
    "text",
    { class: current ? "strong" : null, x: inView(Math.max(f.flush, low)) + 6, y: top + 10.5 },
    f.title,
  );
  return [bar(f.flush, f.normal, "subnormal"), bar(f.normal, f.most, "normal"), text];
}
