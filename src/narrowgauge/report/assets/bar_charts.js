// Bar charts of benchmarks, and the gaps of validations with their intervals.

const BAR_HEIGHT = 30;

// rows: {name, value, low, high, text}
function barChart(id, label, rows, options = {}) {
  const plot = el("div", { class: "plot", role: "img", "aria-label": label, "data-chart": id });
  drawWithin(plot, (width) => {
    const left = Math.min(170, width * 0.36);
    const most = Math.max(...rows.map((row) => row.high || row.value || 0), 1e-300);
    const x = linearScale(0, most * 1.02, left, width - 96);
    const height = rows.length * BAR_HEIGHT + 8;
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
    rows.forEach((row, index) => {
      const y = index * BAR_HEIGHT + 4;
      drawing.append(
        svg("text", { class: "strong", x: left - 8, y: y + 16, "text-anchor": "end" }, shorten(row.name, left)),
        svg("rect", {
          x: left,
          y,
          width: Math.max(x(row.value || 0) - left, 1),
          height: BAR_HEIGHT - 9,
          rx: 2,
          fill: row.color || color(0),
          opacity: 0.85,
        }),
      );
      if (row.low && row.high) {
        const middle = y + (BAR_HEIGHT - 9) / 2;
        drawing.append(
          svg("line", {
            class: "whisker",
            stroke: "var(--ink)",
            x1: x(row.low),
            x2: x(row.high),
            y1: middle,
            y2: middle,
          }),
        );
      }
      drawing.append(svg("text", { x: x(row.high || row.value || 0) + 8, y: y + 16 }, row.text));
    });
    plot.replaceChildren(drawing);
  });
  return el("figure", { class: "chart", id: `chart-${id}` }, plot, options.table || null);
}

function shorten(text, room) {
  const most = Math.max(4, Math.floor(room / 7.2));
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

// rows: {name, gap, low, high, verdict}; margin: the largest equivalent gap; band: the reference's deviation over seeds
function gapChart(id, label, rows, margin, band) {
  const plot = el("div", { class: "plot", role: "img", "aria-label": label, "data-chart": id });
  drawWithin(plot, (width) => {
    // On a phone a name stands above its interval, where it has the whole width.
    const narrow = width < 520;
    const left = narrow ? 12 : Math.min(220, width * 0.34);
    const rowHeight = narrow ? 50 : 38;
    const known = rows
      .flatMap((row) => [row.gap, row.low, row.high])
      .filter((value) => value !== null && value !== undefined);
    const reach = Math.max(margin * 1.5, ...known.map(Math.abs)) * 1.08 || 0.01;
    const height = rows.length * rowHeight + 52;
    const box = { left, right: width - 14, top: 18, bottom: height - 34 };
    const x = linearScale(-reach, reach, box.left, box.right);
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
    drawing.append(
      svg("rect", {
        class: "margin",
        x: x(-margin),
        width: x(margin) - x(-margin),
        y: box.top,
        height: box.bottom - box.top,
      }),
      svg(
        "text",
        { x: x(0), y: box.top - 5, "text-anchor": "middle" },
        `equivalent: within ${signed(margin).replace("+", "±")}`,
      ),
    );
    const axis = svg(
      "g",
      { class: "axis" },
      svg("path", { d: `M${box.left},${box.bottom}H${box.right}` }),
      svg("line", { x1: x(0), x2: x(0), y1: box.top, y2: box.bottom }),
    );
    for (const tick of x.ticks(Math.max(4, Math.floor((box.right - box.left) / 85)))) {
      axis.append(svg("line", { x1: x(tick), x2: x(tick), y1: box.bottom, y2: box.bottom + 4 }));
      drawing.append(svg("text", { x: x(tick), y: box.bottom + 17, "text-anchor": "middle" }, signed(tick)));
    }
    drawing.append(axis);
    rows.forEach((row, index) => {
      const y = box.top + (narrow ? 34 : 20) + index * rowHeight;
      const tint =
        row.verdict === "worse" ? "var(--serious)" : row.verdict === "inconclusive" ? "var(--warning)" : "var(--good)";
      if (narrow) {
        const room = width - 24 - 7.2 * (row.verdict.length + 2);
        drawing.append(
          svg("text", { class: "strong", x: left, y: y - 13 }, shorten(row.name, room)),
          svg("text", { x: box.right, y: y - 13, "text-anchor": "end" }, row.verdict),
        );
      } else
        drawing.append(
          svg("text", { class: "strong", x: left - 10, y: y + 1, "text-anchor": "end" }, shorten(row.name, left)),
          svg("text", { x: left - 10, y: y + 14, "text-anchor": "end" }, row.verdict),
        );
      if (row.low !== null && row.low !== undefined) {
        drawing.append(
          svg("line", { class: "whisker", stroke: tint, x1: x(row.low), x2: x(row.high), y1: y, y2: y }),
          ...[row.low, row.high].map((end) =>
            svg("line", { class: "whisker", stroke: tint, x1: x(end), x2: x(end), y1: y - 5, y2: y + 5 }),
          ),
        );
      }
      if (row.gap !== null && row.gap !== undefined)
        drawing.append(svg("circle", { class: "dot", cx: x(row.gap), cy: y, r: 5, fill: tint }));
    });
    plot.replaceChildren(drawing);
  });
  const own =
    band === null || band === undefined
      ? null
      : el(
          "p",
          { class: "note" },
          `Noise: the reference has a standard deviation of ${percent(band)} over seeds. ` +
            "Pairs with the same seed cancel most of it.",
        );
  return el("figure", { class: "chart", id: `chart-${id}` }, plot, own);
}
