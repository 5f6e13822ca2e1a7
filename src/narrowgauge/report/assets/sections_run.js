// Sections about runs: the runs in numbers, their curves, the loss scale and what was skipped.

function tile(name, value, small) {
  return value === ""
    ? null
    : el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, value, small ? el("small", {}, small) : null));
}

// Many runs are a table; a few have room for their numbers, settings and samples.
const FEW = 4;

function runsTable(data) {
  const rows = data.runs.map((run) => ({ ...run.summary, ...run, of: `${count(run.step)} of ${count(run.planned)}` }));
  const columns = [
    { key: "name", title: "run" },
    { key: "state", title: "state" },
    { key: "step", title: "steps", text: (v, row) => row.of },
    { key: "loss_last", title: "loss", text: (v) => number(v) },
    { key: "loss_eval", title: "evaluation", text: (v) => number(v) },
    { key: "tokens_per_s", title: "speed", text: (v) => `${large(v)}/s` },
    { key: "skipped", title: "skipped", text: count },
    { key: "seconds", title: "time", text: seconds },
    { key: "folder", title: "folder" },
  ];
  return dataTable("runs", columns, rows);
}

function runsSection(data) {
  if (data.runs.length > FEW) return panel("runs", `${data.runs.length} runs`, null, runsTable(data).filter(Boolean));
  const runs = data.runs.map((run, index) => {
    const sum = run.summary;
    const planned = run.planned ? `of ${count(run.planned)}, ${run.state}` : run.state;
    const metrics = Object.entries(run.evals)
      .filter(([name]) => name !== "loss")
      .map(([name, points]) => tile(name, number(points[points.length - 1][1]), "evaluation"));
    const tiles = el(
      "dl",
      { class: "tiles" },
      tile("steps", count(run.step), planned),
      tile(
        "loss",
        sum.loss_last === null ? sum.loss_last_text : number(sum.loss_last),
        sum.loss_first === null ? "" : `from ${number(sum.loss_first)}`,
      ),
      tile("evaluation loss", number(sum.loss_eval)),
      metrics,
      tile("speed", sum.tokens_per_s === null ? "" : `${large(sum.tokens_per_s)}/s`, `${sum.unit}s`),
      tile("skipped updates", count(run.skipped), run.step ? percent(run.skipped / run.step) : ""),
      tile("parameters", sum.parameters === null ? "" : large(sum.parameters)),
      tile("time", seconds(run.seconds), run.device),
    );
    const facts = [...Object.entries(run.settings), ...Object.entries(run.facts), ...Object.entries(run.versions)];
    const more = el(
      "details",
      { class: "as-table" },
      el("summary", {}, "Settings, data and versions"),
      el(
        "div",
        { class: "scroll" },
        el(
          "table",
          {},
          el(
            "tbody",
            {},
            facts.map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", {}, value))),
          ),
        ),
      ),
    );
    const sample = run.sample
      ? el(
          "details",
          { class: "as-table" },
          el("summary", {}, "A sample of the model"),
          el("p", { class: "sample" }, run.sample),
        )
      : null;
    return el(
      "div",
      { class: "run" },
      el(
        "h3",
        {},
        el("span", {}, el("span", { class: "swatch", style: { background: color(index) } }), run.name),
        el("span", { class: "mono" }, run.folder),
      ),
      tiles,
      more,
      sample,
    );
  });
  return panel("runs", data.runs.length > 1 ? "Runs" : "Run", null, runs);
}

const SIGNALS = {
  loss: {
    label: "Loss",
    text: (v) => number(v),
    hint: "Drag to zoom, arrow keys to read, + and - to zoom, 0 for the whole run.",
  },
  grad_norm: { label: "Gradient norm", text: (v) => number(v, 3), log: true },
  lr: { label: "Learning rate", text: (v) => number(v, 3), stepped: true },
  tokens_per_s: { label: "Speed", text: (v) => large(v) },
};

function curvesSection(data) {
  const metrics = [...new Set(data.runs.flatMap((run) => Object.keys(run.evals)))].filter((name) => name !== "loss");
  const items = Object.entries(SIGNALS)
    .filter(([name]) => data.runs.some((run) => run.curves[name]))
    .map(([name, one]) => ({ key: name, label: one.label }));
  items.push(...metrics.map((name) => ({ key: `eval ${name}`, label: name })));
  const body = tabs("signal", "What is drawn", items, (key) =>
    key === "loss"
      ? lossChart(data)
      : key.startsWith("eval ")
        ? metricChart(data, key.slice(5))
        : signalChart(data, key),
  );
  return panel(
    "curves",
    "Curves",
    "The line is the mean of the steps around a place, the band reaches from their lowest to their highest.",
    body,
  );
}

// A few losses lie so far above the others that a linear axis would show one spike and a flat line.
function isSpiky(data) {
  const values = data.runs
    .flatMap((run) => (run.curves.loss ? run.curves.loss.hi || run.curves.loss.y : []))
    .filter((v) => v !== null)
    .sort((a, b) => a - b);
  const [least, most, usual] = [values[0], values[values.length - 1], values[Math.floor(values.length * 0.98)]];
  return values.length > 10 && least > 0 && most - least > 4 * (usual - least);
}

function lossChart(data) {
  const host = el("div");
  const name = "log-loss";
  const draw = () => {
    const inBand = new Set(data.bands.flatMap((band) => band.runs));
    const series = [];
    const place = (name) => data.runs.findIndex((run) => run.name === name);
    data.bands.forEach((band) => series.push({ ...band, color: color(place(band.runs[0])), group: true }));
    data.runs.forEach((run, index) => {
      if (!run.curves.loss || inBand.has(run.name)) return;
      series.push({
        name: run.name,
        ...run.curves.loss,
        color: color(index),
        broken: run.broken.loss,
      });
    });
    data.runs.forEach((run, index) => {
      const points = (run.evals.loss || []).filter((point) => point[1] !== null);
      if (points.length && !inBand.has(run.name))
        series.push({
          name: `${run.name}, evaluation`,
          x: points.map((p) => p[0]),
          y: points.map((p) => p[1]),
          points: true,
          color: color(index),
        });
    });
    const noise = noiseBands(data);
    const marks =
      data.runs.length === 1
        ? data.runs[0].marks
            .filter((mark) => mark.kind !== "checkpoint")
            .map((mark) => ({ step: mark.step, text: `${mark.kind} at step ${mark.step}` }))
        : [];
    host.replaceChildren(
      lineChart("loss", {
        label: `Loss over steps of ${series.length} curves`,
        series,
        yText: SIGNALS.loss.text,
        yLabel: "loss",
        log: choice(name, isSpiky(data)),
        bands: noise,
        marks,
        hint: SIGNALS.loss.hint,
      }),
    );
    forgetDetached();
  };
  draw();
  const notes = [];
  if (data.bands.length)
    notes.push(
      "Runs that differ in their seed alone are drawn as one: their mean, and a band from the lowest to the highest of " +
        `them (${data.bands.map((band) => band.name).join("; ")}).`,
    );
  if (data.runs.some((run) => run.broken.loss)) notes.push("A red triangle marks a loss that was inf or NaN.");
  return [
    el("div", { class: "controls" }, checkBox(name, "Logarithmic", isSpiky(data), draw)),
    host,
    notes.length ? el("p", { class: "note" }, notes.join(" ")) : null,
  ].filter(Boolean);
}

// Where a validation of the same task says how far the reference's own runs scatter at the end.
function noiseBands(data) {
  return data.validations
    .filter(
      (one) =>
        one.noise_band && one.losses && data.runs.some((run) => run.task === one.task && run.planned === one.steps),
    )
    .map((one) => {
      const known = one.losses.filter((loss) => loss !== null);
      const mean = known.reduce((a, b) => a + b, 0) / known.length;
      return {
        name: `${one.reference}, ${known.length} seeds at the end`,
        low: mean * (1 - one.noise_band),
        high: mean * (1 + one.noise_band),
      };
    });
}

function signalChart(data, key) {
  const one = SIGNALS[key];
  const series = data.runs
    .map(
      (run, index) =>
        run.curves[key] && {
          name: run.name,
          ...run.curves[key],
          color: color(index),
          stepped: one.stepped,
          broken: run.broken[key],
        },
    )
    .filter(Boolean);
  const positive = series.every((each) => (each.lo || each.y).every((v) => v === null || v > 0));
  return lineChart(key.replace("_", "-"), {
    label: `${one.label} over steps`,
    series,
    yText: one.text,
    yLabel: one.label.toLowerCase(),
    log: one.log && positive,
  });
}

function metricChart(data, name) {
  const series = data.runs.map((run, index) => {
    const points = (run.evals[name] || []).filter((point) => point[1] !== null);
    return {
      name: run.name,
      x: points.map((p) => p[0]),
      y: points.map((p) => p[1]),
      points: points.length < 60,
      color: color(index),
    };
  });
  return lineChart("metric", { label: `${name} over steps`, series, yText: (v) => number(v), yLabel: name });
}

function scaleSection(data) {
  const scaled = data.runs.filter(
    (run) => run.curves.loss_scale && (run.curves.loss_scale.y.some((v) => v !== 1) || run.skipped),
  );
  if (!scaled.length) return null;
  const series = scaled.map((run) => {
    const curve = run.curves.loss_scale;
    return {
      name: run.name,
      x: curve.x,
      y: curve.y,
      color: color(data.runs.indexOf(run)),
      stepped: true,
      skips: run.skips,
    };
  });
  const chart = lineChart("scale", {
    label: `Loss scale and skipped updates of ${scaled.length} runs`,
    series,
    log: true,
    powers: true,
    rug: true,
    yLabel: "loss scale",
    yText: (v) => (Number.isInteger(Math.log2(v)) ? power(Math.log2(v)) : number(v, 3)),
  });
  const words = scaled
    .map((run) => `${run.name}: ${count(run.skipped)} of ${count(run.step)} updates skipped`)
    .join("; ");
  return panel("scale", "Loss scale and skips", `Ticks along the bottom are skipped updates. ${words}.`, chart);
}
