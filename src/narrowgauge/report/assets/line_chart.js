// Curves over steps: a smoothed line in a band of its extremes, with hover, zoom and keyboard control.
//
// series: {name, x, y, lo, hi, per, color, dash, dashed, points (drawn as dots), stepped, group (band over seeds), nonfinite}

function lineChart(id, options) {
  const series = options.series.filter((one) => one.x.length);
  const view = choice(`view-${id}`, null);
  const state = { view, at: null, hidden: choice(`hidden-${id}`, new Set()) };
  const plot = el("div", {
    class: "plot",
    tabindex: "0",
    role: "img",
    "aria-label": options.label,
    "data-chart": id,
    id: `plot-${id}`,
  });
  const readout = el("p", { class: "readout", "aria-live": "polite" });
  const reset = el(
    "button",
    { type: "button", class: "quiet", hidden: true, onclick: () => zoomTo(null) },
    "Whole run",
  );
  let shown = null;

  function domain() {
    const xs = series
      .filter((one) => !state.hidden.has(one.name))
      .flatMap((one) => [one.x[0], one.x[one.x.length - 1]]);
    const room = options.dodge ? 0.5 : 0;
    return xs.length ? [Math.min(...xs) - room, Math.max(...xs) + room] : [0, 1];
  }

  function zoomTo(range) {
    const [low, high] = domain();
    state.view =
      range && range[1] - range[0] > (high - low) / 1e5 && (range[0] > low || range[1] < high) ? range : null;
    choose(`view-${id}`, state.view);
    plot.refresh();
  }

  drawWithin(plot, (width) => {
    shown = drawCurves(plot, width, series, options, state, domain());
    reset.hidden = !state.view;
    point(state.at);
  });

  // Shows the values nearest to a step.
  function point(step) {
    state.at = step;
    if (!shown) return;
    shown.cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
    const place = step === null ? domain()[1] : step;
    shown.cursor.setAttribute("transform", `translate(${clamp(shown.x(place), shown.box.left, shown.box.right)},0)`);
    readout.replaceChildren(
      el(
        "b",
        {},
        step === null ? options.endName || "at the end" : `${options.xName || "step"} ${count(Math.round(step))}`,
      ),
    );
    for (const one of series) {
      if (state.hidden.has(one.name)) continue;
      const i = nearestIndex(one.x, place);
      const range =
        one.lo && one.lo[i] !== null && one.lo[i] !== one.hi[i]
          ? ` (${options.yText(one.lo[i])} to ${options.yText(one.hi[i])})`
          : "";
      const value = one.y[i] === null ? "not finite" : options.yText(one.y[i]);
      readout.append(
        el(
          "span",
          { class: "value" },
          swatch(one),
          `${one.name} `,
          el("b", {}, value),
          range,
        ),
      );
    }
  }

  const legend = el(
    "ul",
    { class: "legend" },
    series.map((one) => {
      const button = el(
        "button",
        { type: "button", "aria-pressed": String(!state.hidden.has(one.name)) },
        swatch(one),
        one.name,
      );
      button.addEventListener("click", () => {
        if (state.hidden.has(one.name)) state.hidden.delete(one.name);
        else state.hidden.add(one.name);
        choose(`hidden-${id}`, state.hidden);
        button.setAttribute("aria-pressed", String(!state.hidden.has(one.name)));
        plot.refresh();
      });
      return el("li", {}, button);
    }),
  );

  addListeners(plot, () => shown, { state, domain, point, zoomTo });
  point(null);
  return el(
    "figure",
    { class: "chart", id: `chart-${id}` },
    plot,
    el("div", { class: "controls" }, legend, reset),
    readout,
    options.hint ? el("p", { class: "note" }, options.hint) : null,
    asTable(options.label, () => makeTable(series, options)),
  );
}

function nearestIndex(xs, value) {
  let [low, high] = [0, xs.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - xs[low - 1] < xs[low] - value ? low - 1 : low;
}

// Pointer and keys: hovering shows values, dragging zooms, arrows move the cursor, + and - zoom, 0 and Escape reset.
function addListeners(plot, shownNow, chart) {
  let from = null;
  const place = (event) => {
    const shown = shownNow();
    const box = plot.getBoundingClientRect();
    return { shown, pixel: clamp(event.clientX - box.left, shown.box.left, shown.box.right) };
  };
  plot.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && shownNow()) from = place(event).pixel;
  });
  plot.addEventListener("pointermove", (event) => {
    if (!shownNow()) return;
    const { shown, pixel } = place(event);
    chart.point(shown.x.invert(pixel));
    if (from === null || Math.abs(pixel - from) < 4) return;
    shown.select.setAttribute("visibility", "visible");
    shown.select.setAttribute("x", Math.min(from, pixel));
    shown.select.setAttribute("width", Math.abs(pixel - from));
  });
  const end = (event) => {
    if (from === null || !shownNow()) return;
    const { shown, pixel } = place(event);
    shown.select.setAttribute("visibility", "hidden");
    if (event.type === "pointerup" && Math.abs(pixel - from) >= 8) {
      chart.zoomTo([shown.x.invert(Math.min(from, pixel)), shown.x.invert(Math.max(from, pixel))]);
    }
    from = null;
  };
  plot.addEventListener("pointerup", end);
  plot.addEventListener("pointercancel", end);
  plot.addEventListener("pointerleave", (event) => {
    if (from === null && event.pointerType === "mouse") chart.point(null);
  });
  plot.addEventListener("dblclick", () => chart.zoomTo(null));
  plot.addEventListener("keydown", (event) => {
    const [low, high] = chart.state.view || chart.domain();
    const at = chart.state.at === null ? (low + high) / 2 : chart.state.at;
    const step = Math.max((high - low) / 100, 1);
    const around = (span) => [Math.max(at - span / 2, chart.domain()[0]), Math.min(at + span / 2, chart.domain()[1])];
    const moves = {
      ArrowRight: () => chart.point(clamp(at + step, low, high)),
      ArrowLeft: () => chart.point(clamp(at - step, low, high)),
      Home: () => chart.point(low),
      End: () => chart.point(high),
      "+": () => chart.zoomTo(around((high - low) / 2)),
      "=": () => chart.zoomTo(around((high - low) / 2)),
      "-": () => chart.zoomTo(around((high - low) * 2)),
      0: () => chart.zoomTo(null),
      Escape: () => {
        chart.zoomTo(null);
        chart.point(null);
      },
    };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    moves[event.key]();
  });
}

function makeTable(series, options) {
  const columns = [options.xName || "step"];
  const rows = new Map();
  series.forEach((one, index) => {
    columns.push(one.name);
    const every = Math.max(1, Math.ceil(one.x.length / 100));
    one.x.forEach((x, i) => {
      if (i % every !== 0 && i !== one.x.length - 1) return;
      const row = rows.get(x) || { 0: x };
      row[index + 1] = one.y[i] === null ? "not finite" : Number(one.y[i].toPrecision(6));
      rows.set(x, row);
    });
  });
  return { columns, rows: [...rows.values()].sort((a, b) => a[0] - b[0]) };
}
